// Animalstore keeps a store's catalogue of animals and serves it over HTTP as JSON.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	debug.SetGCPercent(200) // the heap is a few MiB: let it grow a little more rather than scan it so often
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	ctx, stop := context.WithCancelCause(context.Background())
	go func() {
		stop(fmt.Errorf("%v", <-signals))
		<-signals  // To give a second signal its default effect back would not end a process that was
		os.Exit(1) // started with SIGINT ignored.
	}()
	os.Exit(run(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr))
}

// run is the program: it serves, or does what else the arguments ask for, until ctx ends. It returns the
// exit status, and tells an error in one line on stderr: 2 if the arguments alone show it, else 1.
func run(ctx context.Context, args []string, lookupEnv func(string) (string, bool), stdout, stderr io.Writer) int {
	c, err := parseFlags(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "animalstore: %s (-h shows all settings)\n", oneLine(err))
		return 2
	case c.version:
		fmt.Fprintln(stdout, version())
		return 0
	}
	lines := newLineWriter(stderr)
	defer lines.flush()
	log := slog.New(slog.NewTextHandler(lines, nil))
	if c.backup != "" {
		err = backup(ctx, c.db, c.backup)
	} else {
		err = c.serve(ctx, lookupEnv, log)
	}
	if err != nil {
		lines.flush()
		fmt.Fprintf(stderr, "animalstore: %s\n", oneLine(err))
		return 1
	}
	return 0
}

// oneLine returns the text of err without the line breaks that a file's name, say, may bring into it.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// config is what the command line says.
type config struct {
	addr, db, keys, tlsCert, tlsKey, backup string
	version                                 bool
}

// parseFlags reads the command line. If that asks for help, it writes it to stdout and returns flag.ErrHelp.
func parseFlags(args []string, stdout io.Writer) (c config, err error) {
	fs := flag.NewFlagSet("animalstore", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&c.addr, "addr", "localhost:8080", "listen on `HOST:PORT`, unless systemd hands over a socket")
	fs.StringVar(&c.db, "db", "animalstore.db", "keep the animals in `FILE`, created on first use")
	fs.StringVar(&c.keys, "keys", "", "read API keys from `FILE`, one a line; # begins a comment line")
	fs.StringVar(&c.tlsCert, "tls-cert", "", "serve HTTPS with the certificate chain in `FILE` (PEM)")
	fs.StringVar(&c.tlsKey, "tls-key", "", "the private key of -tls-cert in `FILE` (PEM)")
	fs.StringVar(&c.backup, "backup", "", "write a copy of the database to the new `FILE` and exit")
	fs.BoolVar(&c.version, "version", false, "print the version and exit")
	err = fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fs.SetOutput(stdout)
		fmt.Fprint(stdout, "Animalstore serves a catalogue of animals over HTTP.\n\nUsage: animalstore [flags]\n\n")
		fs.PrintDefaults()
		fmt.Fprint(stdout, `
API_KEYS in the environment holds API keys too, separated by commas. With no key
at all, a service on a loopback address makes one for this run and logs it.
`)
	}
	if err != nil {
		return c, err
	}
	if fs.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	fs.Visit(func(f *flag.Flag) {
		if f.Value.String() == "" {
			err = fmt.Errorf("-%s must not be empty", f.Name)
		}
	})
	if err != nil {
		return c, err
	}
	if (c.tlsCert == "") != (c.tlsKey == "") {
		return c, errors.New("-tls-cert and -tls-key go together: give both or neither")
	}
	_, port, err := net.SplitHostPort(c.addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return c, fmt.Errorf("-addr %q is not HOST:PORT: %w", c.addr, err)
	}
	return c, nil
}

// version returns the version of the module, the VCS revision and the Go version that the binary was built from.
func version() string {
	info, _ := debug.ReadBuildInfo()
	revision := "unknown revision"
	for _, setting := range info.Settings {
		switch {
		case setting.Key == "vcs.revision":
			revision = "revision " + setting.Value
		case setting.Key == "vcs.modified" && setting.Value == "true":
			revision += " with changes"
		}
	}
	return fmt.Sprintf("animalstore %s, %s, %s", info.Main.Version, revision, info.GoVersion)
}

// serve runs the service until ctx ends. All that can be wrong with the settings it finds before it touches
// the database.
func (c config) serve(ctx context.Context, lookupEnv func(string) (string, bool), log *slog.Logger) (err error) {
	k, err := loadKeys(lookupEnv, c.keys)
	if err != nil {
		return err
	}
	tlsConfig, err := c.loadTLS()
	if err != nil {
		return err
	}
	ln, err := listen(lookupEnv, c.addr)
	if err != nil {
		return err
	}
	defer ln.Close()
	madeKey := ""
	if len(k) == 0 {
		if tcp, ok := ln.Addr().(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
			return fmt.Errorf("set API_KEYS or -keys: %v is not a loopback address, so others can reach it", ln.Addr())
		}
		madeKey = rand.Text()
		k.add(madeKey)
	}
	st, err := openStore(c.db)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.close()) }()
	if madeKey != "" {
		log.Info("no API key is set: made one for this run", "api_key", madeKey)
	}
	log.Info("started", "address", ln.Addr().String(), "database", c.db, "keys", len(k))
	return newServer(st, k, log).serve(ctx, ln, tlsConfig)
}

// loadTLS returns the configuration for HTTPS, or nil for plain HTTP.
func (c config) loadTLS() (*tls.Config, error) {
	if c.tlsCert == "" {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(c.tlsCert, c.tlsKey)
	if err != nil {
		return nil, fmt.Errorf("-tls-cert and -tls-key: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, nil
}

// listen returns the socket that systemd hands over (sd_listen_fds(3)), or one that listens on addr.
func listen(lookupEnv func(string) (string, bool), addr string) (net.Listener, error) {
	pid, _ := lookupEnv("LISTEN_PID")
	count, _ := lookupEnv("LISTEN_FDS")
	if pid != strconv.Itoa(os.Getpid()) || count == "" || count == "0" {
		return net.Listen("tcp", addr)
	}
	if count != "1" {
		return nil, fmt.Errorf("LISTEN_FDS is %q: one socket can be served", count)
	}
	f := os.NewFile(3, "the socket handed over")
	defer f.Close()
	return net.FileListener(f)
}

// lineWriter writes log lines: each at once while they are few, those of a millisecond together when they are
// many, since a system call for each would be a good part of a request's cost. A crash can cost that millisecond.
type lineWriter struct {
	mu      sync.Mutex
	w       io.Writer
	buf     *bufio.Writer // on w
	flushed time.Time
	timer   *time.Timer // calls flush
}

// lineDelay is the longest that a lineWriter holds a line back.
const lineDelay = time.Millisecond

func newLineWriter(w io.Writer) *lineWriter {
	l := &lineWriter{w: w, buf: bufio.NewWriterSize(w, 64<<10)}
	l.timer = time.AfterFunc(lineDelay, l.flush)
	return l
}

// Write takes a line.
func (l *lineWriter) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.flushed) > lineDelay {
		defer l.flushLocked()
	} else if l.buf.Buffered() == 0 {
		l.timer.Reset(lineDelay)
	}
	return l.buf.Write(line)
}

func (l *lineWriter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
}

func (l *lineWriter) flushLocked() {
	if l.buf.Flush() != nil {
		l.buf.Reset(l.w) // or it would fail for ever: a full disk, say, may have room again
	}
	l.flushed = time.Now()
}
