// Animalstore keeps the catalogue of animals of a shop and serves it as JSON over HTTP.
package main

import (
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
	"strings"
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(200) // the heap is only a few MiB: collect it half as often
	}
	// A write to a log that nobody reads any more must not end the process, and a second signal must not end a stop.
	signal.Ignore(syscall.SIGPIPE)
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	os.Exit(run(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr))
}

// run does what the command line says, until ctx is cancelled. It reports an error in one line on stderr, and returns
// the exit status: 0 if there is no error, 2 if the command line is wrong, and 1 after any other error.
func run(ctx context.Context, args []string, lookupEnv func(string) (string, bool), stdout, stderr io.Writer) int {
	lines := newLogWriter(stderr)
	defer lines.close()
	status, what := 1, ""
	c, err := parseFlags(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		status, err = 2, fmt.Errorf("%w (-h shows all settings)", err)
	case c.version:
		fmt.Fprintln(stdout, "animalstore", buildVersion())
	case c.backup != "":
		what = fmt.Sprintf("-backup %q of -db %q: ", c.backup, c.db)
		err = backup(ctx, c.db, c.backup)
	case c.restore != "":
		what = fmt.Sprintf("-restore %q to -db %q: ", c.restore, c.db)
		err = restore(ctx, c.db, c.restore)
	default:
		err = runService(ctx, c, lookupEnv, slog.New(slog.NewTextHandler(lines, nil)))
	}
	if err == nil {
		return 0
	}
	oneLine := strings.Join(strings.Fields(what+err.Error()), " ") // file names may contain line breaks
	fmt.Fprintln(lines, "animalstore:", oneLine)
	return status
}

// config holds the command-line flags.
type config struct {
	addr, db, keysFile, tlsCert, tlsKey, backup, restore string
	version                                              bool
}

// parseFlags parses args, and makes the path of the database absolute. For -h it prints help and returns flag.ErrHelp.
func parseFlags(args []string, stdout io.Writer) (c config, err error) {
	flags := flag.NewFlagSet("animalstore", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.addr, "addr", "127.0.0.1:8080", "listen on `HOST:PORT`")
	flags.StringVar(&c.db, "db", "animalstore.db", "keep the animals in `FILE`, created on first use")
	flags.StringVar(&c.keysFile, "keys", "", "read API keys from `FILE`, one per line, besides those in $API_KEYS")
	flags.StringVar(&c.tlsCert, "tls-cert", "", "serve HTTPS with the certificate chain in `FILE` (PEM)")
	flags.StringVar(&c.tlsKey, "tls-key", "", "read the private key for -tls-cert from `FILE` (PEM)")
	flags.StringVar(&c.backup, "backup", "", "write a copy of the database to the new `FILE` and exit")
	flags.StringVar(&c.restore, "restore", "", "replace all animals with those of the backup `FILE` and exit")
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
	c.db, err = filepath.Abs(c.db)
	return c, err
}

// buildVersion returns the version of the module that the binary was built from, and that of Go.
func buildVersion() string {
	info, _ := debug.ReadBuildInfo()
	return info.Main.Version + " " + info.GoVersion
}

// runService runs the service until ctx is cancelled. It opens the database once all other settings are checked.
func runService(ctx context.Context, c config, lookupEnv func(string) (string, bool), logger *slog.Logger) error {
	k, err := loadKeys(lookupEnv, c.keysFile)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", c.addr)
	if err != nil {
		return fmt.Errorf("-addr %q: %w", c.addr, err)
	}
	defer ln.Close()
	if len(k) == 0 && !ln.Addr().(*net.TCPAddr).IP.IsLoopback() {
		return errors.New("set API_KEYS or -keys: without a key, -addr must be on loopback, such as 127.0.0.1:8080")
	}
	scheme := "http://"
	if c.tlsCert != "" {
		cert, err := tls.LoadX509KeyPair(c.tlsCert, c.tlsKey)
		if err != nil {
			return fmt.Errorf("-tls-cert and -tls-key: %w", err)
		}
		scheme = "https://"
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{cert}})
	}
	st, isNew, err := openStore(c.db)
	if err != nil {
		return fmt.Errorf("-db %q: %w", c.db, err)
	}
	if isNew {
		logger.Warn("the database is new and empty", "database", c.db)
	}
	if len(k) == 0 {
		key := rand.Text()
		k.add(key)
		logger.Info("no API key is set: made one for this run", "api_key", key)
	}
	url := scheme + ln.Addr().String()
	logger.Info("started", "url", url, "database", c.db, "keys", len(k), "version", buildVersion())
	err = errors.Join(newServer(st, k, logger).serve(ctx, ln), st.close())
	if err == nil {
		logger.Info("stopped")
	}
	return err
}

// backup writes a consistent copy of the database at path, which may be in use, to the new file target. The copy gets
// that name once it is verified and on disk; after an error, nothing is left.
func backup(ctx context.Context, path, target string) error {
	if err := requireDatabaseFile(path); err != nil {
		return err
	}
	for _, file := range []string{target, target + "-wal", target + "-journal"} { // SQLite would apply the last two
		if _, err := os.Lstat(file); err == nil {
			return fmt.Errorf("%q exists already; name a new file", file)
		}
	}
	db := newPool(path, "rw", 1)
	defer db.Close()
	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", temp.Name()); err != nil {
		return explain(err)
	}
	written := newPool(temp.Name(), "rw", 1)
	err = verifyBackup(ctx, written)
	err = errors.Join(err, written.Close(), temp.Sync(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), target)
	}
	if err != nil {
		return err
	}
	if err = syncPath(filepath.Dir(target)); err != nil { // a loss of power could take the name away
		os.Remove(target)
	}
	return err
}

// restore replaces the content of the database at path, which may be in use, with that of the backup in the file
// source, in one transaction. After an error nothing is changed. The database may be damaged if its header is good.
func restore(ctx context.Context, path, source string) error {
	if err := cmp.Or(requireDatabaseFile(path), requireDatabaseFile(source)); err != nil {
		return err
	}
	into, _ := os.Stat(path)
	if backup, _ := os.Stat(source); os.SameFile(into, backup) {
		return errors.New("the backup is the database itself")
	}
	const damagedToo = "writable_schema(ON)" // lets SQLite open a database whose schema is damaged
	from := newPool(source, "rw", 1)         // with "ro", SQLite would leave files beside source
	defer from.Close()
	to := newPool(path, "rw", 1, damagedToo)
	defer to.Close()
	var id int
	if err := to.QueryRow("PRAGMA application_id").Scan(&id); err != nil {
		return explain(err)
	}
	if id != applicationID {
		return errForeign
	}
	_, err := from.ExecContext(ctx, "BEGIN") // on the only connection: what is verified is what is copied
	if err == nil {
		err = verifyBackup(ctx, from)
	}
	if err != nil {
		return fmt.Errorf("the backup cannot be used: %w", err)
	}
	conn, err := from.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	// SQLite waits only 100 ms for a lock, and copyPages tries again, so that an interrupt ends the wait.
	target := location(path, "rw", damagedToo, "fullfsync(ON)", "busy_timeout(100)")
	if err := conn.Raw(func(driverConn any) error { return copyPages(ctx, driverConn, target) }); err != nil {
		return explain(err)
	}
	to.Exec("PRAGMA busy_timeout(0); PRAGMA wal_checkpoint(TRUNCATE)") // the log is as large as the backup
	return nil
}

// copyPages replaces the database at the location target with that of a connection of the driver, in one transaction.
// Another program's lock is awaited for a minute. See sqlite.org/backup.html.
func copyPages(ctx context.Context, driverConn any, target string) error {
	from := driverConn.(interface {
		NewBackup(string) (*sqlite.Backup, error)
	})
	pages, err := from.NewBackup(target)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(time.Minute)
	for more := true; more && err == nil; { // the last step commits
		more, err = pages.Step(1000)
		if more || (sqliteCode(err) == sqlite3.SQLITE_BUSY && time.Now().Before(deadline)) {
			more, err = true, ctx.Err()
		}
	}
	finished := pages.Finish() // which repeats an error of Step
	return cmp.Or(err, finished)
}

// verifyBackup returns an error unless db, opened "rw" (SQLite skips CHECKs with "ro"), is whole and of this service.
func verifyBackup(ctx context.Context, db *sql.DB) error {
	version, err := readSchemaVersion(db)
	if err != nil {
		return err
	}
	if version == 0 {
		return errors.New("it is empty")
	}
	if err := (&store{readers: db, writer: db}).prepare(); err != nil {
		return err // it lacks a table or a column
	}
	result := ""
	err = db.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result)
	if err == nil && result != "ok" {
		err = errors.New("it is damaged: " + result)
	}
	return err
}

// requireDatabaseFile returns an error unless there is a regular file at path that can be a database.
func requireDatabaseFile(path string) error {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() <= 1) { // SQLite takes a file of one byte for empty
		err = fmt.Errorf("%q is empty or not a regular file, so it is not a database of this service", path)
	}
	return err
}
