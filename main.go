// Animalstore keeps a shop's catalogue of animals in SQLite, and serves it as JSON over HTTP. Code,
// paths and SQL call an animal a pet; texts for people call it an animal.
//
// Read handlers.go next: it has the routes, and a handler for each. A handler takes a *request, and
// returns a body or an error; server.go calls the handlers, and sends and logs the responses.
// auth.go checks API keys, store.go keeps the pets in SQLite, and errors.go has the type of the
// errors that clients see, and their codes.
//
// Four promises shape the code:
//   - A 201 means that the pet was stored on disk. A transaction waits for the disk, so creates
//     that arrive meanwhile share the next one (batch in store.go).
//   - A client can repeat a create safely, with an Idempotency-Key (insert in store.go).
//   - The members of a pet are stored exactly as they were sent, or the pet is refused (parseNewPet
//     in handlers.go).
//   - If somebody deletes or moves files of an open database, no pet is lost, because each has a
//     hard link (linkFiles in store.go).
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

func main() {
	// If the reader of stderr has ended, a write to it raises SIGPIPE, which would kill the
	// process.
	signal.Ignore(syscall.SIGPIPE)

	// NotifyContext also returns a function that restores the default effect of the signals. It is
	// never called: a second Ctrl-C must not kill the process while it stops.
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)

	os.Exit(run(ctx, os.Args[1:], os.LookupEnv, os.Stderr))
}

// run runs the service until ctx is cancelled or, if args have -backup, makes a backup. lookupEnv
// is os.LookupEnv, or that of a test.
//
// run reports errors on stderr. It returns the exit status of the program: 0 if there was no error,
// 2 if args cannot be parsed, and 1 after any other error.
func run(
	ctx context.Context,
	args []string,
	lookupEnv func(string) (string, bool),
	stderr io.Writer,
) int {
	c, err := parseFlags(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return 2 // parseFlags has reported it
	}

	if c.backup != "" {
		err = backup(ctx, c.db, c.backup)
		if err != nil {
			err = fmt.Errorf("-backup %q of -db %q: %w", c.backup, c.db, err)
		}
	} else {
		err = runService(ctx, c, lookupEnv, slog.New(slog.NewTextHandler(stderr, nil)))
	}
	if err != nil {
		fmt.Fprintln(stderr, "animalstore:", err)
		return 1
	}
	return 0
}

// usage is written before the flags, for -h and after a wrong command line.
const usage = `Usage: API_KEYS=KEY,... animalstore [flags]

If API_KEYS is not set, the service makes a key and logs it. It does so only on a loopback address.

`

// config holds the command-line flags.
type config struct{ addr, db, backup string }

// parseFlags parses args. It writes an error to stderr. For -h, it writes the help there, and
// returns flag.ErrHelp.
func parseFlags(args []string, stderr io.Writer) (c config, err error) {
	flags := flag.NewFlagSet("animalstore", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&c.addr, "addr", "127.0.0.1:8080", "listen on `HOST:PORT`")
	flags.StringVar(&c.db, "db", "animalstore.db", "keep the animals in `FILE`, created on first use")
	flags.StringVar(&c.backup, "backup", "", "write a copy of the database to a new `FILE`, and exit")
	flags.Usage = func() {
		fmt.Fprint(stderr, usage)
		flags.PrintDefaults()
	}
	if err = flags.Parse(args); err != nil {
		return c, err
	}

	if flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	flags.Visit(func(f *flag.Flag) {
		if f.Value.String() == "" { // as with -db "$DB", if DB is not set
			err = fmt.Errorf("-%s must not be empty", f.Name)
		}
	})
	if err != nil {
		fmt.Fprintln(stderr, err)
		flags.Usage()
	}
	return c, err
}

// runService runs the service until ctx is cancelled. It listens before it reads API_KEYS, because
// only the listener knows whether the address is loopback, where API_KEYS may be missing. It opens
// the database last, because a wrong setting must not create one.
func runService(
	ctx context.Context,
	c config,
	lookupEnv func(string) (string, bool),
	logger *slog.Logger,
) error {
	ln, err := net.Listen("tcp", c.addr)
	if err != nil {
		return fmt.Errorf("-addr %q: %w", c.addr, err)
	}
	defer ln.Close()

	value, isSet := lookupEnv("API_KEYS")
	if !isSet {
		if !ln.Addr().(*net.TCPAddr).IP.IsLoopback() {
			return errors.New("API_KEYS is not set: set it, or listen on a loopback address")
		}
		value = rand.Text() // so that `go run .` is all that a newcomer needs
		logger.Warn("API_KEYS is not set: made a key for this run", "api_key", value)
	}
	keys, err := parseAPIKeys(value)
	if err != nil {
		return fmt.Errorf("API_KEYS: %w", err)
	}

	st, err := openStore(c.db, logger)
	if err != nil {
		return fmt.Errorf("-db %q: %w", c.db, err)
	}
	logger.Info("started",
		"url", "http://"+ln.Addr().String(),
		"database", c.db,
		"keys", len(keys),
		"version", buildVersion(),
	)

	serveErr := newServer(routes(st, keys), logger).serve(ctx, ln)
	if err := errors.Join(serveErr, st.close()); err != nil {
		return err
	}
	logger.Info("stopped")
	return nil
}

// buildVersion returns the version of the module that the binary was built from, and that of Go.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version + " " + info.GoVersion
}
