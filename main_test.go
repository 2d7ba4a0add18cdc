package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// TestMain runs the tests. In a process that a test has started, it runs the program instead.
func TestMain(m *testing.M) {
	registerSQL()
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // ends when the process of the test ends
			os.Exit(1)
		}()
		main() // ends the process
	}
	os.Exit(m.Run())
}

// TestRefusedSettings runs the program with wrong settings, and with -h: it must end at once with
// this status and message, and create no file.
func TestRefusedSettings(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { taken.Close() })

	for _, c := range []struct {
		args    string // separated by spaces
		env     env
		status  int
		message string
	}{
		{"x", withAPIKey, 2, `unexpected argument "x"`},
		{"-keys x", withAPIKey, 2, "flag provided but not defined: -keys"},
		{"-db=", withAPIKey, 2, "-db must not be empty"},
		{"-addr=", withAPIKey, 2, "-addr must not be empty"},
		{"-backup=", withAPIKey, 2, "-backup must not be empty"},
		{"-h", withAPIKey, 0, `(default "animalstore.db")`},
		{"-h", withAPIKey, 0, `(default "127.0.0.1:8080")`},

		{"-addr " + taken.Addr().String(), withAPIKey, 1, "address already in use"},
		{"-addr :0", env{}, 1, "API_KEYS is not set"},
		{"", env{"API_KEYS": ""}, 1, "API_KEYS: the list has no key"},
		{"", env{"API_KEYS": "one, secret key"}, 1,
			"API_KEYS: item 2 must consist of visible ASCII characters, without spaces"},
		{"", env{"API_KEYS": ",,sécret"}, 1, "API_KEYS: item 3 must consist of visible ASCII"},
		{"-db DIR/none/animals.db", withAPIKey, 1,
			`/none/animals.db": unable to open database file (14)`},
		{"-db :memory:", withAPIKey, 1, "SQLite cannot use a write-ahead log here"},
	} {
		dir := t.TempDir()
		// A flag in c.args replaces the same one before it.
		args := strings.Fields("-addr 127.0.0.1:0 -db DIR/animals.db " + c.args)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "DIR", dir)
		}
		stderr := wantRefusal(t, dir, c.env, c.status, c.message, args...)
		stderr.wantNoText(t, "secret", "sécret", testKey)
		if c.status != 1 {
			stderr.wantText(t, "Usage: API_KEYS=")
		}
	}
}

// TestRefusedDatabases changes a database of one animal. The program must neither start with it,
// nor make a backup of it.
func TestRefusedDatabases(t *testing.T) {
	t.Parallel()
	const foreign = "not a database of this service: its application_id is 0"
	edit := func(statements string) func(t *testing.T, file string) {
		return func(t *testing.T, file string) { execSQL(t, file, statements) }
	}
	for _, c := range []struct {
		name    string
		change  func(t *testing.T, file string)
		message string
	}{
		{"text", func(t *testing.T, file string) { writeFile(t, file, "some text") },
			"not a database (26)"},
		{"truncated", func(t *testing.T, file string) { must(t, os.Truncate(file, 4096)) },
			"malformed (11)"},
		// Not in WAL mode, to show whether the service changes that.
		{"of another program", edit("PRAGMA journal_mode = DELETE; PRAGMA application_id = 0"), foreign},
		{"of no version", edit("PRAGMA user_version = 0"), "not a database of this service"},
		{"of another program, of no version",
			edit("PRAGMA application_id = 0; PRAGMA user_version = 0"), foreign},
		{"of another program, without tables", func(t *testing.T, file string) {
			must(t, os.Remove(file))
			execSQL(t, file, "PRAGMA application_id = 1")
		}, "not a database of this service: its application_id is 1"},
		{"of a newer version", edit(fmt.Sprint("PRAGMA user_version = ", len(migrations)+1)),
			"a newer version of this service has written the database"},
		{"a WAL alone", func(t *testing.T, file string) { must(t, os.Rename(file, file+"-wal")) },
			`animals.db" is missing or empty: put it back beside `},
		{"a WAL and an empty file", func(t *testing.T, file string) {
			must(t, os.Rename(file, file+"-wal"))
			writeFile(t, file, "")
		}, `animals.db" is missing or empty: put it back beside `},
		{"a -shm without a WAL", func(t *testing.T, file string) { writeFile(t, file+"-shm", "") },
			`animals.db-wal" is missing or empty: put it back beside `},
		{"beside a copy that a stop has saved", func(t *testing.T, file string) {
			writeFile(t, file+".rescued-2026-01-02-030405", "")
		}, "a stop has saved all animals in "},
		{"below such a copy", func(t *testing.T, file string) {
			writeFile(t, filepath.Join(filepath.Dir(file), "..", "animals.db.rescued-2026-01-02-030405"), "")
		}, "a stop has saved all animals in "},
		{"a link", func(t *testing.T, file string) {
			must(t, os.Rename(file, file+".real"))
			must(t, os.Symlink(file+".real", file))
		}, "it is a symbolic link: name the file that it leads to"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := newClosedDatabase(t)
			c.change(t, file)
			dir := filepath.Dir(file)
			wantRefusal(t, dir, withAPIKey, 1, c.message, "-addr", "127.0.0.1:0", "-db", file)
			wantRefusal(t, dir, withAPIKey, 1, c.message, "-db", file, "-backup", dir+"/copy.db")
		})
	}
}

// TestRefusedBackups makes backups that must be refused: because of a file in the place of the
// copy, and because of the database.
func TestRefusedBackups(t *testing.T) {
	t.Parallel()
	file := newClosedDatabase(t)
	dir := filepath.Dir(file)
	wantRefused := func(message string) {
		t.Helper()
		wantRefusal(t, dir, withAPIKey, 1, message, "-db", file, "-backup", dir+"/copy.db")
	}

	for _, name := range []string{"copy.db", "copy.db-wal", "copy.db-journal"} {
		writeFile(t, filepath.Join(dir, name), "")
		wantRefused(name + `" exists already; name a new file`)
		must(t, os.Remove(filepath.Join(dir, name)))
	}
	must(t, os.Symlink("nowhere", dir+"/copy.db"))
	wantRefused(`copy.db" exists already; name a new file`)
	must(t, os.Remove(dir+"/copy.db"))

	breakIndex(t, file)
	wantRefused("the database is damaged: row 1 missing from index pets_by_status")
	execSQL(t, file, "REINDEX")

	execSQL(t, file, "PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'")
	wantRefused("the database is damaged: CHECK constraint failed in pets")
	// The copy is first written to a file in its own folder, such as copy.db.123.tmp.
	wantRefusal(t, dir, withAPIKey, 1, ": open "+dir+"/none/copy.db.",
		"-db", file, "-backup", dir+"/none/copy.db")
	writeFile(t, file, "")
	wantRefused("the database is empty")
	must(t, os.Remove(file))
	wantRefused("unable to open database file (14)")
}

// breakIndex damages a database: it makes pets_by_status an index by name, and then corrects only
// its SQL in the schema, which writable_schema permits. So the index has names, where SQLite
// expects statuses.
func breakIndex(t *testing.T, file string) {
	t.Helper()
	execSQL(t, file, `DROP INDEX pets_by_status;
		CREATE INDEX pets_by_status ON pets (name);
		PRAGMA writable_schema = ON;
		UPDATE sqlite_schema SET sql = replace(sql, '(name)', '(status)')`)
}

// wantRefusal runs the program with args. It must end with this status and message, which is one
// line if the status is 1, and change no file in dir. wantRefusal returns what it has written to
// standard error.
func wantRefusal(
	t *testing.T,
	dir string,
	e env,
	status int,
	message string,
	args ...string,
) (stderr *logBuffer) {
	t.Helper()
	before := readFiles(t, dir)
	stderr = &logBuffer{}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // in case it starts
	defer cancel()

	if got := run(ctx, args, e.lookup, stderr); got != status {
		t.Fatalf("%q: status %d, want %d: %s", args, got, status, stderr)
	}
	stderr.wantText(t, message)
	if status == 1 && !regexp.MustCompile("^animalstore: .*\n$").MatchString(stderr.String()) {
		t.Fatalf("%q wrote %q, want one line", args, stderr)
	}
	if after := readFiles(t, dir); !maps.Equal(before, after) {
		t.Fatalf("%q has changed files", args)
	}
	return stderr
}

// TestSettings starts the program on all addresses, with two keys.
func TestSettings(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, env{"API_KEYS": "one,\n" + testKey + "\n"}, "-addr", "0.0.0.0:0")
	p.log.wantText(t, "animals.db", " keys=2 version=")
	p.log.wantNoText(t, testKey, "api_key")
	p.get("/v1/pets").want(t, 200)
	p.get("/v1/pets", "Authorization: Bearer one").want(t, 200)
}

// TestMadeKey starts the program without API_KEYS: it must make a key, log it, and accept only
// that.
func TestMadeKey(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), env{})
	p.log.wantText(t, "level=WARN", `msg="API_KEYS is not set: made a key for this run"`, " keys=1 ")
	_, made, _ := strings.Cut(p.log.String(), "api_key=")
	made, _, _ = strings.Cut(made, "\n")
	if len(made) < 26 { // 128 bits in base32
		t.Fatalf("the key %s is short", made)
	}
	p.get("/v1/pets", "Authorization: Bearer "+made).want(t, 200)
	p.get("/v1/pets").want(t, 401)
}

// TestSignals stops the program by a signal while clients add animals: no client may be cut off. A
// second signal, when no client can connect any more, must change nothing.
func TestSignals(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, withAPIKey)

	var created atomic.Int64
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for {
				resp := p.create(rex)
				if errors.Is(resp.err, syscall.ECONNREFUSED) {
					return
				}
				if resp.status != 201 {
					t.Errorf("a create = %d, %v, want 201 or a refused connection", resp.status, resp.err)
					return
				}
				if created.Add(1) == 100 {
					p.cmd.Process.Signal(syscall.SIGTERM)
				}
			}
		})
	}
	clients.Wait()
	p.cmd.Process.Signal(syscall.SIGINT)

	if status := p.wait(t); status != 0 {
		t.Fatalf("after the signals, the status is %d, want 0", status)
	}
	p.log.wantText(t, "msg=stopping", "msg=stopped")
	p.log.wantNoText(t, "cut off")
	wantOnly(t, filepath.Dir(file), "animals.db")
	wantPetCount(t, file, int(created.Load()))
}

// TestStopWithoutFolders stops the program after its database was deleted, with the two folders
// where the stop would save a copy. It must save one in its working directory, and end with status
// 1.
func TestStopWithoutFolders(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "above", "folder")
	must(t, os.MkdirAll(folder, 0o700))
	p := start(t, filepath.Join(folder, "animals.db"), withAPIKey)
	p.create(rex).want(t, 201)

	must(t, os.RemoveAll(filepath.Dir(folder)))
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if status := p.wait(t); status != 1 {
		t.Fatalf("the status is %d, want 1", status)
	}
	_, name, _ := strings.Cut(p.log.String(), `all its animals are in "`+p.cmd.Dir+"/")
	name, _, _ = strings.Cut(name, `"`)
	wantOnly(t, p.cmd.Dir, name)
	wantPetCount(t, filepath.Join(p.cmd.Dir, name), 1)
}

// TestUnreadLog closes the pipe that the program logs to: the program must go on.
func TestUnreadLog(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), withAPIKey)
	must(t, p.stderr.Close())
	for range 3 {
		p.get("/v1/pets").want(t, 200)
	}
}

// TestKill starts the program, and kills it while clients add animals, three times. No animal that
// was acknowledged may be missing, and a repeat of its create must get the first response.
func TestKill(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	acknowledged := map[string]reply{} // by Idempotency-Key, which is also the name of the animal
	for round := range 3 {
		p := start(t, file, withAPIKey)
		for name, first := range acknowledged {
			p.create(petNamed(name), idempotencyKey(name)).wantRepeat(t, first)
		}
		maps.Copy(acknowledged, createUntilKilled(t, p, round))
	}

	s := openService(t, file)
	for _, first := range acknowledged {
		s.get("/v1/"+first.header.Get("Location")).want(t, 200).wantBody(t, first.body)
	}
	wantSQL(t, file, "SELECT count(*) - count(DISTINCT name) FROM pets", "0") // none is there twice
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
}

// createUntilKilled lets 16 clients add animals, kills the program after 100 creates, and returns
// the responses to those that were acknowledged, by Idempotency-Key.
func createUntilKilled(t *testing.T, p *process, round int) map[string]reply {
	t.Helper()
	acknowledged := map[string]reply{}
	var mu sync.Mutex // guards acknowledged
	var clients sync.WaitGroup
	for client := range 16 {
		clients.Go(func() {
			for i := 0; ; i++ {
				name := fmt.Sprint(round, "-", client, "-", i)
				resp := p.create(petNamed(name), idempotencyKey(name))
				if resp.status != 201 {
					return
				}
				mu.Lock()
				acknowledged[name] = resp
				if len(acknowledged) == 100 {
					p.cmd.Process.Kill()
				}
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	p.cmd.Process.Kill() // if creates fail early
	p.wait(t)
	return acknowledged
}

// env is the environment of the program, by the names of the variables.
type env map[string]string

// withAPIKey is an environment with testKey.
var withAPIKey = env{"API_KEYS": testKey}

func (e env) lookup(name string) (value string, isSet bool) {
	value, isSet = e[name]
	return value, isSet
}

// process is the program, running as a process.
type process struct {
	client
	cmd    *exec.Cmd
	stderr io.Closer
	log    logBuffer     // what it has written to standard error
	ended  chan struct{} // is closed when the process has ended
}

// start starts the program with a database file, an environment and more args, in a new folder, and
// waits until it serves. The program is killed at the end of the test: t.Context ends then, before
// the cleanups.
func start(t testing.TB, file string, e env, args ...string) *process {
	t.Helper()
	args = append([]string{"-addr", "127.0.0.1:0", "-db", file}, args...)
	p := &process{
		cmd:   exec.CommandContext(t.Context(), os.Args[0], args...),
		ended: make(chan struct{}),
	}
	p.transport = &http.Transport{MaxIdleConnsPerHost: 16} // one for each client of a test
	p.cmd.Dir = t.TempDir()
	p.cmd.Env = []string{"ANIMALSTORE_PROCESS=1", "PWD=" + p.cmd.Dir}
	for name, value := range e {
		p.cmd.Env = append(p.cmd.Env, name+"="+value)
	}
	_, err := p.cmd.StdinPipe() // see TestMain
	must(t, err)
	stderr, err := p.cmd.StderrPipe()
	must(t, err)
	p.stderr = stderr
	must(t, p.cmd.Start())
	defer time.AfterFunc(20*time.Second, func() { p.cmd.Process.Kill() }).Stop()

	started := regexp.MustCompile(`msg=started url=http://(\S+)`)
	lines := bufio.NewReader(stderr)
	for p.host == "" {
		line, err := lines.ReadString('\n')
		p.log.Write([]byte(line))
		if err != nil {
			t.Fatalf("the program has not started: %s", &p.log)
		}
		if match := started.FindStringSubmatch(line); match != nil {
			p.host = match[1]
		}
	}
	go func() {
		io.Copy(&p.log, lines)
		p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() { <-p.ended })
	return p
}

// wait waits until the process has ended, for at most 20 seconds, and returns its exit status: -1
// if a signal has killed it.
func (p *process) wait(t testing.TB) (status int) {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		t.Fatalf("the program has not ended: %s", &p.log)
	}
	return p.cmd.ProcessState.ExitCode()
}
