// Animalstore keeps the catalogue of animals of a shop and serves it as JSON over HTTP.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"database/sql"
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
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(200) // the heap is only a few MiB: collect it half as often
	}
	signal.Ignore(syscall.SIGPIPE) // otherwise a write to a log that nobody reads any more would end the process
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	os.Exit(run(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr))
}

// run does what the command line says, until ctx is cancelled. It reports an error in one line on stderr, and returns the
// exit status: 0 if there is no error, 2 if the command line is wrong, and 1 after any other error.
func run(ctx context.Context, args []string, lookupEnv func(string) (string, bool), stdout, stderr io.Writer) int {
	lines := newLogWriter(stderr)
	defer lines.close()
	end := func(status int, what string, err error) int {
		if err == nil {
			return 0
		}
		fmt.Fprintln(lines, "animalstore:", strings.Join(strings.Fields(what+err.Error()), " ")) // file names may contain line breaks
		return status
	}
	c, err := parseFlags(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return end(2, "", fmt.Errorf("%w (-h shows all settings)", err))
	case c.version:
		fmt.Fprintln(stdout, "animalstore", buildVersion())
		return 0
	case c.backup != "":
		return end(1, fmt.Sprintf("-backup %q of -db %q: ", c.backup, c.db), backup(ctx, c.db, c.backup))
	case c.restore != "":
		return end(1, fmt.Sprintf("-restore %q to -db %q: ", c.restore, c.db), restore(ctx, c.db, c.restore))
	}
	return end(1, "", c.serve(ctx, lookupEnv, slog.New(slog.NewTextHandler(lines, nil))))
}

// config holds the command-line flags.
type config struct {
	addr, db, keysFile, tlsCert, tlsKey, backup, restore string
	version                                              bool
}

// parseFlags parses args and makes the paths of databases absolute. For -h it prints the help and returns flag.ErrHelp.
func parseFlags(args []string, stdout io.Writer) (c config, err error) {
	flags := flag.NewFlagSet("animalstore", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.addr, "addr", "127.0.0.1:8080", "listen on `HOST:PORT`, unless systemd passes a socket")
	flags.StringVar(&c.db, "db", "animalstore.db", "keep the animals in `FILE`, created on first use")
	flags.StringVar(&c.keysFile, "keys", "", "read API keys from `FILE`, one per line, in addition to $API_KEYS (comma-separated)")
	flags.StringVar(&c.tlsCert, "tls-cert", "", "serve HTTPS with the certificate chain in `FILE` (PEM)")
	flags.StringVar(&c.tlsKey, "tls-key", "", "read the private key for -tls-cert from `FILE` (PEM)")
	flags.StringVar(&c.backup, "backup", "", "write a copy of the database to the new `FILE` and exit")
	flags.StringVar(&c.restore, "restore", "", "replace all animals with those of the backup `FILE`, even while the service runs, and exit")
	flags.BoolVar(&c.version, "version", false, "print the version and exit")
	err = flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		flags.SetOutput(stdout)
		fmt.Fprint(stdout, "Animalstore serves a catalogue of animals over HTTP.\n\nUsage: animalstore [flags]\n\n")
		flags.PrintDefaults()
	}
	flags.Visit(func(f *flag.Flag) {
		if err == nil && f.Value.String() == "" {
			err = fmt.Errorf("-%s must not be empty", f.Name)
		}
	})
	switch {
	case err != nil:
		return c, err
	case flags.NArg() > 0:
		return c, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case c.backup != "" && c.restore != "":
		return c, errors.New("-backup and -restore exclude each other")
	case (c.tlsCert == "") != (c.tlsKey == ""):
		return c, errors.New("-tls-cert and -tls-key go together: give both or neither")
	}
	for _, file := range []*string{&c.db, &c.backup, &c.restore} {
		if *file != "" && err == nil {
			*file, err = filepath.Abs(*file)
		}
	}
	return c, err
}

// buildVersion returns the version of the module that the binary was built from, and that of Go.
func buildVersion() string {
	info, _ := debug.ReadBuildInfo()
	return info.Main.Version + " " + info.GoVersion
}

// serve runs the service until ctx is cancelled. It opens the database last, once all other settings have been checked.
func (c config) serve(ctx context.Context, lookupEnv func(string) (string, bool), log *slog.Logger) error {
	k, err := loadKeys(lookupEnv, c.keysFile)
	if err != nil {
		return err
	}
	ln, err := listen(lookupEnv, c.addr)
	if err != nil {
		return err
	}
	defer ln.Close()
	if tcp, _ := ln.Addr().(*net.TCPAddr); len(k) == 0 && (tcp == nil || !tcp.IP.IsLoopback()) { // nil: a Unix socket
		return errors.New("set API_KEYS or -keys: without a key the service listens on a loopback address only, such as 127.0.0.1")
	}
	scheme := "http://"
	if c.tlsCert != "" {
		cert, err := tls.LoadX509KeyPair(c.tlsCert, c.tlsKey)
		if err != nil {
			return fmt.Errorf("-tls-cert and -tls-key: %w", err)
		}
		scheme = "https://"
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}, GetConfigForClient: checkHello})
	}
	st, isNew, err := openStore(c.db)
	if err != nil {
		return fmt.Errorf("-db %q: %w", c.db, err)
	}
	if isNew {
		log.Warn("the database is new and empty", "database", c.db)
	}
	if len(k) == 0 {
		key := rand.Text()
		k.add(key)
		log.Info("no API key is set: made one for this run", "api_key", key)
	}
	log.Info("started", "url", scheme+ln.Addr().String(), "database", c.db, "keys", len(k), "version", buildVersion())
	err = newServer(st, k, log).serve(ctx, ln)
	err = errors.Join(err, st.close())
	if err == nil {
		log.Info("stopped")
	}
	return err
}

// checkHello refuses a TLS handshake that offers more than any real client does: crypto/tls would quote all of it in an error.
func checkHello(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	if len(hello.CipherSuites) > 500 || len(hello.SupportedProtos) > 50 {
		return nil, errors.New("the client offers too many cipher suites or protocols")
	}
	return nil, nil
}

// backup writes a consistent copy of the database at path, which may be in use, to the new file target.
func backup(ctx context.Context, path, target string) error {
	if suffix, ok := strings.CutPrefix(target, path); ok && slices.Contains(savedSuffixes, suffix) {
		return errors.New("the service gives this name to copies of its own; choose another one")
	}
	if err := cmp.Or(checkFile(path), checkFree(target)); err != nil {
		return err
	}
	db := openPool(path, "rw", 1)
	defer db.Close()
	if _, err := checkDatabase(db); err != nil {
		return explain(err)
	}
	return copyTo(ctx, db, target, false)
}

// restore replaces the content of the database at path, which may be in use, with that of the backup in the file source, in one
// transaction: other programs see all of it or, after an error, nothing. The database may be damaged, but not in its header.
func restore(ctx context.Context, path, source string) error {
	if err := cmp.Or(checkFile(path), checkFile(source)); err != nil {
		return err
	}
	from, to := openPool(source, "rw", 1), openPool(path, "rw", 1, openDamaged) // with "ro", SQLite would leave files beside source
	defer from.Close()
	defer to.Close()
	var id, pageSize int
	err := to.QueryRow("SELECT application_id, page_size FROM pragma_application_id, pragma_page_size").Scan(&id, &pageSize)
	if err == nil && id != applicationID {
		err = errForeign
	}
	if err = cmp.Or(checkLog(to, path), err); err != nil {
		return explain(err)
	}
	if err := checkBackup(ctx, from, pageSize); err != nil {
		return fmt.Errorf("the backup cannot be used: %w", err)
	}
	conn, err := from.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer to.Exec("PRAGMA busy_timeout(0); PRAGMA wal_checkpoint(TRUNCATE)") // or the log would stay as large as the backup
	return explain(conn.Raw(func(driver any) error {
		source := driver.(interface {
			NewBackup(string) (*sqlite.Backup, error)
		})
		pages, err := source.NewBackup(location(path, "rw", "busy_timeout(100)", openDamaged, "fullfsync(ON)"))
		if err != nil {
			return err
		}
		deadline := time.Now().Add(time.Minute) // to lock the database
		for more := true; more && err == nil; { // the last step commits
			more, err = pages.Step(1000)
			if more || sqliteCode(err) == sqlite3.SQLITE_BUSY && time.Now().Before(deadline) {
				more, err = true, ctx.Err()
			}
		}
		return cmp.Or(err, pages.Finish())
	}))
}

// checkBackup begins a read transaction on a pool of one connection, and returns an error unless the service could go on with
// the database in place of one with the given page size.
func checkBackup(ctx context.Context, db *sql.DB, pageSize int) error {
	if _, err := db.ExecContext(ctx, "BEGIN"); err != nil {
		return err
	}
	_, err := checkDatabase(db)
	if err == nil {
		err = (&store{readers: db, writer: db}).prepare()
	}
	if err != nil {
		return err
	}
	var fault string
	err = db.QueryRowContext(ctx, `SELECT CASE
		WHEN encoding <> 'UTF-8' THEN 'its text encoding is ' || encoding
		WHEN page_size <> ?1 THEN format('it has pages of %d bytes, and the database of %d', page_size, ?1)
		WHEN EXISTS (SELECT 1 FROM pets WHERE id < 1 OR typeof(name) <> 'text' OR length(name) NOT BETWEEN 1 AND 255
			OR typeof(category_id) <> 'integer' OR ifnull(status, '') NOT IN ('available', 'pending', 'sold')) THEN 'it has an animal that breaks a rule of the schema'
		ELSE integrity_check END FROM pragma_encoding, pragma_page_size, pragma_integrity_check`, pageSize).Scan(&fault)
	if err == nil && fault != "ok" {
		err = errors.New(fault)
	}
	return err
}

// checkFile returns an error unless the file at path can be a database. (SQLite takes a file of one byte for a new database, and
// deletes a write-ahead log beside it.)
func checkFile(path string) error {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() <= 1) {
		err = fmt.Errorf("%q is not a database of this service, but empty or not a regular file", path)
	}
	return err
}

// checkFree returns an error if there is a file at path, or one that SQLite would apply to a database there.
func checkFree(path string) error {
	for _, file := range []string{path, path + "-wal", path + "-journal"} {
		if _, err := os.Lstat(file); err == nil {
			return fmt.Errorf("%q exists already; name a new file", file)
		}
	}
	return nil
}

// listen returns the socket that systemd passes (sd_listen_fds(3)), or else a socket that listens on addr.
func listen(lookupEnv func(string) (string, bool), addr string) (ln net.Listener, err error) {
	pid, _ := lookupEnv("LISTEN_PID")
	count, _ := lookupEnv("LISTEN_FDS")
	if pid != strconv.Itoa(os.Getpid()) || count == "" || count == "0" {
		ln, err = net.Listen("tcp", addr)
		if errors.Is(err, syscall.EAFNOSUPPORT) { // as in a unit with RestrictAddressFamilies=none
			err = fmt.Errorf("%w: systemd passed no socket; restart the socket unit, too", err)
		}
		if err != nil {
			err = fmt.Errorf("-addr %q: %w", addr, err)
		}
		return ln, err
	}
	if count != "1" {
		return nil, fmt.Errorf("LISTEN_FDS is %q: only one socket can be served", count)
	}
	f := os.NewFile(3, "the socket from systemd") // 3 is the first file descriptor that systemd passes
	defer f.Close()
	return net.FileListener(f)
}

// logWriter is an io.Writer that never blocks, so that a stalled log cannot hold up a request: a goroutine does the
// writing. Lines that find the queue full are dropped, and their number is logged with a later line.
type logWriter struct {
	lines   chan []byte // nil ends the goroutine
	dropped atomic.Int64
	done    chan struct{}
}

func newLogWriter(w io.Writer) *logWriter {
	l := &logWriter{lines: make(chan []byte, 1024), done: make(chan struct{})}
	go l.run(w)
	return l
}

// Write queues a line, or drops it if the queue is full.
func (l *logWriter) Write(line []byte) (int, error) {
	select {
	case l.lines <- bytes.Clone(line):
	default:
		l.dropped.Add(1)
	}
	return len(line), nil
}

// run writes the queued lines in batches, at most one per millisecond: a system call for each line would slow requests.
func (l *logWriter) run(w io.Writer) {
	defer close(l.done)
	var batch bytes.Buffer
	for line := <-l.lines; line != nil; line = <-l.lines {
		if dropped := l.dropped.Swap(0); dropped > 0 {
			slog.New(slog.NewTextHandler(&batch, nil)).Warn("log lines were dropped", "lines", dropped)
		}
		batch.Write(line)
		if len(l.lines) == 0 || batch.Len() > 64<<10 {
			batch.WriteTo(w)
			batch.Reset() // after an error: the rest is lost
			time.Sleep(time.Millisecond)
		}
	}
	batch.WriteTo(w)
}

// close waits until the queued lines are written, but no longer than a second.
func (l *logWriter) close() {
	go func() { l.lines <- nil }()
	select {
	case <-l.done:
	case <-time.After(time.Second):
	}
}
