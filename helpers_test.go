package main

import (
	"bufio"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
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

	"modernc.org/sqlite"
)

// This file has the helpers that several test files share. Each of the others has the tests of the
// file that it is named after, and the helpers that only they need. handlers_test.go also has the
// tests of auth.go, and main_test.go those of stops and kills of the whole program.
//
// Most tests send requests to a service that runs in the process of the test, on a database file of
// its own. SQL that a test runs on this file stands for another program:
//
//	s := newService(t)
//	execSQL(t, s.file, "INSERT INTO pets (name, category_id) VALUES ('Rex', 7)")
//	s.get("/v1/pets?limit=1").want(t, 200).wantHeader(t, "Link", "")
//	s.get("/v1/pets/2").wantError(t, 404, "not_found", noAnimal)
//
// A request has a valid API key, unless one of its headers says otherwise. These methods and
// functions check what comes of it:
//   - want: a response has this status, and follows the rules for all. If it is that of an
//     operation, openapi.json describes it (openapi_test.go).
//   - wantError: it is also an Error with this code and message.
//   - wantNew and wantRepeat: a create has got the animal with this id, or the first response.
//   - wantSQL and wantPetCount: the database has this value, or so many animals and no damage.
//
// Some tests start the program as a process instead (see start), call run, as main does (see
// wantRefusal), or serve connections in memory, under a fake clock (inMemory in server_test.go). A
// few call a function of the program for what no request shows.

// rex is a body that adds an animal.
const rex = `{"name":"Rex","categoryId":7}`

// petNamed returns a body that adds an animal with this name.
func petNamed(name string) string { return fmt.Sprintf(`{"name":%q,"categoryId":1}`, name) }

// Messages of errors.
const (
	limitRule    = "limit must be an integer from 1 to 100"
	unauthorized = "send a valid API key, in one header Authorization: Bearer API_KEY; " +
		"GET /openapi.json describes this interface"
	refused     = "a rule in the database of the shop refuses this animal"
	noAnimal    = "there is no animal with this id"
	unavailable = "the database is temporarily unavailable"
)

// Helpers: requests and replies.

const testKey, otherKey = "test-key", "other-key"

// noAPIKey, in the place of a header, means that the request has no Authorization header.
const noAPIKey = "no Authorization"

// idempotencyKey returns the Idempotency-Key header with this value.
func idempotencyKey(value string) string { return "Idempotency-Key: " + value }

// newRequest returns a request, given as "METHOD /target", with these headers, given as "Name:
// value". It has testKey, unless one of them is Authorization or noAPIKey. It can be sent by a
// client, and passed to a handler: httptest.NewRequest sets the address of the client.
func newRequest(request string, body io.Reader, headers ...string) *http.Request {
	method, target, _ := strings.Cut(request, " ")
	r := httptest.NewRequest(method, target, body)
	r.RequestURI = "" // set by httptest, but a client refuses it
	for _, header := range headers {
		if name, value, ok := strings.Cut(header, ": "); ok {
			r.Header.Add(name, value)
		}
	}
	if r.Header["Authorization"] == nil && !slices.Contains(headers, noAPIKey) {
		r.Header.Set("Authorization", "Bearer "+testKey)
	}
	return r
}

// client sends requests to a service.
type client struct {
	transport http.RoundTripper
	host      string // HOST:PORT of a service that is another process
}

// get sends a GET with these headers: see newRequest.
func (c client) get(target string, headers ...string) reply {
	return c.do("GET "+target, "", headers...)
}

// create adds an animal.
func (c client) create(body string, headers ...string) reply {
	return c.do("POST /v1/pets", body, headers...)
}

// do sends a request, given as method and target.
func (c client) do(request, body string, headers ...string) reply {
	return c.send(newRequest(request, strings.NewReader(body), headers...))
}

// send sends r.
func (c client) send(r *http.Request) reply {
	r.URL.Scheme, r.URL.Host = "http", c.host
	resp, err := c.transport.RoundTrip(r)
	return newReply(r.Method, r.URL.RequestURI(), resp, err)
}

// inProcess is an http.RoundTripper that lets a handler in this process answer. It panics if there
// is no response within 20 seconds, so that the name of the test is known.
type inProcess struct {
	http.Handler
	test string // its name
}

func (h inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	defer time.AfterFunc(20*time.Second, func() { panic(h.test + ": no response") }).Stop()
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

// reply is a response that was read to its end, or the error that came instead.
type reply struct {
	method, target string // of the request
	status         int
	header         http.Header
	body           string
	err            error
}

// newReply reads the response to a request.
func newReply(method, target string, resp *http.Response, err error) reply {
	r := reply{method: method, target: target, err: err}
	if err == nil {
		defer resp.Body.Close()
		var body []byte
		body, r.err = io.ReadAll(resp.Body)
		r.status, r.header, r.body = resp.StatusCode, resp.Header, string(body)
	}
	return r
}

// request returns the method and the target of the request, for messages.
func (r reply) request() string { return fmt.Sprintf("%.20s %.500s", r.method, r.target) }

// want checks the status of a response, and the rules for all responses:
//   - The headers are those that all responses have, and an X-Request-Id.
//   - A 401, and no other response, has WWW-Authenticate. So it is with 405 and Allow, and with 503
//     and Retry-After.
//   - The body is JSON, of the length that Content-Length says. That of an error is an Error.
//   - openapi.json has its status, its headers and the members of its body: see wantDocumented.
func (r reply) want(t testing.TB, status int) reply {
	t.Helper()
	if r.err != nil || r.status != status {
		t.Fatalf("%s = %d %.2000s (error: %v), want %d",
			r.request(), r.status, r.body, r.err, status)
	}
	r.wantHeader(t, "Cache-Control", "no-store")
	r.wantHeader(t, "Content-Type", "application/json")
	r.wantHeader(t, "X-Content-Type-Options", "nosniff")
	if id := r.header.Get("X-Request-Id"); !regexp.MustCompile("^[A-Z2-7]{26}$").MatchString(id) {
		t.Fatalf("%s has the X-Request-Id %q", r.request(), id)
	}
	statuses := map[string]int{"WWW-Authenticate": 401, "Allow": 405, "Retry-After": 503}
	for name, wanted := range statuses {
		if has := r.header.Get(name) != ""; has != (status == wanted) {
			t.Fatalf("%s = %d has %s: %v", r.request(), status, name, has)
		}
	}
	if r.method != "HEAD" {
		r.wantHeader(t, "Content-Length", strconv.Itoa(len(r.body)))
		if !json.Valid([]byte(r.body)) {
			t.Fatalf("%s = %.2000s, want JSON", r.request(), r.body)
		}
		if status >= 400 {
			r.wantErrorShape(t)
		}
	}
	r.wantDocumented(t)
	return r
}

// wantErrorShape checks that the body is an Error, and that the message of a 5xx tells no cause.
func (r reply) wantErrorShape(t testing.TB) {
	t.Helper()
	e := decode[apiError](t, r.body)
	if e.Code == "invalid_http" {
		return // TestInvalidHTTP checks the whole body
	}
	if statusByCode[e.Code] != r.status || e.Message == "" || e.Status != r.status {
		t.Fatalf("%s = %d %s, want an Error", r.request(), r.status, r.body)
	}
	if r.status >= 500 && e.Message != "internal error" && e.Message != unavailable {
		t.Fatalf("%s tells the cause: %s", r.request(), e.Message)
	}
}

// wantError checks that a response is an Error with this status, code and message.
func (r reply) wantError(t testing.TB, status int, code, message string) reply {
	t.Helper()
	r.want(t, status)
	want := apiError{Code: code, Message: message, Status: status}
	if got := decode[apiError](t, r.body); got != want {
		t.Fatalf("%s = %+v, want %+v", r.request(), got, want)
	}
	return r
}

// wantNew checks that a create got 201 and a new animal, with this id.
func (r reply) wantNew(t testing.TB, id int) reply {
	t.Helper()
	r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "").
		wantHeader(t, "Location", fmt.Sprint("pets/", id))
	if got := decode[Pet](t, r.body).ID; got != int64(id) {
		t.Fatalf("%s = %s, want the id %d", r.request(), r.body, id)
	}
	return r
}

// wantRepeat checks that a create got 201, the first response, and the header that says so.
func (r reply) wantRepeat(t testing.TB, first reply) reply {
	t.Helper()
	return r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "true").
		wantHeader(t, "Location", first.header.Get("Location")).wantBody(t, first.body)
}

// wantBody checks the whole body of a response.
func (r reply) wantBody(t testing.TB, want string) reply {
	t.Helper()
	if r.body != want {
		t.Fatalf("%s = %s, want %s", r.request(), r.body, want)
	}
	return r
}

// wantHeader checks a header of a response: its only value, or "" if it must not be there.
func (r reply) wantHeader(t testing.TB, name, want string) reply {
	t.Helper()
	if got := strings.Join(r.header.Values(name), "; "); got != want {
		t.Fatalf("%s has %s: %q, want %q", r.request(), name, got, want)
	}
	return r
}

// decode decodes the first value of a body. It fails if that has a member that v has not.
func decode[T any](t testing.TB, body string) (v T) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(body))
	d.UseNumber()
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%.2000s: %v", body, err)
	}
	return v
}

// Helpers: a service in this process.

// service is the whole service in this process, on a database file.
type service struct {
	client
	*server
	file   string
	log    *logBuffer
	writer *sql.DB      // of the store
	close  func() error // closes the store, once
}

// newService opens a service on a new database.
func newService(t testing.TB) *service {
	t.Helper()
	return openService(t, newFile(t))
}

// newFile returns the name of a file for a database, in a new folder.
func newFile(t testing.TB) string { return filepath.Join(t.TempDir(), "animals.db") }

// openService opens a service on the database in a file. It is closed at the end of the test.
func openService(t testing.TB, file string) *service {
	t.Helper()
	keys, err := parseAPIKeys(testKey + "," + otherKey)
	must(t, err)
	log := &logBuffer{}
	st, err := openStore(file, log.logger())
	must(t, err)

	s := &service{file: file, log: log, writer: st.writer, close: sync.OnceValue(st.close)}
	t.Cleanup(func() { s.close() }) // an error if the test has moved a file
	s.server = newServer(routes(st, keys), log.logger())
	s.client.transport = inProcess{s.server, t.Name()}
	return s
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

// logger returns a logger that writes to l.
func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

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

// Helpers: the program, and processes that run it.

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

// Helpers: the database, as other programs use it.

// connect opens a database.
func connect(t testing.TB, file string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+url.PathEscape(file)+"?_pragma=busy_timeout(10000)")
	must(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	return db
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

// registerSQL adds three SQL functions to SQLite: sleep_1s() sleeps for a second and is true,
// fail(message) returns an error, and panic_now() panics.
func registerSQL() {
	register := func(name string, args int32, f func(args []driver.Value) error) {
		sqlite.MustRegisterScalarFunction(name, args,
			func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
				return int64(1), f(args)
			})
	}
	register("sleep_1s", 0, func([]driver.Value) error { time.Sleep(time.Second); return nil })
	register("fail", 1, func(args []driver.Value) error { return errors.New(args[0].(string)) })
	register("panic_now", 0, func([]driver.Value) error { panic("a mistake") })
}

// Helpers: files and errors.

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

// wantOnly checks that a folder has only files with these names.
func wantOnly(t testing.TB, dir string, names ...string) {
	t.Helper()
	if got := slices.Sorted(maps.Keys(readFiles(t, dir))); !slices.Equal(got, names) {
		t.Fatalf("the folder has %q, want %q", got, names)
	}
}
