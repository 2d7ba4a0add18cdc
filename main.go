// Animalstore keeps a shop's catalogue of animals and serves it as JSON over HTTP. In the code, as
// in paths and SQL, an animal is a pet.
//
// Read handlers.go next: it has the routes, and a handler for each. server.go calls the handlers,
// and sends and logs the responses. auth.go checks API keys, store.go keeps the animals in SQLite,
// and errors.go has the errors that clients see.
//
// The operations need little code. Most of the code keeps these promises:
//   - A 201 means that the pet is on disk. Group commit makes that fast (create in store.go).
//   - A client can repeat a request safely, with an Idempotency-Key.
//   - The operator may read and change the database with other programs while the service runs.
//     Lists show the changes within a second (cache in handlers.go, watch in store.go).
//   - No single request can block others for long, or take unlimited memory: the limits stand at
//     the top of server.go and handlers.go.
package main

import (
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
	"path/filepath"
	"runtime/debug"
	"syscall"
)

func main() {
	signal.Ignore(syscall.SIGPIPE) // a log that nobody reads any more must not end the process

	// This is never undone: a second signal, perhaps of a service manager, must not kill the
	// process before it exits by itself.
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)

	os.Exit(run(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr))
}

// run does what the command line says, until ctx is cancelled. lookupEnv is os.LookupEnv or a
// replacement.
//
// It reports an error on stderr, and returns the exit status: 0 if there is none, 2 if the command
// line is wrong, and 1 after any other error.
func run(
	ctx context.Context,
	args []string,
	lookupEnv func(string) (string, bool),
	stdout, stderr io.Writer,
) int {
	c, err := parseFlags(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "animalstore: %v (-h shows all settings)\n", err)
		return 2
	}

	switch {
	case c.version:
		fmt.Fprintln(stdout, "animalstore", buildVersion())
	case c.backup != "" || c.restore != "":
		err = runCopy(ctx, c)
	default:
		err = runService(ctx, c, lookupEnv, slog.New(slog.NewTextHandler(stderr, nil)))
	}
	if err != nil {
		fmt.Fprintln(stderr, "animalstore:", err)
		return 1
	}
	return 0
}

// config holds the command-line flags.
type config struct {
	addr     string
	db       string // an absolute path, as are backup and restore
	keysFile string
	tlsCert  string
	tlsKey   string
	backup   string
	restore  string
	version  bool
}

// parseFlags parses args. For -h it prints help on stdout and returns flag.ErrHelp.
func parseFlags(args []string, stdout io.Writer) (c config, err error) {
	flags := flag.NewFlagSet("animalstore", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.addr, "addr", "127.0.0.1:8080",
		"listen on `HOST:PORT`")
	flags.StringVar(&c.db, "db", "animalstore.db",
		"keep the animals in `FILE`, created on first use")
	flags.StringVar(&c.keysFile, "keys", "",
		"read API keys from `FILE`, one per line, besides those in $API_KEYS")
	flags.StringVar(&c.tlsCert, "tls-cert", "",
		"serve HTTPS with the certificate chain in `FILE` (PEM)")
	flags.StringVar(&c.tlsKey, "tls-key", "",
		"read the private key for -tls-cert from `FILE` (PEM)")
	flags.StringVar(&c.backup, "backup", "",
		"write a copy of the database to the new `FILE` and exit")
	flags.StringVar(&c.restore, "restore", "",
		"replace all animals with those of the backup `FILE` and exit")
	flags.BoolVar(&c.version, "version", false,
		"print the version and exit")

	err = flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, "Animalstore serves a catalogue of animals over HTTP.\n\n"+
			"Usage: animalstore [flags]\n\n")
		flags.SetOutput(stdout)
		flags.PrintDefaults()
	}
	if err != nil {
		return c, err
	}
	if flags.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}

	flags.Visit(func(f *flag.Flag) {
		if f.Value.String() == "" {
			err = fmt.Errorf("-%s must not be empty", f.Name)
		}
	})
	if err != nil {
		return c, err
	}
	if c.backup != "" && c.restore != "" {
		return c, errors.New("-backup and -restore exclude each other")
	}
	if (c.tlsCert == "") != (c.tlsKey == "") {
		return c, errors.New("-tls-cert and -tls-key go together: give both or neither")
	}

	for _, path := range []*string{&c.db, &c.backup, &c.restore} {
		if *path == "" {
			continue // not given
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return c, err
		}
	}
	return c, nil
}

// buildVersion returns the version of the module that the binary was built from, and that of
// Go.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version + " " + info.GoVersion
}

// runCopy makes or restores a backup. It ends early, and leaves nothing behind, if ctx is cancelled
// or the terminal is closed.
func runCopy(ctx context.Context, c config) error {
	if !signal.Ignored(syscall.SIGHUP) { // as it is under nohup
		ctx, _ = signal.NotifyContext(ctx, syscall.SIGHUP)
	}

	var task string
	var err error
	if c.backup != "" {
		task = fmt.Sprintf("-backup %q of -db %q", c.backup, c.db)
		err = explain(backup(ctx, c.db, c.backup))
	} else {
		task = fmt.Sprintf("-restore %q to -db %q", c.restore, c.db)
		err = restore(ctx, c.db, c.restore)
	}

	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx) // the signal; SQLite would call it "interrupted"
	}
	if err != nil {
		return fmt.Errorf("%s: %w", task, err)
	}
	return nil
}

// runService runs the service until ctx is cancelled. It opens the database last, so that a
// mistake in another setting changes nothing.
func runService(
	ctx context.Context,
	c config,
	lookupEnv func(string) (string, bool),
	logger *slog.Logger,
) error {
	list, isSet := lookupEnv("API_KEYS")
	k, err := loadKeys(list, isSet, c.keysFile)
	if err != nil {
		return err
	}

	ln, scheme, err := listen(c)
	if err != nil {
		return err
	}
	defer ln.Close()
	if len(k) == 0 && !ln.Addr().(*net.TCPAddr).IP.IsLoopback() {
		return errors.New("set API_KEYS or -keys: without a key, " +
			"-addr must be on loopback, such as 127.0.0.1:8080")
	}

	st, err := openStore(c.db, logger)
	if err != nil {
		return fmt.Errorf("-db %q: %w", c.db, err)
	}

	if len(k) == 0 {
		key := rand.Text() // so that `go run .` is all that a newcomer needs
		k.add(key)         // which is valid
		logger.Info("no API key is set: made one for this run", "api_key", key)
	}
	logger.Info("started",
		"url", scheme+ln.Addr().String(),
		"database", c.db,
		"keys", len(k),
		"version", buildVersion(),
	)

	socket, _ := lookupEnv("NOTIFY_SOCKET")
	if err := notifyReady(socket); err != nil {
		logger.Warn("systemd was not told that the service is ready", "error", err)
	}

	serveErr := newServer(routes(st, k), logger).serve(ctx, ln)
	closeErr := st.close()
	if err := errors.Join(serveErr, closeErr); err != nil {
		return err
	}
	logger.Info("stopped")
	return nil
}

// notifyReady tells systemd that the service has started, if its unit has Type=notify: see
// https://www.freedesktop.org/software/systemd/man/sd_notify.html. socket is "" if it has not.
func notifyReady(socket string) error {
	if socket == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = io.WriteString(conn, "READY=1")
	return err
}

// listen returns a listener on c.addr, with TLS if c says so, and the scheme of its URLs: http://
// or https://.
func listen(c config) (ln net.Listener, scheme string, err error) {
	ln, err = net.Listen("tcp", c.addr)
	if err != nil {
		return nil, "", fmt.Errorf("-addr %q: %w", c.addr, err)
	}
	if c.tlsCert == "" {
		return ln, "http://", nil
	}

	cert, err := tls.LoadX509KeyPair(c.tlsCert, c.tlsKey)
	if err != nil {
		ln.Close()
		return nil, "", fmt.Errorf("-tls-cert and -tls-key: %w", err)
	}
	tlsConfig := tls.Config{Certificates: []tls.Certificate{cert}} // no NextProtos: HTTP/1.1 only
	return tls.NewListener(ln, &tlsConfig), "https://", nil
}
