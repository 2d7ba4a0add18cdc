package main

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// This file has the fixtures and helpers that most tests need. reply_test.go has the checks of
// responses, and sabotage_test.go the ways in which tests make SQLite fail. The other files have
// the tests, and more helpers beside them:
//   - handlers_test.go: of handlers.go and auth.go.
//   - server_test.go: of server.go. openapi_test.go: of openapi.json.
//   - store_test.go (creates and reads), schema_test.go, backup_test.go and lost_files_test.go: of
//     store.go.
//   - main_test.go: of main.go, and of stops and kills of the program.
//
// There are three fixtures:
//   - A service runs in the process of the test, on a database file of its own. SQL that a test
//     runs on this file (execSQL) stands for another program.
//   - A process is a service, too, but the program runs as a process of its own.
//   - A clientConn (server_test.go) is a connection to a service in memory, under a fake clock.
//
// For example, this test adds an animal, and fetches another:
//
//	s := newService(t)
//	s.create(rex).wantNew(t, 1)
//	s.get("/v1/pets/2").wantError(t, 404, "not_found", noAnimal)

const (
	rex               = `{"name":"Rex","categoryId":7}` // a body that adds an animal
	testKey, otherKey = "test-key", "other-key"         // API keys of a service in this process

	// Messages of errors.
	breaksRule  = "a rule in the database of the shop refuses this animal"
	unavailable = "the database is temporarily unavailable"
)

// petNamed returns a body that adds an animal with this name.
func petNamed(name string) string { return fmt.Sprintf(`{"name":%q,"categoryId":1}`, name) }

// idempotencyKey returns the Idempotency-Key header with this value.
func idempotencyKey(value string) string { return "Idempotency-Key: " + value }

// service is a service that tests send requests to.
type service struct {
	file   string     // the database
	log    *logBuffer // what the service has logged
	apiKey string     // is sent with each request, unless it is ""

	roundTrip func(*http.Request) (*http.Response, error) // sends a request

	// Only a service in this process has these.
	server *server
	writer *sql.DB      // of the store
	close  func() error // closes the store, once

	listener *memoryListener // of inMemory
	stop     func()          // of inMemory: stops the service, and returns when it has ended
}

// newFile returns the name of a file for a database, in a new folder.
func newFile(t testing.TB) string { return filepath.Join(t.TempDir(), "animals.db") }

// newService opens a service on a new database.
func newService(t testing.TB) *service {
	t.Helper()
	return openService(t, newFile(t))
}

// newClosedDatabase returns the name of a database with one animal, which no service has open.
func newClosedDatabase(t *testing.T) (file string) {
	t.Helper()
	s := newService(t)
	s.create(rex).want(t, 201)
	must(t, s.close())
	return s.file
}

// openService opens a service on the database in a file. It is closed at the end of the test.
func openService(t testing.TB, file string) *service {
	t.Helper()
	keys, err := parseAPIKeys(testKey + "," + otherKey)
	must(t, err)
	log := &logBuffer{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	st, err := openStore(file, logger)
	must(t, err)

	s := &service{file: file, log: log, apiKey: testKey, writer: st.writer}
	s.server = newServer(routes(st, keys), logger)
	s.close = sync.OnceValue(st.close)
	t.Cleanup(func() { s.close() }) // returns an error if the test has moved a file
	s.roundTrip = func(r *http.Request) (*http.Response, error) {
		// The panic tells which of the tests that run at the same time waits for ever.
		timeout := time.AfterFunc(20*time.Second, func() { panic(t.Name() + ": no response") })
		defer timeout.Stop()
		recorder := httptest.NewRecorder()
		s.server.ServeHTTP(recorder, r)
		return recorder.Result(), nil
	}
	return s
}

// get sends a GET with these headers: see do.
func (s *service) get(target string, headers ...string) reply {
	return s.do("GET "+target, "", headers...)
}

// create adds an animal: see do.
func (s *service) create(body string, headers ...string) reply {
	return s.do("POST /v1/pets", body, headers...)
}

// do sends a request, given as "METHOD target", with headers, each given as "Name: value".
func (s *service) do(request, body string, headers ...string) reply {
	method, target, _ := strings.Cut(request, " ")
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		r.Header.Add(name, value)
	}
	resp := s.send(r)
	resp.sent = strings.Join(append(headers, body), " ")
	return resp
}

// send sends a request that httptest.NewRequest has made. It adds the API key, unless the request
// has an Authorization header.
func (s *service) send(r *http.Request) reply {
	if s.apiKey != "" && r.Header["Authorization"] == nil {
		r.Header.Set("Authorization", "Bearer "+s.apiKey)
	}
	resp, err := s.roundTrip(r)
	return newReply(r.Method, r.URL.RequestURI(), resp, err)
}

// logBuffer is an io.Writer that keeps what is written. Several goroutines can use it.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBuffer) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

// String returns all that was written.
func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// wantText checks that each of these texts was written.
func (l *logBuffer) wantText(t testing.TB, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(l.String(), text) {
			t.Fatalf("there is no %q in %s", text, l)
		}
	}
}

// wantNoText checks that none of these texts was written.
func (l *logBuffer) wantNoText(t testing.TB, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if strings.Contains(l.String(), text) {
			t.Fatalf("there is %q in %s", text, l)
		}
	}
}

// env is the environment of the program: its variables, by name.
type env map[string]string

// withAPIKey is an environment with testKey.
var withAPIKey = env{"API_KEYS": testKey}

// wantRefusal calls run with args, as main does. The program must end with this status, write this
// message, and change no file in dir. If the status is 1, it must write one line. wantRefusal
// returns all that it has written to standard error.
func wantRefusal(
	t *testing.T, dir string, e env, status int, message string, args ...string,
) (stderr *logBuffer) {
	t.Helper()
	before := readFiles(t, dir)
	stderr = &logBuffer{}
	lookup := func(name string) (string, bool) {
		value, isSet := e[name]
		return value, isSet
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // ends a service that starts
	defer cancel()

	if got := run(ctx, args, lookup, stderr); got != status {
		t.Fatalf("%v %q: status %d, want %d: %s", e, args, got, status, stderr)
	}
	stderr.wantText(t, message)
	if status == 1 && !regexp.MustCompile("^animalstore: .*\n$").MatchString(stderr.String()) {
		t.Fatalf("%v %q wrote %q, want one line", e, args, stderr)
	}
	if after := readFiles(t, dir); !maps.Equal(before, after) {
		t.Fatalf("%v %q has changed files", e, args)
	}
	return stderr
}

// process is a service that runs as a process.
type process struct {
	*service
	addr   string // where it listens
	cmd    *exec.Cmd
	stderr io.Closer     // the pipe that log reads
	ended  chan struct{} // is closed when the process has ended
}

// TestMain runs the tests. In a process that a test has started, it runs the program instead: the
// binary of the tests has that, too.
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

// program returns a command that runs the program in a new folder, with an environment and args. It
// is killed when ctx is done, and ends when this process does.
func program(ctx context.Context, t testing.TB, e env, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Dir = t.TempDir()
	cmd.Env = []string{"ANIMALSTORE_PROCESS=1"} // see TestMain
	for name, value := range e {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	_, err := cmd.StdinPipe() // is closed when this process ends: see TestMain
	must(t, err)
	return cmd
}

// start starts the program with a database file, an environment and more args, and waits until it
// serves. The program is killed at the end of the test: t.Context ends then, before the cleanups.
func start(t testing.TB, file string, e env, args ...string) *process {
	t.Helper()
	args = append([]string{"-addr", "127.0.0.1:0", "-db", file}, args...)
	cmd := program(t.Context(), t, e, args...)
	stderr, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())

	// This ends the loop below if the program does not serve.
	timeout := time.AfterFunc(20*time.Second, func() { cmd.Process.Kill() })
	defer timeout.Stop()

	p := &process{cmd: cmd, stderr: stderr, ended: make(chan struct{})}
	p.service = &service{file: file, log: &logBuffer{}, apiKey: testKey}
	transport := &http.Transport{
		MaxIdleConnsPerHost:   16, // one for each client of TestKill
		ResponseHeaderTimeout: 20 * time.Second,
	}
	p.roundTrip = func(r *http.Request) (*http.Response, error) {
		r.RequestURI = "" // is for servers: a client refuses it
		r.URL.Scheme, r.URL.Host = "http", p.addr
		return transport.RoundTrip(r)
	}

	lines := bufio.NewReader(stderr)
	for p.addr == "" {
		line, err := lines.ReadString('\n')
		p.log.Write([]byte(line))
		if err != nil {
			t.Fatalf("the program has not started: %s", p.log)
		}
		_, rest, _ := strings.Cut(line, "msg=started url=http://")
		p.addr, _, _ = strings.Cut(rest, " ")
	}
	go func() {
		io.Copy(p.log, lines)
		cmd.Wait()
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
		t.Fatalf("the program has not ended: %s", p.log)
	}
	return p.cmd.ProcessState.ExitCode()
}

// kill kills the process, and waits for its end.
func (p *process) kill(t testing.TB) {
	t.Helper()
	p.cmd.Process.Kill()
	p.wait(t)
}

// connect opens a database.
func connect(t testing.TB, file string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+url.PathEscape(file)+"?_pragma=busy_timeout(10000)")
	must(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	return db
}

// lock takes the write lock of a database, until unlock is called.
func lock(t testing.TB, file string) (unlock func()) {
	t.Helper()
	db := connect(t, file)
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(t, err)
	return func() { db.Close() } // ends the transaction
}

// execSQL runs SQL statements.
func execSQL(t testing.TB, file, statements string, args ...any) {
	t.Helper()
	db := connect(t, file)
	defer db.Close()
	if _, err := db.Exec(statements, args...); err != nil {
		t.Fatalf("%s: %v", statements, err)
	}
}

// wantSQL checks the value that a query returns, as text.
func wantSQL(t testing.TB, file, query, want string) {
	t.Helper()
	db := connect(t, file)
	defer db.Close()
	var got string
	if err := db.QueryRow(query).Scan(&got); err != nil || got != want {
		t.Fatalf("%s = %s, %v, want %s", query, got, err, want)
	}
}

// wantPetCount checks how many animals a database has, and that it is not damaged.
func wantPetCount(t testing.TB, file string, count int) {
	t.Helper()
	wantSQL(t, file, "SELECT count(*) FROM pets", strconv.Itoa(count))
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
}

// addPets adds animals that are sold.
func addPets(t testing.TB, file string, count int) {
	t.Helper()
	execSQL(t, file, `INSERT INTO pets (name, category_id, status)
		WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
		SELECT 'Rex', 7, 'sold' FROM n LIMIT ?`, count)
}

// must fails the test unless err is nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func writeFile(t testing.TB, file, content string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte(content), 0o600))
}

func readFile(t testing.TB, file string) (content string) {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	return string(b)
}

// readFiles returns the contents of the files in a folder, by name. Those of a folder, or of a link
// that leads nowhere, are "".
func readFiles(t testing.TB, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	contents := map[string]string{}
	for _, entry := range entries {
		content, _ := os.ReadFile(filepath.Join(dir, entry.Name()))
		contents[entry.Name()] = string(content)
	}
	return contents
}

// wantOnly checks that a folder has files with these names, and no others.
func wantOnly(t testing.TB, dir string, names ...string) {
	t.Helper()
	if got := slices.Sorted(maps.Keys(readFiles(t, dir))); !slices.Equal(got, names) {
		t.Fatalf("the folder has %q, want %q", got, names)
	}
}
