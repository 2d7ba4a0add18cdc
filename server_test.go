package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
	"unicode"
	"unicode/utf8"

	"modernc.org/sqlite"
)

// TestMain also lets the test binary be the program itself (see command). In the tests, SQL can call the functions in callbacks.
func TestMain(m *testing.M) {
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // returns when the test process has ended, even if it was killed
			os.Exit(1)
		}()
		main()
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // otherwise, under nohup(1), the processes would ignore it
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		opened, err := url.Parse(dsn)
		if opened.Query().Has("mode") { // not the test itself, see connect
			connections.Lock()
			defer connections.Unlock()
			connections.to[opened.Path] = append(connections.to[opened.Path], conn)
		}
		return err
	})
	sqlite.MustRegisterScalarFunction("call", 1, func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
		f, _ := callbacks.Load(args[0])
		return nil, f.(func() error)()
	})
	json.Unmarshal(openAPI, &document)
	os.Exit(m.Run())
}

// connections holds the connections of the services to each database file, in the order in which they were opened.
var connections = struct {
	sync.Mutex
	to map[string][]sqlite.ExecQuerierContext
}{to: map[string][]sqlite.ExecQuerierContext{}}

// callbacks maps the argument of the SQL function call, which is the path of a database file, to what it calls: a
// func() error.
var callbacks sync.Map

// testKey and otherKey are the API keys that a service under test accepts.
const testKey, otherKey = "test-key", "other-key"

// service is a whole service on its own database file.
type service struct {
	t      testing.TB
	db     string  // the database file
	log    *buffer // its log
	writer sqlite.ExecQuerierContext
	close  func() error // closes the database; the end of the test does that, too
	*server
}

// buffer is a bytes.Buffer that goroutines can share.
type buffer struct {
	sync.Mutex
	bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.Write(p)
}

// newService opens a service on a new database.
func newService(t testing.TB) *service {
	t.Helper()
	return openService(t, filepath.Join(t.TempDir(), "animals.db"))
}

func openService(t testing.TB, db string) *service {
	t.Helper()
	k, err := loadKeys(lookup(map[string]string{"API_KEYS": testKey + "," + otherKey}), "")
	must(t, err)
	connections.Lock()
	before := len(connections.to[db])
	connections.Unlock()
	st, _, err := openStore(db)
	must(t, err)
	log := &buffer{}
	output := io.MultiWriter(log, t.Output())
	if _, ok := t.(*testing.T); !ok {
		output = io.Discard // in benchmarks and fuzz tests
	}
	connections.Lock()
	defer connections.Unlock()
	writer := connections.to[db][before] // the first connection is the one that may create the database
	s := &service{t: t, db: db, log: log, writer: writer}
	s.server = newServer(st, k, slog.New(slog.NewTextHandler(output, nil)))
	s.close = func() error {
		s.close = func() error { return nil }
		return st.close()
	}
	t.Cleanup(func() { must(t, s.close()) })
	return s
}

// reply is a response that has been read.
type reply struct {
	status int
	header http.Header
	body   string
}

// do sends a request with a valid key and the given headers ("Name: value"; "Authorization:" sends no key), and checks the
// response against openapi.json.
func (s *service) do(method, target, body string, headers ...string) reply {
	s.t.Helper()
	return s.serve(httptest.NewRequest(method, target, strings.NewReader(body)), headers...)
}

// serve does the same with a request made by the caller.
func (s *service) serve(r *http.Request, headers ...string) reply {
	s.t.Helper()
	setHeaders(r, headers)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return checked(s.t, r, w.Result())
}

// repeat calls f in n goroutines, with their numbers, until stop is called.
func repeat(n int, f func(i int)) (stop func()) {
	var stopped atomic.Bool
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			for !stopped.Load() {
				f(i)
			}
		})
	}
	return func() {
		stopped.Store(true)
		all.Wait()
	}
}

func setHeaders(r *http.Request, headers []string) {
	if !slices.ContainsFunc(headers, func(h string) bool { return strings.HasPrefix(h, "Authorization:") }) {
		r.Header.Set("Authorization", "Bearer "+testKey)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ":")
		if value = strings.TrimPrefix(value, " "); value != "" || name != "Authorization" {
			r.Header.Add(name, value)
		}
	}
}

// checked reads a response and checks it against openapi.json and the rules for all responses.
func checked(t testing.TB, r *http.Request, resp *http.Response) reply {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	if r.Method == "HEAD" {
		body = nil // net/http would not send it
	}
	a := reply{resp.StatusCode, resp.Header, string(body)}
	for _, fault := range contractFaults(r.Method, r.URL, a) {
		t.Errorf("%s %s = %d: %s", r.Method, r.URL, a.status, fault)
	}
	return a
}

// add adds an animal and returns it.
func (s *service) add(name string, category int64, status string) pet {
	s.t.Helper()
	want := newPet{name, category, status}
	body, _ := json.Marshal(want)
	a := s.do("POST", "/v1/pets", string(body))
	s.want(a, http.StatusCreated, "")
	got := decode[pet](s.t, a)
	if got.newPet != want {
		s.t.Fatalf("added %+v, got %+v", want, got.newPet)
	}
	return got
}

// want checks the status of a response, and that its body contains words.
func (s *service) want(a reply, status int, words string) {
	s.t.Helper()
	if a.status != status || !strings.Contains(a.body, words) {
		s.t.Errorf("got %d %s, want %d with %q", a.status, a.body, status, words)
	}
}

func decode[T any](t testing.TB, a reply) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(a.body), &v); err != nil {
		t.Fatalf("%s: %v", a.body, err)
	}
	return v
}

// connect opens the database as another program would.
func connect(t testing.TB, file string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Path: file, RawQuery: "_pragma=busy_timeout(10000)"}).String())
	must(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	return db
}

// sql runs statements on a connection of its own, as another program would.
func (s *service) sql(statements string, args ...any) {
	s.t.Helper()
	db := connect(s.t, s.db)
	defer db.Close()
	if _, err := db.Exec(statements, args...); err != nil {
		s.t.Fatalf("%s: %v", statements, err)
	}
}

// ask returns the result of a query, one value, on a connection of its own.
func (s *service) ask(query string) (value string) {
	s.t.Helper()
	db := connect(s.t, s.db)
	defer db.Close()
	if err := db.QueryRow(query).Scan(&value); err != nil {
		s.t.Fatalf("%s: %v", query, err)
	}
	return value
}

// pragma runs a PRAGMA on the connection on which the service writes, and returns its result, if there is one.
func (s *service) pragma(text string) string {
	s.t.Helper()
	rows, err := s.writer.QueryContext(context.Background(), "PRAGMA "+text, nil)
	must(s.t, err)
	defer rows.Close()
	value := make([]driver.Value, max(1, len(rows.Columns())))
	if err := rows.Next(value); err != nil && err != io.EOF {
		s.t.Fatal(err)
	}
	return fmt.Sprint(value[0])
}

// onRead makes the service call f whenever it reads an animal.
func (s *service) onRead(f func() error) {
	s.t.Helper()
	callbacks.Store(s.db, f)
	s.sql("ALTER TABLE pets RENAME TO animals; CREATE VIEW pets AS SELECT id, coalesce(call('" + s.db + "'), name) AS name, category_id, status FROM animals")
}

// onInsert makes the service call f whenever it inserts an animal, before the insert.
func (s *service) onInsert(f func() error) {
	s.t.Helper()
	callbacks.Store(s.db, f)
	s.sql("CREATE TRIGGER on_insert BEFORE INSERT ON pets BEGIN SELECT call('" + s.db + "'); END")
}

// writeFile creates a file with text in dir, and returns its path.
func writeFile(t testing.TB, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// must fails the test unless err is nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until condition returns true. It fails the test after 20 seconds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("this never happened: %s", what)
		}
	}
}

// document is openapi.json, decoded by TestMain.
var document map[string]any

// at returns the value at path in an OpenAPI document, or nil. It follows references.
func at(v any, path ...string) any {
	m, _ := v.(map[string]any)
	if ref, ok := m["$ref"].(string); ok {
		return at(document, append(strings.Split(strings.TrimPrefix(ref, "#/"), "/"), path...)...)
	}
	if len(path) == 0 {
		return v
	}
	return at(m[path[0]], path[1:]...)
}

// operation returns the operation in openapi.json that a request is for, or nil.
func operation(method, path string) any {
	if method == "HEAD" {
		method = "GET"
	}
	path = regexp.MustCompile(`^/v1/pets/[^/]+$`).ReplaceAllString(path, "/v1/pets/{petId}")
	return at(document, "paths", strings.TrimPrefix(path, "/v1"), strings.ToLower(method))
}

// contractFaults returns how a response differs from openapi.json and the rules for all responses.
func contractFaults(method string, target *url.URL, a reply) (faults []string) {
	add := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	for name, want := range map[string]string{"Content-Type": "application/json", "Cache-Control": "no-store",
		"X-Content-Type-Options": "nosniff", "Content-Length": strconv.Itoa(len(a.body))} {
		if got := a.header.Values(name); len(got) != 1 || got[0] != want && !(method == "HEAD" && name == "Content-Length") {
			add("%s is %q, want %q", name, got, want)
		}
	}
	if !regexp.MustCompile(`^[A-Z2-7]{26}$`).MatchString(a.header.Get("X-Request-Id")) {
		add("X-Request-Id is %q", a.header.Get("X-Request-Id"))
	}
	var body any
	if method != "HEAD" {
		dec := json.NewDecoder(strings.NewReader(a.body))
		dec.UseNumber()
		if err := dec.Decode(&body); err != nil {
			add("the body %q is not JSON: %v", a.body, err)
			return faults
		}
	}
	if a.status >= 400 && body != nil {
		faults = append(faults, schemaFaults(at(document, "components", "schemas", "Error"), body, "the error")...)
		if got := at(body, "status"); got != json.Number(strconv.Itoa(a.status)) || at(body, "code") != errorCodes[a.status] {
			add("the error is %s", a.body)
		}
	}
	op := operation(method, target.EscapedPath())
	if op == nil || a.status == http.StatusMethodNotAllowed || target.EscapedPath() == "/v1/pets/%2F" { // no id: ServeMux reads it as "/"
		return faults
	}
	response := at(op, "responses", strconv.Itoa(a.status))
	if response == nil {
		add("the status is not documented")
		return faults
	}
	headers, _ := at(response, "headers").(map[string]any)
	for name := range headers {
		values := a.header.Values(name)
		if at(headers, name, "required") == true && len(values) != 1 || len(values) > 1 {
			add("header %s is there %d times", name, len(values))
		}
		for _, value := range values {
			var v any = value
			if at(headers, name, "schema", "type") == "integer" {
				v = json.Number(value)
			}
			faults = append(faults, schemaFaults(at(headers, name, "schema"), v, "header "+name)...)
		}
	}
	for _, name := range []string{"Link", "Location", "WWW-Authenticate", "Deprecation", "Sunset", "Retry-After", "Idempotency-Replayed", "Allow"} {
		if headers[name] == nil && a.header.Get(name) != "" {
			add("header %s is not documented", name)
		}
	}
	if body != nil {
		faults = append(faults, schemaFaults(at(response, "content", "application/json", "schema"), body, "the body")...)
	}
	return faults
}

// schemaFaults returns how a value, decoded with UseNumber, differs from an OpenAPI schema.
func schemaFaults(schema, v any, where string) (faults []string) {
	add := func(format string, args ...any) {
		faults = append(faults, where+": "+fmt.Sprintf(format, args...))
	}
	bound := func(minimum, maximum string, n float64) {
		if limit, ok := at(schema, minimum).(float64); ok && n < limit {
			add("%v breaks %s %v", v, minimum, limit)
		}
		if limit, ok := at(schema, maximum).(float64); ok && n > limit {
			add("%v breaks %s %v", v, maximum, limit)
		}
	}
	if enum, ok := at(schema, "enum").([]any); ok && !slices.Contains(enum, v) {
		add("%v is not one of %v", v, enum)
	}
	if kind := fmt.Sprintf("%T", v); at(schema, "type") != map[string]string{"string": "string", "json.Number": "integer",
		"[]interface {}": "array", "map[string]interface {}": "object"}[kind] {
		add("%v is a %s, want %v", v, kind, at(schema, "type"))
	}
	switch v := v.(type) {
	case string:
		bound("minLength", "maxLength", float64(utf8.RuneCountInString(v)))
		if pattern, ok := at(schema, "pattern").(string); ok && !regexp.MustCompile(pattern).MatchString(v) {
			add("%q does not match %s", v, pattern)
		}
	case json.Number:
		n, err := strconv.ParseInt(v.String(), 10, 64)
		if err != nil {
			add("%v is not an int64", v)
		}
		bound("minimum", "maximum", float64(n))
	case []any:
		bound("minItems", "maxItems", float64(len(v)))
		for i, item := range v {
			faults = append(faults, schemaFaults(at(schema, "items"), item, fmt.Sprintf("%s[%d]", where, i))...)
		}
	case map[string]any:
		required, _ := at(schema, "required").([]any)
		for _, name := range required {
			if _, ok := v[name.(string)]; !ok {
				add("%v is missing", name)
			}
		}
		for name, member := range v {
			if property := at(schema, "properties", name); property != nil {
				faults = append(faults, schemaFaults(property, member, where+"."+name)...)
			} else if at(schema, "additionalProperties") == false {
				add("%s is unknown", name)
			}
		}
	}
	return faults
}

// TestEveryDocumentedStatusIsReached causes each response that openapi.json lists.
func TestEveryDocumentedStatusIsReached(t *testing.T) {
	t.Parallel()
	const animal = `{"name":"Rex","categoryId":7}`
	broken := func(s *service) { s.sql("DROP TABLE pets") }
	unreadable := func(s *service) { // a read uses the only open connection, and no other can be opened
		s.add("Rex", 7, "sold")
		reading, release := make(chan bool), make(chan bool)
		s.onRead(func() error {
			close(reading)
			<-release
			return nil
		})
		var first sync.WaitGroup
		first.Go(func() { s.do("GET", "/v1/pets?limit=1", "") })
		<-reading
		back := s.moveAway()
		s.t.Cleanup(func() {
			back()
			close(release)
			first.Wait()
		})
	}
	scenarios := map[string]struct {
		prepare              func(*service)
		method, target, body string
		headers              []string
	}{
		"listPets 200":  {nil, "GET", "/v1/pets", "", nil},
		"listPets 400":  {nil, "GET", "/v1/pets?limit=0", "", nil},
		"listPets 401":  {nil, "GET", "/v1/pets", "", []string{"Authorization:"}},
		"listPets 500":  {broken, "GET", "/v1/pets", "", nil},
		"listPets 503":  {unreadable, "GET", "/v1/pets", "", nil},
		"createPet 201": {nil, "POST", "/v1/pets", animal, nil},
		"createPet 400": {nil, "POST", "/v1/pets", "{}", nil},
		"createPet 401": {nil, "POST", "/v1/pets", animal, []string{"Authorization: Bearer wrong"}},
		"createPet 413": {nil, "POST", "/v1/pets", strings.Repeat(" ", maxBody+1), nil},
		"createPet 415": {nil, "POST", "/v1/pets", animal, []string{"Content-Type: text/plain"}},
		"createPet 422": {func(s *service) {
			s.do("POST", "/v1/pets", `{"name":"Tom","categoryId":7}`, "Idempotency-Key: k")
		}, "POST", "/v1/pets", animal, []string{"Idempotency-Key: k"}},
		"createPet 500": {broken, "POST", "/v1/pets", animal, nil},
		"createPet 503": {(*service).fill, "POST", "/v1/pets", `{"name":"` + strings.Repeat("x", 255) + `","categoryId":7}`, nil},
		"getPet 200":    {func(s *service) { s.add("Rex", 7, "sold") }, "GET", "/v1/pets/1", "", nil},
		"getPet 401":    {nil, "GET", "/v1/pets/1", "", []string{"Authorization:"}},
		"getPet 404":    {nil, "GET", "/v1/pets/1", "", nil},
		"getPet 500":    {broken, "GET", "/v1/pets/1", "", nil},
		"getPet 503":    {unreadable, "GET", "/v1/pets/1", "", nil},
	}
	for name, c := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			if c.prepare != nil {
				c.prepare(s)
			}
			if a := s.do(c.method, c.target, c.body, c.headers...); !strings.HasSuffix(name, strconv.Itoa(a.status)) {
				t.Errorf("got %d %s", a.status, a.body)
			}
		})
	}
	scenarios["createPet 408"] = scenarios["createPet 400"] // TestLimits causes it
	for _, methods := range document["paths"].(map[string]any) {
		for method := range methods.(map[string]any) {
			for status := range at(methods, method, "responses").(map[string]any) {
				name := at(methods, method, "operationId").(string) + " " + status
				if _, ok := scenarios[name]; !ok {
					t.Errorf("no test causes %s, which is documented", name)
				}
			}
		}
	}
}

// fill fills the database: it cannot grow any more.
func (s *service) fill() {
	s.t.Helper()
	s.pragma("max_page_count = " + s.pragma("page_count"))
	for i := 0; ; i++ { // until the last page is full
		body := fmt.Sprintf(`{"name":"%s","categoryId":%d}`, strings.Repeat("x", 200), i)
		if a := s.do("POST", "/v1/pets", body); a.status != http.StatusCreated {
			s.want(a, http.StatusServiceUnavailable, "unavailable")
			return
		}
	}
}

// moveAway renames the database file. back renames it back.
func (s *service) moveAway() (back func()) {
	s.t.Helper()
	must(s.t, os.Rename(s.db, s.db+".away"))
	return func() { must(s.t, os.Rename(s.db+".away", s.db)) }
}

// lock takes the write lock, as another program would, until unlock is called.
func (s *service) lock() (unlock func()) {
	s.t.Helper()
	db := connect(s.t, s.db)
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(s.t, err)
	return sync.OnceFunc(func() { db.Close() })
}

// together sends n creates with the given headers while the database is locked, again and again until they have shared one
// commit, which it finds in the write-ahead log (https://sqlite.org/fileformat.html#walformat). It returns the responses of
// each round.
func (s *service) together(n int, headers func(round, i int) []string) (rounds [][]reply) {
	s.t.Helper()
	commits := func() (n int) {
		wal, err := os.ReadFile(s.db + "-wal")
		must(s.t, err)
		for frame := 32; frame < len(wal); frame += 24 + 4096 {
			if binary.BigEndian.Uint32(wal[frame+4:]) != 0 {
				n++
			}
		}
		return n
	}
	eventually(s.t, "waiting creates share one commit", func() bool {
		before := commits()
		unlock := s.lock()
		answers := make([]reply, n)
		var sending, answered sync.WaitGroup
		sending.Add(n)
		for i := range n {
			answered.Go(func() {
				sending.Done()
				answers[i] = s.do("POST", "/v1/pets", fmt.Sprintf(`{"name":"animal %d","categoryId":7}`, i), headers(len(rounds), i)...)
			})
		}
		sending.Wait()
		unlock()
		answered.Wait()
		rounds = append(rounds, answers)
		return commits() == before+1
	})
	return rounds
}

// TestListPets tests the content of pages and the links between them.
func TestListPets(t *testing.T) {
	t.Parallel()
	s := newService(t)
	if a := s.do("GET", "/v1/pets", ""); a.body != "[]\n" || a.header.Get("Link") != "" {
		t.Errorf("an empty list is %q with Link %q", a.body, a.header.Get("Link"))
	}
	var all []pet
	for i := range 45 {
		all = append(all, s.add(fmt.Sprintf("animal %d", i), int64(i), petStatuses[i%3]))
	}
	sold := slices.DeleteFunc(slices.Clone(all), func(p pet) bool { return p.Status != "sold" })
	for _, c := range []struct {
		query, link string
		want        []pet
	}{
		{"", "</v1/pets?after=20>", all[:20]},
		{"?limit=1", "</v1/pets?after=1&limit=1>", all[:1]},
		{"?limit=1", "</v1/pets?after=1&limit=1>", all[:1]}, // from the cache
		{"?limit=45", "", all},
		{"?after=0&limit=45", "", all},
		{"?limit=44", "</v1/pets?after=44&limit=44>", all[:44]},
		{"?after=44", "", all[44:]},
		{"?after=9223372036854775807", "", []pet{}},
		{"?status=sold&limit=15", "", sold},
		{"?limit=14&status=sold", "</v1/pets?after=42&limit=14&status=sold>", sold[:14]},
		{"?%6Cimit=%31", "</v1/pets?after=1&limit=1>", all[:1]},
	} {
		a := s.do("GET", "/v1/pets"+c.query, "")
		if got := decode[[]pet](t, a); a.status != http.StatusOK || !slices.Equal(got, c.want) {
			t.Errorf("GET /v1/pets%s = %d %v, want %v", c.query, a.status, got, c.want)
		}
		link := strings.TrimSuffix(a.header.Get("Link"), `; rel="next"`)
		if link != c.link {
			t.Errorf("GET /v1/pets%s has Link %s, want %s", c.query, link, c.link)
		}
	}
}

func TestListPetsRefusesInvalidQueries(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for query, words := range map[string]string{
		"limit=0":                   "limit must be",
		"limit=101":                 "limit must be",
		"limit=05":                  "limit must be",
		"limit":                     "limit must be",
		"limit=5&limit=5":           `\"limit\" must not be repeated`,
		"status=":                   "status must be",
		"status=sold&status":        `\"status\" must not be repeated`,
		"status=Sold":               "status must be available, pending or sold",
		"after=-1":                  "after must be",
		"after=9223372036854775808": "after must be",
		"=5":                        `unknown parameter \"\"`,
		"limit=5;after=1":           "malformed",
		"limit=%zz":                 "malformed",
		"limit=0&status=x&foo=1":    `unknown parameter \"foo\"; limit must be an integer from 1 to 100; status must be`,
	} {
		s.want(s.do("GET", "/v1/pets?"+query, ""), http.StatusBadRequest, words)
	}
	var many []string
	for i := range 50 {
		many = append(many, fmt.Sprintf("p%02d=1", i))
	}
	s.want(s.do("GET", "/v1/pets?"+strings.Join(many, "&"), ""), http.StatusBadRequest, "and 40 more")
	s.want(s.do("GET", "/v1/pets?"+strings.Join(many[:10], "&"), ""), http.StatusBadRequest, `\"p09\"","status"`)
	s.want(s.do("GET", "/v1/pets?"+strings.Repeat("x", 5000), ""), http.StatusBadRequest, strings.Repeat("x", 64)+`\"`)
}

// TestPagingSeesEachAnimalOnce follows the links while animals are added.
func TestPagingSeesEachAnimalOnce(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for range 120 {
		s.add("before", 1, "available")
	}
	stop := repeat(4, func(int) { s.add("meanwhile", 1, "available") })
	var ids []int64
	for target := "/v1/pets?limit=7&status=available"; target != "" && len(ids) < 120; {
		a := s.do("GET", target, "")
		for _, p := range decode[[]pet](t, a) {
			ids = append(ids, p.ID)
		}
		target, _, _ = strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
	}
	stop()
	for i := range max(120, len(ids)) {
		if i >= len(ids) || ids[i] != int64(i+1) {
			t.Fatalf("the ids on the pages are %v, want 1, 2, 3, ... 120", ids)
		}
	}
}

func TestCreatePetKeepsWhatWasSent(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for i, c := range []struct{ body, want string }{
		{`{"name":"Rex","categoryId":7}`, `"name":"Rex","categoryId":7,"status":"available"`},
		{` { "status" : "sold" , "categoryId" : -1 , "name" : "a" } ` + "\r\n\t", `"name":"a","categoryId":-1,"status":"sold"`},
		{"{\r\n\t\"name\":\t\"x\",\r\n\t\"categoryId\":\r\n1,\t\"status\"\n:\r\"pending\"\t}", `"name":"x","categoryId":1,"status":"pending"`},
		{`{"name":"}]:,{[\"\\","categoryId":-9223372036854775808}`, `"name":"}]:,{[\"\\","categoryId":-9223372036854775808,"status":"available"`},
		{`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`, "\"name\":\"\ud7a3\ue000\U0010FFFF\U00010000\"," + `"categoryId":9223372036854775807,"status":"available"`},
		{`{"name":" <&> ","categoryId":0}`, `"name":" <&> ","categoryId":0,"status":"available"`},
		{`{"n\u0061me":"x","categoryId":1}`, `"name":"x","categoryId":1,"status":"available"`},
		{`{"name":"\uD83D\uDC36\u00e9\\uD83D","categoryId":1}`, `"name":"🐶é\\uD83D","categoryId":1,"status":"available"`},
		{`{"name":"\"\\\/\b\f\n\r\t","categoryId":1}`, `"name":"\"\\/\b\f\n\r\t","categoryId":1,"status":"available"`},
		{`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":1}`, `"name":"` + strings.Repeat("🐶", 255) + `","categoryId":1,"status":"available"`},
	} {
		want := fmt.Sprintf("{\"id\":%d,%s}\n", i+1, c.want)
		a := s.do("POST", "/v1/pets", c.body, "Content-Type: application/json; charset=latin1")
		location := fmt.Sprintf("/v1/pets/%d", i+1)
		if a.status != http.StatusCreated || a.body != want || a.header.Get("Location") != location || a.header.Get("Connection") != "" {
			t.Errorf("POST %s = %d %s, at %q, want %s", c.body, a.status, a.body, a.header.Get("Location"), want)
		}
		if got := s.do("GET", location, ""); got.body != want {
			t.Errorf("GET %s = %s, want %s", location, got.body, want)
		}
	}
}

func TestCreatePetRefusesInvalidBodies(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for body, words := range map[string]string{
		"":                                       "one JSON object",
		"null":                                   "one JSON object",
		`{"name":"x","categoryId":1,}`:           `one JSON object: invalid character '}' looking for beginning of object key string, at byte 28"`,
		`{"name":"x" "categoryId":1}`:            `invalid character '\"' after object key:value pair, at byte 13"`,
		`{"name":"x","categoryId":1 `:            `unexpected end of JSON input, at byte 27"`,
		`{"name":"x","categoryId":1}{}`:          "one JSON object",
		"\ufeff{}":                               "one JSON object",
		"{\"name\":\"\xff\",\"categoryId\":1}":   "UTF-8",
		`{}`:                                     "name is required; categoryId is required",
		`{"name":null,"categoryId":null}`:        "name must be a string of 1 to 255 characters, not all white space, without U+0000, U+FFFD and unpaired surrogates; categoryId must be an integer",
		`{"name":"x","categoryID":1}`:            `unknown member \"categoryID\"; categoryId is required`,
		`{"name":"x","name":"x","categoryId":1}`: `\"name\" must not be repeated`,
		`{"name":"x","n\u0061me":"y","categoryId":1}`:                `\"name\" must not be repeated`,
		`{"name":7,"categoryId":1}`:                                  "name must be",
		"{\"name\":\" \u00a0\u2003\u3000\u0085\",\"categoryId\":1}":  "name must be",
		`{"name":"a\u0000b","categoryId":1}`:                         "name must be",
		`{"name":"\uFFFD","categoryId":1}`:                           "name must be",
		`{"name":"Rex�","categoryId":1}`:                             "name must be",
		`{"name":"\uD83D","categoryId":1}`:                           "name must be",
		`{"name":"\uDC36\uD83D","categoryId":1}`:                     "name must be",
		`{"name":"\uD83D\uD83D","categoryId":1}`:                     "name must be",
		`{"name":"` + strings.Repeat("é", 256) + `","categoryId":1}`: "name must be",
		`{"name":"\uDC36\uDC36","categoryId":1}`:                     "name must be",
		`{"name":"\ud83d","categoryId":1}`:                           "name must be",
		`{"name":nul}`:                                               `invalid character '}' in literal null (expecting 'l'), at byte 12`,
		`{"` + strings.Repeat("x", 99) + `":1}`:                      strings.Repeat("x", 64) + `\"`,
		`{"name":"\uD800\uE000","categoryId":1}`:                     "name must be",
		`{"name":"x","categoryId":9223372036854775808}`:              "categoryId must be",
		`{"name":"x","categoryId":"1"}`:                              "categoryId must be",
		`{"name":"x","categoryId":1e2}`:                              "categoryId must be",
		`{"name":"x","categoryId":1,"status":null}`:                  "status must be available, pending or sold",
		`{"status":["sold",[{}]],"name":"x","categoryId":1}`:         `"status must be available, pending or sold","status"`,
		`{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`:       "status must be available, pending or sold; name must be a string of 1 to 255 characters, not all white space, without U+0000, U+FFFD and unpaired surrogates; unknown member \\\"x\\\"; categoryId must be",
	} {
		s.want(s.do("POST", "/v1/pets", body), http.StatusBadRequest, words)
	}
	if a := s.do("GET", "/v1/pets", ""); a.body != "[]\n" {
		t.Errorf("the animals are %s, want none", a.body)
	}
	exact := `{"name":"x","categoryId":1}`
	exact += strings.Repeat(" ", maxBody-len(exact))
	s.want(s.do("POST", "/v1/pets", exact), http.StatusCreated, "")
	s.want(s.do("POST", "/v1/pets", exact+" "), http.StatusRequestEntityTooLarge, "65536")
	r := httptest.NewRequest("POST", "/v1/pets", io.MultiReader(strings.NewReader(exact), strings.NewReader(" "))) // chunked
	s.want(s.serve(r), http.StatusRequestEntityTooLarge, "65536")
	r = httptest.NewRequest("POST", "/v1/pets", io.MultiReader(strings.NewReader(`{"name":`), iotest.ErrReader(io.ErrUnexpectedEOF)))
	s.want(s.serve(r), http.StatusBadRequest, "read to its end") // the client disconnects
}

// TestPatternOfNames tests that the pattern in openapi.json allows the names that the service accepts. It has \s in the sense
// of ECMAScript, which counts U+FEFF as white space.
func TestPatternOfNames(t *testing.T) {
	t.Parallel()
	text := at(document, "components", "schemas", "NewPet", "properties", "name", "pattern").(string)
	pattern := regexp.MustCompile(strings.ReplaceAll(text, `\s`, "\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"))
	s := newService(t)
	for c := range rune(unicode.MaxRune) {
		matches := pattern.MatchString(string(c))
		if matches && !unicode.IsSpace(c) && c%4999 > 0 || c == 0xfeff {
			continue // other characters are tried one in 4999
		}
		body, _ := json.Marshal(map[string]any{"name": string(c), "categoryId": 7})
		if a := s.do("POST", "/v1/pets", string(body)); (a.status == http.StatusCreated) != matches {
			t.Errorf("the name %U: %d, but it matches the pattern: %v", c, a.status, matches)
		}
	}
}

func TestContentType(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for value, status := range map[string]int{
		"application/json":                    http.StatusCreated,
		"Application/JSON;charset=\"utf-16\"": http.StatusCreated,
		"application/json; x":                 http.StatusUnsupportedMediaType,
		"application/jsonp":                   http.StatusUnsupportedMediaType,
		"":                                    http.StatusUnsupportedMediaType,
	} {
		s.want(s.do("POST", "/v1/pets", `{"name":"x","categoryId":1}`, "Content-Type:"+value), status, "")
	}
	s.want(s.do("POST", "/v1/pets?limit=x&anything", `{"name":"x","categoryId":1}`, "Accept: text/html"), http.StatusCreated, "")
	s.want(s.do("GET", "/v1/pets", "", "Accept: text/html"), http.StatusOK, "")
	s.want(s.do("POST", "/v1/pets", `{"name":"x","categoryId":1}`, "Content-Type: application/json", "Content-Type: application/json"),
		http.StatusUnsupportedMediaType, "application/json")
	s.want(s.do("POST", "/v1/pets", `{"name":"x","categoryId":1}`, `Content-Type: application/json; x="a`, `Content-Type: b"`),
		http.StatusUnsupportedMediaType, "application/json")
}

func TestGetPet(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "pending")
	for target, status := range map[string]int{
		"/v1/pets/1":                            http.StatusOK,
		"/v1/pets/1?limit=x&anything":           http.StatusOK,
		"/v1/pets/2":                            http.StatusNotFound,
		"/v1/pets/-1":                           http.StatusNotFound,
		"/v1/pets/01":                           http.StatusNotFound,
		"/v1/pets/rex":                          http.StatusNotFound,
		"/v1/pets/1%2F":                         http.StatusNotFound,
		"/v1/pets/" + strings.Repeat("9", 3000): http.StatusNotFound,
	} {
		a := s.do("GET", target, "")
		s.want(a, status, "")
		s.want(s.do("HEAD", target, ""), status, "")
		got := []string{a.header.Get("Deprecation"), a.header.Get("Sunset"), a.header.Get("Link")}
		if !slices.Equal(got, []string{"@1795132800", "Thu, 05 Dec 2030 00:00:00 GMT", `</v1/pets>; rel="successor-version"`}) {
			t.Errorf("GET %s has Deprecation, Sunset and Link %q", target, got)
		}
	}
}

// TestRouting requests unknown paths and methods, with a key and without.
func TestRouting(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, c := range []struct {
		request, allow string
		status         int
	}{
		{"GET /", "", http.StatusNotFound},
		{"GET http://x", "", http.StatusNotFound},
		{"GET /v1/pets/", "", http.StatusNotFound},
		{"GET //v1/pets", "", http.StatusNotFound},
		{"GET /v1/x/../pets", "", http.StatusNotFound},
		{"GET /v1%2Fpets", "", http.StatusNotFound},
		{"DELETE /v1/pets", "GET, HEAD, POST", http.StatusMethodNotAllowed},
		{"POST /v1/pets/1", "GET, HEAD", http.StatusMethodNotAllowed},
		{"GET /v1/pets/%2F", "", http.StatusNotFound},
		{"POST /healthz", "GET, HEAD", http.StatusMethodNotAllowed},
		{"DELETE /openapi.json", "GET, HEAD", http.StatusMethodNotAllowed},
	} {
		method, target, _ := strings.Cut(c.request, " ")
		a := s.do(method, target, "{")
		s.want(a, c.status, errorCodes[c.status])
		if a.header.Get("Allow") != c.allow || a.header.Get("Location") != "" {
			t.Errorf("%s has Allow %q and Location %q, want Allow %q", c.request, a.header.Get("Allow"), a.header.Get("Location"), c.allow)
		}
		a = s.do(method, target, "{", "Authorization:")
		s.want(a, http.StatusUnauthorized, "unauthorized")
		if a.header.Get("Allow") != "" {
			t.Errorf("%s without a key has Allow", c.request)
		}
	}
	s.want(s.do("GET", "/healthz", "", "Authorization:"), http.StatusOK, `{"status":"ok"}`)
	s.want(s.do("HEAD", "/healthz", "", "Authorization:"), http.StatusOK, "")
	s.want(s.do("HEAD", "/openapi.json", "", "Authorization:"), http.StatusOK, "")
	if a := s.do("GET", "/openapi.json", "", "Authorization:"); a.body != string(openAPI) {
		t.Error("GET /openapi.json does not return openapi.json")
	}
	s.want(s.do("HEAD", "/v1/pets", ""), http.StatusOK, "")
	r := httptest.NewRequest("OPTIONS", "/", nil)
	r.URL.Path, r.RequestURI = "*", "*"
	s.want(s.serve(r, "Authorization:"), http.StatusUnauthorized, "")
}

func TestOrderOfErrors(t *testing.T) {
	t.Parallel()
	s := newService(t)
	large := strings.Repeat("x", maxBody+1)
	text, badKey := "Content-Type: text/plain", "Idempotency-Key: a b"
	s.want(s.do("POST", "/v1/pets", large, text, badKey, "Authorization: Bearer x"), http.StatusUnauthorized, "")
	s.want(s.do("PATCH", "/v1/pets", large, text, badKey), http.StatusMethodNotAllowed, "")
	s.want(s.do("POST", "/v1/pets", large, text, badKey), http.StatusUnsupportedMediaType, "")
	s.want(s.do("POST", "/v1/pets", large, badKey), http.StatusBadRequest, "Idempotency-Key")
	s.want(s.do("POST", "/v1/pets", large), http.StatusRequestEntityTooLarge, "")
}

func TestAPIKeyCheck(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const missing, invalid = `Bearer realm="animalstore"`, `Bearer realm="animalstore", error="invalid_token"`
	for _, c := range []struct {
		headers   string
		challenge string // "" if the key is valid
	}{
		{"Authorization: Bearer test-key", ""},
		{"Authorization: bearer  other-key", ""},
		{"Authorization:", missing},
		{"Authorization: Basic dGVzdC1rZXk=", missing},
		{"Authorization: Bearer", missing},
		{"Authorization: test-key", missing},
		{"Authorization: Bearertest-key", missing},
		{"Authorization: Bearer test-ke", invalid},
		{"Authorization: Bearer TEST-KEY", invalid},
		{"Authorization: Bearer test-key,other-key", invalid},
		{"Authorization: Bearer test-key|Authorization: Bearer test-key", missing},
		{"Authorization: Basic x|Authorization: Bearer test-key", missing},
	} {
		a := s.do("GET", "/v1/pets", "", strings.Split(c.headers, "|")...)
		if c.challenge == "" {
			s.want(a, http.StatusOK, "")
		} else {
			s.want(a, http.StatusUnauthorized, "API key")
		}
		if got := a.header.Get("WWW-Authenticate"); got != c.challenge {
			t.Errorf("%s: WWW-Authenticate is %q, want %q", c.headers, got, c.challenge)
		}
		if strings.Contains(a.body, "test-key") {
			t.Errorf("the response contains the key: %s", a.body)
		}
	}
	s.want(s.do("GET", "/v1/pets?access_token=test-key", "", "Authorization:"), http.StatusUnauthorized, "")
	s.add("Rex", 7, "sold")
	for _, target := range []string{"/v1/pets", "/v1/pets/1"} {
		s.want(s.do("GET", target, ""), http.StatusOK, "Rex") // fills the cache
		s.want(s.do("GET", target, "", "Authorization:"), http.StatusUnauthorized, "")
	}
}

// TestLog tests what the log line of a request contains, and what it must not contain.
func TestLog(t *testing.T) {
	t.Parallel()
	s := newService(t)
	one, two := s.do("GET", "/healthz", ""), s.do("GET", "/healthz", "")
	if one.header.Get("X-Request-Id") == two.header.Get("X-Request-Id") {
		t.Error("two requests have the same id")
	}
	line := func(a reply) string {
		lines := regexp.MustCompile(`.* id=`+a.header.Get("X-Request-Id")+` .*\n`).FindAllString(s.log.String(), -1)
		if len(lines) != 1 {
			t.Fatalf("%d lines for request %s: %s", len(lines), a.header.Get("X-Request-Id"), s.log.String())
		}
		return lines[0]
	}
	got := line(s.do("GET", "/v1/pets?limit=7", "", "X-Request-Id: mine"))
	for _, word := range []string{"level=INFO msg=request ", " client=192.0.2.1:1234 method=GET path=/v1/pets status=200 bytes=3 duration=", " key=62af8704\n"} {
		if !strings.Contains(got, word) {
			t.Errorf("no %q in %s", word, got)
		}
	}
	for _, word := range []string{testKey, "limit", "mine"} {
		if strings.Contains(got, word) {
			t.Errorf("%q is in %s", word, got)
		}
	}
	if got := line(s.do("HEAD", "/v1/pets?after=5", "")); !strings.Contains(got, " bytes=0 ") {
		t.Errorf("the line of a HEAD request is %s", got)
	}
	if got := line(s.do("GET", "/v1/pets/x%0Ay", "", "Authorization: Bearer guess")); strings.Contains(got, "guess") ||
		strings.Contains(got, "key=") || !strings.Contains(got, `path="/v1/pets/x\ny" status=401`) ||
		!strings.Contains(got, ` error="a valid API key is required`) {
		t.Errorf("the line of a refused request is %s", got)
	}
	if got := line(s.do("GET", "/v1/pets?limit=0", "")); !strings.Contains(got, `level=INFO `) || !strings.Contains(got, ` key=62af8704 error="limit must be`) {
		t.Errorf("the line of an invalid request is %s", got)
	}
	long := strings.Repeat("x", 1024)
	if got := line(s.do(long+"x", "/"+long, "")); !strings.Contains(got, " method="+long+" path=/"+long[1:]+" status=404 ") {
		t.Errorf("the line of a request with a long method and path is %s", got)
	}
	read := func() error { panic("no such luck") }
	s.add("Rex", 7, "sold")
	s.onRead(func() error { return read() })
	failure := func(target string, status int, word string) {
		a := s.do("GET", target, "")
		if got := line(a); a.status != status || strings.Contains(a.body, "no such") || !strings.Contains(got, "level=ERROR") || !strings.Contains(got, word) {
			t.Errorf("GET %s = %d %s, log %s", target, a.status, a.body, got)
		}
	}
	failure("/v1/pets", http.StatusInternalServerError, "no such luck")
	failure("/v1/pets/1", http.StatusInternalServerError, "server_test.go") // the stack
	read = func() error { return errors.New("no such animal") }
	failure("/v1/pets", http.StatusInternalServerError, "no such animal")
	failure("/healthz", http.StatusServiceUnavailable, "no such animal")
}

// brokenWriter is a ResponseWriter that panics when it gets the body.
type brokenWriter struct {
	*httptest.ResponseRecorder
	responses int
}

func (w *brokenWriter) WriteHeader(status int) {
	w.responses++
	w.ResponseRecorder.WriteHeader(status)
}

func (w *brokenWriter) Write([]byte) (int, error) { panic("broken") }

// TestPanicsForNetHTTP tests that net/http gets a panic after the response was sent, and http.ErrAbortHandler.
func TestPanicsForNetHTTP(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")
	s.onRead(func() error { panic(http.ErrAbortHandler) })
	for target, c := range map[string]struct {
		responses int
		panics    any
	}{"/openapi.json": {1, "broken"}, "/v1/pets": {0, http.ErrAbortHandler}} {
		r := httptest.NewRequest("GET", target, nil)
		setHeaders(r, nil)
		w := &brokenWriter{httptest.NewRecorder(), 0}
		func() {
			defer func() {
				if p := recover(); p != c.panics || w.responses != c.responses {
					t.Errorf("GET %s: the panic is %v after %d responses, want %v after %d", target, p, w.responses, c.panics, c.responses)
				}
			}()
			s.ServeHTTP(w, r)
		}()
	}
}

// TestLogWriter writes to a pipe that nobody reads for some time, and then to one that nobody ever reads.
func TestLogWriter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		log := newLogWriter(pw)
		for i := range 5000 {
			fmt.Fprintln(log, "line", i)
		}
		var text strings.Builder
		go io.Copy(&text, pr)
		time.Sleep(time.Second)
		fmt.Fprintln(log, "the end")
		log.close()
		pr.Close()
		synctest.Wait()
		written, dropped := strings.Count(text.String(), "line "), 0
		for _, report := range regexp.MustCompile(`level=WARN .* lines=(\d+)\n`).FindAllStringSubmatch(text.String(), -1) {
			n, _ := strconv.Atoi(report[1])
			dropped += n
		}
		if written < 1000 || dropped == 0 || written+dropped != 5000 || !strings.HasSuffix(text.String(), "\nthe end\n") {
			t.Errorf("%d lines were written and %d reported as dropped, want 5000 in all, in\n%s", written, dropped, text.String())
		}
	})
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		log := newLogWriter(pw)
		fmt.Fprintln(log, "line")
		start := time.Now()
		log.close()
		if waited := time.Since(start); waited != time.Second {
			t.Errorf("close waited %v, want 1s", waited)
		}
		pr.Close()
		time.Sleep(time.Second)
	})
}

// pipes is a net.Listener for connections in memory, which work under a fake clock.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
}

func (l *pipes) Accept() (net.Conn, error) {
	if conn, ok := <-l.conns; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

func (l *pipes) Close() error {
	l.once.Do(func() { close(l.conns) })
	return nil
}

func (l *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// send opens a connection and sends text on it.
func (l *pipes) send(text string) net.Conn {
	client, server := net.Pipe()
	l.conns <- server
	go io.WriteString(client, text)
	synctest.Wait()
	return client
}

// received returns the response to a request with the given method on conn.
func (s *service) received(conn net.Conn, method string) (reply, *http.Response) {
	s.t.Helper()
	r := httptest.NewRequest(method, "/v1/pets", nil)
	resp, err := http.ReadResponse(bufio.NewReader(conn), r)
	must(s.t, err)
	return checked(s.t, r, resp), resp
}

// serveInMemory serves connections in memory until stop is called. stop returns when the service has stopped.
func (s *service) serveInMemory() (ln *pipes, stop func()) {
	ln = &pipes{conns: make(chan net.Conn)}
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error)
	go func() { ended <- s.server.serve(ctx, ln) }()
	return ln, func() {
		cancel()
		must(s.t, <-ended)
	}
}

const (
	withKey  = "Host: x\r\nAuthorization: Bearer " + testKey + "\r\n"
	length29 = "Content-Length: 29\r\n\r\n"
)

// TestStop tests what a stop waits for, with a fake clock.
func TestStop(t *testing.T) {
	t.Parallel()
	const soon, late = 250 * time.Millisecond, 5250 * time.Millisecond
	for what, c := range map[string]struct {
		sent        string
		later       time.Duration // when the body is sent, 0 for never
		least, most time.Duration
	}{
		"a request that is complete":       {"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 0, soon, soon},
		"a connection that is kept":        {"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 0, soon, soon},
		"a connection that sent nothing":   {"", 0, soon, late},
		"half a header":                    {"GET /v1/pets HTTP/1.1\r\n" + withKey, 0, soon, late},
		"a body without a key":             {"POST /v1/pets HTTP/1.1\r\nHost: x\r\n" + length29, 0, soon, late},
		"a request whose body comes late":  {"POST /v1/pets HTTP/1.1\r\n" + withKey + length29, 4 * time.Second, 4 * time.Second, late},
		"a request whose body never comes": {"POST /v1/pets HTTP/1.1\r\n" + withKey + length29, 0, late, late},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newService(t)
			ln, stop := s.serveInMemory()
			conn := ln.send(c.sent)
			defer conn.Close()
			if strings.HasPrefix(c.sent, "GET /healthz") {
				s.received(conn, "PUT") // any method of which openapi.json says nothing
			}
			if c.later > 0 {
				go func() {
					time.Sleep(c.later)
					go io.WriteString(conn, `{"name":"Rex","categoryId":7}`)
					if a, resp := s.received(conn, "POST"); a.status != http.StatusCreated || !resp.Close {
						t.Errorf("%s: got %d %s, Connection: close %v", what, a.status, a.body, resp.Close)
					}
				}()
			}
			start := time.Now()
			stop()
			if took := time.Since(start); took < c.least || took > c.most {
				t.Errorf("%s: the stop took %v, want %v to %v", what, took, c.least, c.most)
			}
		})
	}
}

// TestStopLetsClientsClose sends a request on an idle connection after a stop has begun.
func TestStopLetsClientsClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		ln, stop := s.serveInMemory()
		const get = "GET /v1/pets HTTP/1.1\r\n" + withKey + "\r\n"
		conn := ln.send(get)
		s.received(conn, "GET")
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			time.Sleep(200 * time.Millisecond)
			go io.WriteString(conn, get)
			if a, resp := s.received(conn, "GET"); a.status != http.StatusOK || !resp.Close {
				t.Errorf("got %d, Connection: close %v", a.status, resp.Close)
			}
		}()
		stop()
		<-answered
	})
}

// TestLimits tests the limits of the server, with a fake clock.
func TestLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		ln, stop := s.serveInMemory()
		for size, want := range map[int]string{15 << 10: "HTTP/1.1 200", 17 << 10: "HTTP/1.1 431"} {
			conn := ln.send("GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", size) + "\r\n\r\n")
			if line, _ := bufio.NewReader(conn).ReadString('\n'); !strings.HasPrefix(line, want) {
				t.Errorf("with a header of %d bytes the response is %q, want %s", size, line, want)
			}
			conn.Close()
		}
		conn := ln.send("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
		if line, _ := bufio.NewReader(conn).ReadString('\n'); !strings.HasPrefix(line, "HTTP/1.1 401") {
			t.Errorf("OPTIONS * without a key = %q, want 401", line)
		}
		conn.Close()
		for sent, want := range map[string]time.Duration{
			"": 5 * time.Second, "GET /v1/pets HTTP/1.1\r\n": 5 * time.Second, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n": 75 * time.Second,
		} {
			start := time.Now()
			io.Copy(io.Discard, ln.send(sent))
			if took := time.Since(start); took != want {
				t.Errorf("after %q the connection was closed after %v, want %v", sent, took, want)
			}
		}
		for header, body := range map[string]string{
			"Host: x\r\n" + length29:                                       strings.Repeat("x", 29),
			"Host: x\r\nConnection: close\r\n" + length29:                  strings.Repeat("x", 29),
			"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n":                "1\r\nx\r\n0\r\n\r\n",
			withKey + "Content-Type: text/plain\r\n" + length29:            strings.Repeat("x", 29),
			withKey + "Connection: close\r\nContent-Length: 70000\r\n\r\n": strings.Repeat("x", 70000), // the service reads a part of it
			"Host: x\r\nContent-Length: 1000000\r\n\r\n":                   strings.Repeat("x", 1000000),
		} {
			start := time.Now()
			conn = ln.send("POST /v1/pets HTTP/1.1\r\n" + header)
			sent := make(chan error)
			go func() {
				if len(body) < 100 {
					time.Sleep(time.Second)
				}
				_, err := io.WriteString(conn, body)
				sent <- err
			}()
			if a, resp := s.received(conn, "POST"); a.status/100 != 4 || !resp.Close || time.Since(start) > 0 {
				t.Errorf("%q: got %d after %v, Connection: close %v", header, a.status, time.Since(start), resp.Close)
			}
			if err := <-sent; (err == nil) != (len(body) < 256<<10) {
				t.Errorf("%q: sending the body of %d bytes after the response: %v", header, len(body), err)
			}
			conn.Close()
		}
		conn = ln.send("GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
		time.Sleep(21 * time.Second)
		if n, _ := io.Copy(io.Discard, conn); n > 0 {
			t.Errorf("%d bytes of a response arrived after the write timeout", n)
		}
		start := time.Now()
		conn = ln.send("POST /v1/pets HTTP/1.1\r\n" + withKey + length29 + `{"name":`)
		a, resp := s.received(conn, "POST")
		s.want(a, http.StatusRequestTimeout, "within 10 seconds")
		if took := time.Since(start); took != 10*time.Second || !resp.Close {
			t.Errorf("the service waited %v for the body, want 10s; Connection: close %v", took, resp.Close)
		}
		conn.Close()
		stop()
	})
}

// TestDisconnectedClient sends requests with a cancelled context: creates are completed, and reads are not interrupted.
func TestDisconnectedClient(t *testing.T) {
	t.Parallel()
	s := newService(t)
	ctx, leave := context.WithCancel(t.Context())
	leave()
	s.want(s.serve(httptest.NewRequestWithContext(ctx, "POST", "/v1/pets", strings.NewReader(`{"name":"Rex","categoryId":7}`))), http.StatusCreated, "")
	for _, target := range []string{"/v1/pets", "/v1/pets/1", "/healthz"} {
		s.want(s.serve(httptest.NewRequestWithContext(ctx, "GET", target, nil)), http.StatusOK, "")
	}
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const animal = `{"name":"Rex","categoryId":7}`
	first := s.do("POST", "/v1/pets", animal, "Idempotency-Key: k")
	s.want(first, http.StatusCreated, `"id":1,`)
	if first.header.Get("Idempotency-Replayed") != "" {
		t.Error("the first response has Idempotency-Replayed")
	}
	s.sql("UPDATE pets SET name = 'edited' WHERE id = 1")
	for _, same := range []string{animal, `{ "status":"available", "categoryId":7, "name":"\u0052ex" }`} {
		again := s.do("POST", "/v1/pets", same, "Idempotency-Key: k")
		if again.status != http.StatusCreated || again.body != first.body || again.header.Get("Idempotency-Replayed") != "true" ||
			again.header.Get("Location") != first.header.Get("Location") {
			t.Errorf("%s repeated = %d %s %v, want %s", same, again.status, again.body, again.header, first.body)
		}
	}
	for _, other := range []string{`{"name":"rex","categoryId":7}`, `{"name":"Rex","categoryId":8}`, `{"name":"Rex","categoryId":7,"status":"sold"}`} {
		s.want(s.do("POST", "/v1/pets", other, "Idempotency-Key: k"), http.StatusUnprocessableEntity, "idempotency_key_reused")
	}
	s.want(s.do("POST", "/v1/pets", `{"name":1}`, "Idempotency-Key: k"), http.StatusBadRequest, "name must")
	s.want(s.do("POST", "/v1/pets", animal, "Idempotency-Key: K"), http.StatusCreated, `"id":2,`)
	s.want(s.do("POST", "/v1/pets", animal, "Idempotency-Key: k", "Authorization: Bearer "+otherKey), http.StatusCreated, `"id":3,`)
	s.want(s.do("POST", "/v1/pets", animal), http.StatusCreated, `"id":4,`)
	s.want(s.do("POST", "/v1/pets", animal, "Idempotency-Key: !"+strings.Repeat("~", 254)), http.StatusCreated, `"id":5,`)
	for _, bad := range []string{"Idempotency-Key:", "Idempotency-Key: a b", "Idempotency-Key: \x7f", "Idempotency-Key: é", "Idempotency-Key: a|Idempotency-Key: a",
		"Idempotency-Key: " + strings.Repeat("k", 256)} {
		s.want(s.do("POST", "/v1/pets", animal, strings.Split(bad, "|")...), http.StatusBadRequest, "1 to 255 visible ASCII")
	}
	if got := len(decode[[]pet](t, s.do("GET", "/v1/pets", ""))); got != 5 {
		t.Errorf("%d animals are stored, want 5", got)
	}
}

func TestIdempotencyKeyIsForgottenAfterADay(t *testing.T) {
	t.Parallel()
	s := newService(t)
	create := func(key any, id int) {
		t.Helper()
		a := s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`, fmt.Sprint("Idempotency-Key: ", key))
		s.want(a, http.StatusCreated, fmt.Sprintf(`"id":%d,`, id))
	}
	age := func(d time.Duration) {
		s.sql("UPDATE idempotency_keys SET created = unixepoch() - ?", int64(d.Seconds()))
	}
	for i := range 10 {
		create(i, i+1)
	}
	const day = 24 * time.Hour
	age(day - time.Second)
	create(0, 1)
	age(-day) // as if the clock had been set back
	create(0, 1)
	age(day + time.Second)
	create(0, 11)
	create(0, 11)
	for i := range 4 { // each commit deletes two expired keys
		create(fmt.Sprint("new-", i), 12+i)
	}
	if left := s.ask("SELECT count(*) FROM idempotency_keys"); left != "5" {
		t.Errorf("%s keys are stored, want 5", left)
	}
}

func TestAnimalsOutliveTheProcess(t *testing.T) {
	t.Parallel()
	db := filepath.Join(t.TempDir(), "animals.db")
	t.Run("first", func(t *testing.T) {
		s := openService(t, db)
		s.add("Rex", 7, "sold")
		s.do("POST", "/v1/pets", `{"name":"Tom","categoryId":8}`, "Idempotency-Key: k")
		s.sql("DELETE FROM pets WHERE id = 2")
	})
	t.Run("no write", func(t *testing.T) { openService(t, db) })
	if files := snapshot(t, filepath.Dir(db)); strings.Count(files, "\n") != 1 {
		t.Errorf("the files are\n%s", files)
	}
	s := openService(t, db)
	s.want(s.do("GET", "/v1/pets", ""), http.StatusOK, `[{"id":1,"name":"Rex","categoryId":7,"status":"sold"}]`)
	a := s.do("POST", "/v1/pets", `{"name":"Tom","categoryId":8}`, "Idempotency-Key: k")
	s.want(a, http.StatusCreated, `"id":2,`)
	if a.header.Get("Idempotency-Replayed") != "true" {
		t.Error("the Idempotency-Key was forgotten")
	}
	if p := s.add("new", 1, "sold"); p.ID != 3 {
		t.Errorf("the new animal has the id %d, want 3", p.ID)
	}
}

// TestWaitingCreatesShareOneCommit sends each Idempotency-Key with two animals.
func TestWaitingCreatesShareOneCommit(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, answers := range s.together(20, func(round, i int) []string { return []string{fmt.Sprintf("Idempotency-Key: %d-%d", round, i%10)} }) {
		count := map[int]int{}
		for _, a := range answers {
			count[a.status]++
		}
		if count[http.StatusCreated] != 10 || count[http.StatusUnprocessableEntity] != 10 {
			t.Errorf("the numbers of responses by status are %v, want ten 201 and ten 422", count)
		}
	}
}

// TestOneInsertFailsAlone has a trigger refuse one animal in a batch of ten.
func TestOneInsertFailsAlone(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.sql(`CREATE TRIGGER refuse BEFORE INSERT ON pets WHEN new.name = 'animal 3' BEGIN SELECT RAISE(ABORT, 'refused'); END`)
	rounds := s.together(10, func(round, i int) []string { return []string{fmt.Sprintf("Idempotency-Key: %d-%d", round, i)} })
	for _, answers := range rounds {
		for i, a := range answers {
			if want := map[bool]int{true: http.StatusInternalServerError, false: http.StatusCreated}[i == 3]; a.status != want {
				t.Errorf("create %d = %d %s, want %d", i, a.status, a.body, want)
			}
		}
	}
	if got, want := s.ask("SELECT count(*) FROM pets WHERE name <> 'animal 3'"), strconv.Itoa(9*len(rounds)); got != want || s.ask("SELECT count(*) FROM pets") != want {
		t.Errorf("%s animals are stored, want %s", got, want)
	}
	s.want(s.do("POST", "/v1/pets", `{"name":"good","categoryId":7}`, "Idempotency-Key: 0-3"), http.StatusCreated, "good") // was not remembered
}

// TestDatabaseThatCannotBeWritten uses a database that is full, then read-only, then locked for too long.
func TestDatabaseThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.fill()
	s.want(s.do("GET", "/v1/pets?limit=1", ""), http.StatusOK, "xxx")
	s.want(s.do("GET", "/healthz", ""), http.StatusOK, "ok")
	s.pragma("max_page_count = 1000000")
	s.pragma("query_only = ON")
	s.want(s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`), http.StatusServiceUnavailable, "unavailable")
	s.pragma("query_only = OFF")
	s.pragma("busy_timeout = 50")
	unlock := s.lock()
	s.want(s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`), http.StatusServiceUnavailable, "unavailable")
	s.want(s.do("GET", "/v1/pets?limit=2", ""), http.StatusOK, "xxx")
	unlock()
	s.add("Rex", 7, "sold")
}

// TestFailedWriteStoresNothing has creates fail when their key is stored, and when they are committed.
func TestFailedWriteStoresNothing(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.sql(`CREATE TRIGGER refuse BEFORE INSERT ON idempotency_keys WHEN new.key = 'bad' BEGIN SELECT RAISE(ABORT, 'refused'); END;
		CREATE TABLE child (parent REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER orphan BEFORE INSERT ON pets WHEN new.name = 'bad' BEGIN INSERT INTO child VALUES (0); END`)
	s.pragma("foreign_keys = ON")
	s.want(s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`, "Idempotency-Key: bad"), http.StatusInternalServerError, "")
	s.want(s.do("POST", "/v1/pets", `{"name":"bad","categoryId":7}`), http.StatusInternalServerError, "")
	p := s.add("Rex", 7, "sold")
	s.want(s.do("GET", "/v1/pets", ""), http.StatusOK, fmt.Sprintf(`[{"id":%d,"name":"Rex","categoryId":7,"status":"sold"}]`, p.ID))
	s.sql("ALTER TABLE idempotency_keys RENAME TO hidden")
	s.want(s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`, "Idempotency-Key: k"), http.StatusInternalServerError, "internal")
}

// TestPageThatCannotBeRead fails on the second animal of a page.
func TestPageThatCannotBeRead(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")
	s.add("Tom", 7, "sold")
	reads := 0
	s.onRead(func() error {
		if reads++; reads == 2 {
			return errors.New("unreadable")
		}
		return nil
	})
	s.want(s.do("GET", "/v1/pets", ""), http.StatusInternalServerError, "internal")
	s.want(s.do("GET", "/v1/pets", ""), http.StatusOK, "Tom") // the error is not kept
}

// TestConnections tests the settings of the connections to SQLite.
func TestConnections(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for pragma, want := range map[string]string{"synchronous": "2", "fullfsync": "1", "journal_mode": "wal",
		"journal_size_limit": "67108864", "busy_timeout": "5000", "application_id": "1348826227", "user_version": "1"} {
		if got := s.pragma(pragma); got != want {
			t.Errorf("%s is %s, want %s", pragma, got, want)
		}
	}
}

// TestMovedDatabase moves or replaces the database file while it is in use.
func TestMovedDatabase(t *testing.T) {
	t.Parallel()
	const animal = `{"name":"Rex","categoryId":7}`
	s := newService(t)
	for _, replace := range []bool{false, true} {
		back := s.moveAway()
		if replace {
			must(t, os.WriteFile(s.db, nil, 0o600))
		}
		a := s.do("POST", "/v1/pets", animal)
		s.want(a, http.StatusServiceUnavailable, "unavailable")
		if strings.Contains(a.body, filepath.Base(s.db)) {
			t.Errorf("the response contains the name of the file: %s", a.body)
		}
		s.want(s.do("GET", "/healthz", ""), http.StatusServiceUnavailable, "unavailable")
		back()
		s.want(s.do("GET", "/healthz", ""), http.StatusOK, "ok")
		s.want(s.do("POST", "/v1/pets", animal), http.StatusCreated, "Rex")
	}
	if got := len(decode[[]pet](t, s.do("GET", "/v1/pets", ""))); got != 2 {
		t.Errorf("%d animals are stored, want 2", got)
	}
}

// TestStopAfterAMove moves the database of a running service, or replaces it with another one, and then stops the service. The
// animals in the write-ahead log must neither be lost nor get into the other database.
func TestStopAfterAMove(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ replaced, withLog, reading bool }{
		"moved":                             {false, false, false},
		"moved while another program reads": {false, false, true}, // which prevents that the log is emptied
		"replaced":                          {true, false, false},
		"replaced, and moved with its log":  {true, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			db, other, moved := filepath.Join(dir, "animals.db"), filepath.Join(dir, "other.db"), filepath.Join(dir, "moved.db")
			add := func(db, name string) {
				s := openService(t, db)
				s.add(name, 1, "sold")
				must(t, s.close())
			}
			add(other, "other")
			s := openService(t, db)
			s.add("first", 1, "sold")
			reader := connect(t, db)
			if c.reading {
				_, err := reader.Exec("BEGIN; SELECT * FROM pets")
				must(t, err)
			}
			s.add("second", 1, "sold")
			must(t, os.Rename(db, moved))
			if c.withLog {
				must(t, os.Rename(db+"-wal", moved+"-wal"))
				must(t, os.Rename(db+"-shm", moved+"-shm"))
			}
			if c.replaced {
				must(t, os.Rename(other, db))
			}
			s.pragma("busy_timeout = 0")
			err := s.close()
			if c.reading {
				if err == nil || !strings.Contains(err.Error(), strconv.Quote(db+"-wal")+", holds animals") {
					t.Errorf("close returned %v", err)
				}
				if _, _, err := openStore(db); err == nil || !strings.Contains(err.Error(), "put that database back") {
					t.Errorf("a start returned %v", err)
				}
				must(t, reader.Close())
				must(t, os.Rename(db+"-wal", moved+"-wal"))
			} else {
				must(t, err)
			}
			add(db, "last")
			for file, want := range map[string]string{db: map[bool]string{true: "other last", false: "last"}[c.replaced], moved: "first second"} {
				s := openService(t, file)
				if names := s.ask("SELECT group_concat(name, ' ') FROM pets"); names != want {
					t.Errorf("%s has the animals %s, want %s", file, names, want)
				}
				if result := s.ask("PRAGMA integrity_check"); result != "ok" {
					t.Errorf("integrity_check of %s: %s", file, result)
				}
			}
		})
	}
}

// TestEditShowsWithinASecond edits the database as sqlite3(1) would, and then sends many requests at once.
func TestEditShowsWithinASecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.add("Rex", 7, "sold")
		for i := range 3 {
			name := fmt.Sprint("edit ", i)
			s.do("GET", "/v1/pets", "")
			s.do("GET", "/v1/pets/1", "")
			s.sql("UPDATE pets SET name = ?", name)
			time.Sleep(time.Second)
			var all sync.WaitGroup
			for i := range 64 {
				all.Go(func() {
					s.want(s.do("GET", []string{"/v1/pets", "/v1/pets/1"}[i%2], ""), http.StatusOK, name)
				})
			}
			all.Wait()
		}
	})
}

// TestSchemaEnforcesTheRules tests edits that would break the rules for animals.
func TestSchemaEnforcesTheRules(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")
	db := connect(t, s.db)
	for _, edit := range []string{
		`UPDATE pets SET name = ''`,
		`UPDATE pets SET name = printf('%.256c', 'x')`,
		`UPDATE pets SET name = NULL`,
		`UPDATE pets SET name = x'00'`,
		`UPDATE pets SET category_id = 1.5`,
		`UPDATE pets SET category_id = 'one'`,
		`UPDATE pets SET status = 'lost'`,
		`UPDATE pets SET status = NULL`,
		`UPDATE pets SET id = 0`,
		`INSERT INTO pets (id, name, category_id) VALUES (-1, 'x', 1)`,
	} {
		if _, err := db.Exec(edit); err == nil {
			t.Errorf("%s is allowed", edit)
		}
	}
	s.sql(`INSERT INTO pets (id, name, category_id) VALUES (9223372036854775806, 'last', 1)`)
	s.want(s.do("GET", "/v1/pets/9223372036854775806", ""), http.StatusOK, `"status":"available"`)
	if p := s.add("really last", 1, "sold"); p.ID != math.MaxInt64 {
		t.Errorf("the last id is %d", p.ID)
	}
	s.want(s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`), http.StatusServiceUnavailable, "")
}

// TestCacheIsNeverBehindAnAcknowledgedWrite requests the list before a create, during its transaction, and after it.
func TestCacheIsNeverBehindAnAcknowledgedWrite(t *testing.T) {
	t.Parallel()
	s := newService(t)
	list := func() string { return s.do("GET", "/v1/pets", "").body }
	s.onInsert(func() error {
		list()
		return nil
	})
	for i := range 20 { // the service may find one change by itself meanwhile, as it finds edits
		name := fmt.Sprint("animal ", i)
		list()
		if s.add(name, 7, "sold"); !strings.Contains(list(), name) {
			t.Errorf("the list after %s was added is %s", name, list())
		}
	}
}

// TestCacheStaysSmall requests a page with many different URLs in long request lines. It does not run in parallel because
// it measures memory.
func TestCacheStaysSmall(t *testing.T) {
	s := newService(t)
	for range 100 {
		s.add(strings.Repeat("x", 50), 1, "sold")
	}
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for i := range 1100 {
		r := httptest.NewRequest("GET", "http://"+strings.Repeat("x", 11000)+"/v1/pets?limit=100"+strings.Repeat("&", i), nil)
		setHeaders(r, nil)
		w := httptest.NewRecorder()
		if s.ServeHTTP(w, r); w.Code != http.StatusOK {
			t.Fatal(w.Code, w.Body)
		}
	}
	for id := range 100 { // this path is a substring of the request line
		s.serve(httptest.NewRequest("GET", fmt.Sprint("http://", strings.Repeat("x", 300_000), "/v1/pets/", id+1), nil))
	}
	if grown := heap() - before; grown > maxCache*3/2 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	runtime.KeepAlive(s)
}

// TestChangeDuringARead has the database change while a page is read. That read serves nobody who asks after the change.
func TestChangeDuringARead(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("old", 7, "sold")
	var change func()
	s.onRead(func() error {
		if f := change; f != nil {
			change = nil
			f()
		}
		return nil
	})
	const page, other = "/v1/pets?limit=1", "/v1/pets/1"
	s.want(s.do("GET", other, ""), http.StatusOK, "old")
	change = func() {
		s.sql("UPDATE animals SET name = 'new'")
		eventually(t, "the edit shows in a response that was cached", func() bool { return strings.Contains(s.do("GET", other, "").body, "new") })
		s.want(s.do("GET", page, ""), http.StatusOK, "new")
	}
	s.want(s.do("GET", page, ""), http.StatusOK, "old")
	s.want(s.do("GET", page, ""), http.StatusOK, "new")
}

// TestRequestsShareOneRead sends many requests for one large page while it is read for the first time. A response that was in
// the cache before must stay there.
func TestRequestsShareOneRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		for range 100 {
			s.add(strings.Repeat("🐶", 255), 7, "sold")
		}
		var read atomic.Int64 // animals
		var sending, answered sync.WaitGroup
		s.onRead(func() error {
			if read.Add(1) == 2 {
				sending.Wait()
			}
			return nil
		})
		time.Sleep(time.Second) // until the service has found the last change
		s.want(s.do("GET", "/v1/pets/1", ""), http.StatusOK, "")
		sending.Add(100)
		for range 100 {
			answered.Go(func() {
				sending.Done()
				s.want(s.do("GET", "/v1/pets?limit=100", ""), http.StatusOK, `"id":100`)
			})
		}
		answered.Wait()
		s.want(s.do("GET", "/v1/pets/1", ""), http.StatusOK, "")
		if n := read.Load(); n != 101 {
			t.Errorf("%d animals were read, want 1 and then 100", n)
		}
	})
}

// TestQueriesReadFewPages counts the pages of a large database that SQLite looks at for a request. A scan or a sort looks at
// hundreds of them.
func TestQueriesReadFewPages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.sql(`WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
			INSERT INTO pets (name, category_id, status) SELECT printf('%.200c', 'x'), 1, iif(i > 19950, 'pending', 'sold') FROM n;
			INSERT INTO idempotency_keys SELECT zeroblob(32), id, 1, id, name, category_id, status FROM pets`)
		pages := func() (n int) {
			synctest.Wait() // until all connections are idle
			connections.Lock()
			defer connections.Unlock()
			for _, conn := range connections.to[s.db] {
				for _, counter := range []sqlite.DBStatusOp{sqlite.DBStatusCacheHit, sqlite.DBStatusCacheMiss} {
					count, _, err := conn.(sqlite.DBStatus).Status(counter, false)
					must(t, err)
					n += count
				}
			}
			return n
		}
		for _, c := range []struct {
			method, target string
			most           int
		}{
			{"GET", "/v1/pets?after=10000&limit=50", 20},
			{"GET", "/v1/pets?after=10000&limit=50&status=pending", 20},
			{"GET", "/v1/pets?after=10000&limit=50&status=sold", 20},
			{"GET", "/v1/pets/10000", 20},
			{"POST", "/v1/pets", 100},
		} {
			before := pages()
			s.do(c.method, c.target, `{"name":"Rex","categoryId":7}`, "Idempotency-Key: k")
			if n := pages() - before; n == 0 || n > c.most {
				t.Errorf("%s %s looks at %d pages", c.method, c.target, n)
			}
		}
	})
}

// process is the program running as a process.
type process struct {
	t      testing.TB
	cmd    *exec.Cmd
	url    string   // of the service
	stderr *os.File // its log
	log    *bufio.Scanner
	lines  strings.Builder
}

// command returns a command that runs the program on a free port through a line of shell that ends in execSelf.
func command(t testing.TB, shell string, args ...string) *exec.Cmd {
	args = append([]string{"-c", shell, os.Args[0], "-addr", "127.0.0.1:0", "-db", filepath.Join(t.TempDir(), "animals.db")}, args...)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "sh", args...)
	cmd.Env = append(os.Environ(), "ANIMALSTORE_PROCESS=1", "API_KEYS="+testKey)
	_, err := cmd.StdinPipe() // see TestMain
	must(t, err)
	return cmd
}

// startProcess starts the program, and reads its log until it serves.
func startProcess(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	p := &process{t: t, cmd: cmd, stderr: r, log: bufio.NewScanner(r)}
	cmd.Stderr = w
	must(t, cmd.Start())
	w.Close()
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		r.Close()
	})
	p.url = p.read(`msg=started url=(\S+)`)[1]
	return p
}

// read reads the log up to a line that matches pattern, and returns the submatches.
func (p *process) read(pattern string) []string {
	p.t.Helper()
	for p.log.Scan() {
		fmt.Fprintln(&p.lines, p.log.Text())
		if match := regexp.MustCompile(pattern).FindStringSubmatch(p.log.Text()); match != nil {
			return match
		}
	}
	p.t.Fatalf("the log has no %s: %s", pattern, p.lines.String())
	return nil
}

// stop sends the signals, and returns the exit status and the whole log.
func (p *process) stop(signals ...syscall.Signal) (status int, log string) {
	p.t.Helper()
	for _, sig := range signals {
		p.cmd.Process.Signal(sig)
	}
	for p.log.Scan() {
		fmt.Fprintln(&p.lines, p.log.Text())
	}
	p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode(), p.lines.String()
}

// send sends a request with a valid key and the given headers, as service.do does, over the network.
func send(client *http.Client, method, url, body string, headers ...string) (status int, text string, err error) {
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	setHeaders(r, headers)
	resp, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

const execSelf = `exec "$0" "$@"`

// TestKilledProcessLosesNothing kills the program several times while clients add animals.
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	db := filepath.Join(t.TempDir(), "animals.db")
	var mu sync.Mutex
	acknowledged := map[string]string{} // Idempotency-Key to body
	sent := 0
	for round := range 6 {
		p := startProcess(t, command(t, execSelf, "-db", db))
		client := &http.Client{Transport: &http.Transport{}}
		add := func(key string) error {
			status, body, err := send(client, "POST", p.url+"/v1/pets", fmt.Sprintf(`{"name":%q,"categoryId":1}`, key), "Idempotency-Key: "+key)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			if before := acknowledged[key]; status != http.StatusCreated || before != "" && before != body {
				t.Errorf("round %d: the response to %s is %d %s, and was %s", round, key, status, body, before)
			}
			acknowledged[key] = body
			return nil
		}
		for i := range sent { // repeats all earlier creates, acknowledged or not
			must(t, add(fmt.Sprint("animal-", i)))
		}
		var adding sync.WaitGroup
		var added atomic.Int64
		for range 16 {
			adding.Go(func() {
				for {
					mu.Lock()
					key := fmt.Sprint("animal-", sent)
					sent++
					mu.Unlock()
					if add(key) != nil {
						return
					}
					added.Add(1)
				}
			})
		}
		eventually(t, "some animals are added", func() bool { return added.Load() > 40 })
		p.stop(syscall.SIGKILL)
		adding.Wait()
		client.CloseIdleConnections()
	}
	s := openService(t, db)
	if result := s.ask("PRAGMA integrity_check"); result != "ok" {
		t.Errorf("integrity_check: %s", result)
	}
	for key, body := range acknowledged {
		p := decode[pet](t, reply{body: body})
		if a := s.do("GET", fmt.Sprint("/v1/pets/", p.ID), ""); a.body != body {
			t.Errorf("%s was acknowledged as %s and is %s", key, body, a.body)
		}
	}
	if names, distinct := s.ask("SELECT count(name) FROM pets"), s.ask("SELECT count(DISTINCT name) FROM pets"); names != distinct {
		t.Errorf("%s animals have %s different names", names, distinct)
	}
}

// TestRestartUnderLoadRefusesNothing restarts the program on a socket that the test passes to it, as systemd would.
func TestRestartUnderLoadRefusesNothing(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer ln.Close()
	socket, err := ln.(*net.TCPListener).File()
	must(t, err)
	defer socket.Close()
	db := filepath.Join(t.TempDir(), "animals.db")
	start := func() *process {
		cmd := command(t, `LISTEN_FDS=1 LISTEN_PID=$$ `+execSelf, "-addr", "192.0.2.1:1", "-db", db)
		cmd.ExtraFiles = []*os.File{socket}
		return startProcess(t, cmd)
	}
	p := start()
	if want := "http://" + ln.Addr().String(); p.url != want {
		t.Fatalf("the service is at %s, want %s", p.url, want)
	}
	url := p.url
	var answered atomic.Int64
	clients := []*http.Client{{Transport: &http.Transport{DisableKeepAlives: true}}, {Transport: &http.Transport{}}}
	stop := repeat(8, func(i int) {
		status, body, err := send(clients[i%2], "POST", url+"/v1/pets", `{"name":"Rex","categoryId":7}`)
		if err != nil || status != http.StatusCreated {
			t.Errorf("%d %s %v", status, body, err)
		}
		answered.Add(1)
	})
	for round := range 3 {
		before := answered.Load()
		eventually(t, "clients add 100 animals", func() bool { return answered.Load() > before+100 })
		if status, log := p.stop(syscall.SIGTERM); status != 0 || !strings.Contains(log, `msg=stopping cause="terminated signal received"`) {
			t.Errorf("exit status %d, log %s", status, log)
		} else if isNew := strings.Contains(log, "the database is new"); isNew != (round == 0) {
			t.Errorf("round %d: the log says that the database is new: %v", round, isNew)
		}
		p = start()
	}
	stop()
	status, body, err := send(clients[0], "GET", fmt.Sprintf("%s/v1/pets?after=%d", url, answered.Load()-1), "")
	if err != nil || status != http.StatusOK || strings.Count(body, `"id"`) != 1 {
		t.Errorf("%d creates were acknowledged, and the last animal is %s (%v)", answered.Load(), body, err)
	}
}

// TestSignals sends signals while a request is in progress.
func TestSignals(t *testing.T) {
	t.Parallel()
	const animal = `{"name":"Rex","categoryId":7}`
	for name, c := range map[string]struct {
		shell   string
		signals []syscall.Signal // the last one stops the program
	}{
		"interrupt":     {execSelf, []syscall.Signal{syscall.SIGINT}},
		"terminated":    {execSelf, []syscall.Signal{syscall.SIGTERM}},
		"not by hangup": {`trap "" HUP; ` + execSelf, []syscall.Signal{syscall.SIGHUP, syscall.SIGTERM}}, // like nohup(1)
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startProcess(t, command(t, c.shell))
			conn, r := inFlight(t, p.url, len(animal))
			for _, sig := range c.signals {
				p.cmd.Process.Signal(sig)
			}
			cause := c.signals[len(c.signals)-1]
			p.read(fmt.Sprintf(`msg=stopping cause="%v signal received"$`, cause))
			p.cmd.Process.Signal(cause) // changes nothing
			p.cmd.Process.Signal(syscall.SIGINT)
			fmt.Fprint(conn, animal)
			if resp, err := http.ReadResponse(bufio.NewReader(conn), r); err != nil || resp.StatusCode != http.StatusCreated || !resp.Close {
				t.Errorf("the response is %+v (%v)", resp, err)
			}
			if status, log := p.stop(); status != 0 || strings.Count(log, "msg=stopping") != 1 || !strings.Contains(log, "msg=stopped\n") {
				t.Errorf("status %d, log %s", status, log)
			}
		})
	}
	t.Run("hangup", func(t *testing.T) {
		t.Parallel()
		p := startProcess(t, command(t, execSelf))
		p.stop(syscall.SIGHUP)
		if status := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGHUP {
			t.Errorf("the process ended with %v, want the default action of SIGHUP", p.cmd.ProcessState)
		}
	})
}

// TestStalledLogStopsNothing fills the pipe that is the log, or closes it at the other end.
func TestStalledLogStopsNothing(t *testing.T) {
	t.Parallel()
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprint("closed: ", closed), func(t *testing.T) {
			t.Parallel()
			p := startProcess(t, command(t, execSelf))
			if closed {
				p.stderr.Close()
			}
			target := fmt.Sprint(p.url, "/v1/pets/", strings.Repeat("x", 8000))
			for i := range 100 {
				if status, _, err := send(http.DefaultClient, "GET", target, ""); status != http.StatusNotFound {
					t.Fatalf("request %d = %d %v, want 404", i, status, err)
				}
			}
			if status, body, err := send(http.DefaultClient, "POST", p.url+"/v1/pets", `{"name":"Rex","categoryId":7}`); status != http.StatusCreated {
				t.Errorf("POST /v1/pets = %d %s %v", status, body, err)
			}
			p.cmd.Process.Signal(syscall.SIGTERM)
			p.cmd.Wait()
			if status := p.cmd.ProcessState.ExitCode(); status != 0 {
				t.Errorf("exit status %d", status)
			}
		})
	}
}

// inFlight sends the header of a create, and returns the connection when the service is waiting for the body.
func inFlight(t testing.TB, url string, length int) (net.Conn, *http.Request) {
	t.Helper()
	r, _ := http.NewRequest("POST", url+"/v1/pets", nil)
	conn, err := net.Dial("tcp", r.Host)
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "POST /v1/pets HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n",
		r.Host, testKey, length)
	line := make([]byte, len("HTTP/1.1 100 Continue\r\n\r\n"))
	if _, err := io.ReadFull(conn, line); !strings.Contains(string(line), "100 Continue") {
		t.Fatal(string(line), err)
	}
	return conn, r
}

// lookup returns a replacement of os.LookupEnv for the given environment.
func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		value, ok := env[name]
		return value, ok
	}
}

// TestWithoutAKey starts the program without a key, with a database named as SQLite names one in memory, and with the
// environment variables of a socket for another process.
func TestWithoutAKey(t *testing.T) {
	t.Parallel()
	cmd := command(t, "unset API_KEYS; LISTEN_PID=1 LISTEN_FDS=1 "+execSelf, "-db", ":memory:")
	cmd.Dir = t.TempDir()
	p := startProcess(t, cmd)
	key := regexp.MustCompile(`api_key=([A-Z2-7]{26})\n`).FindStringSubmatch(p.lines.String())
	if key == nil {
		t.Fatal(p.lines.String())
	}
	if code, body, err := send(http.DefaultClient, "GET", p.url+"/v1/pets", "", "Authorization: Bearer "+key[1]); code != http.StatusOK {
		t.Errorf("with the key from the log: %d %s %v", code, body, err)
	}
	if code, body, err := send(http.DefaultClient, "GET", p.url+"/v1/pets", ""); code != http.StatusUnauthorized {
		t.Errorf("with another key: %d %s %v", code, body, err)
	}
	if created := `level=WARN msg="the database is new and empty" database=` + filepath.Join(cmd.Dir, ":memory:"); !strings.Contains(p.lines.String(), created) {
		t.Errorf("no %s in %s", created, p.lines.String())
	}
	if status, log := p.stop(syscall.SIGTERM); status != 0 || strings.Count(log, key[1]) != 1 ||
		!strings.Contains(log, "database="+filepath.Join(cmd.Dir, ":memory:")+" keys=1 ") {
		t.Errorf("status %d, log %s", status, log)
	}
	if files := snapshot(t, cmd.Dir); !strings.HasPrefix(files, ":memory: ") || strings.Count(files, "\n") != 1 {
		t.Errorf("the files are\n%s", files)
	}
}

// TestTLS serves HTTPS, and tests the versions of TLS and HTTP.
func TestTLS(t *testing.T) {
	t.Parallel()
	ts := httptest.NewTLSServer(nil)
	defer ts.Close()
	key, err := x509.MarshalPKCS8PrivateKey(ts.TLS.Certificates[0].PrivateKey)
	must(t, err)
	pemFile := func(kind string, der []byte) string {
		return writeFile(t, t.TempDir(), "pem", string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
	}
	p := startProcess(t, command(t, execSelf,
		"-tls-cert", pemFile("CERTIFICATE", ts.Certificate().Raw), "-tls-key", pemFile("PRIVATE KEY", key)))
	client := ts.Client()
	transport := client.Transport.(*http.Transport).Clone()
	transport.TLSClientConfig.ServerName, transport.ForceAttemptHTTP2 = "example.com", true
	transport.TLSClientConfig.MaxVersion = tls.VersionTLS12
	r, _ := http.NewRequest("GET", p.url+"/v1/pets", nil)
	setHeaders(r, nil)
	resp, err := transport.RoundTrip(r)
	must(t, err)
	if a := checked(t, r, resp); a.status != http.StatusOK || resp.ProtoMajor != 1 {
		t.Errorf("got %d over HTTP/%d", a.status, resp.ProtoMajor)
	}
	config := &tls.Config{RootCAs: transport.TLSClientConfig.RootCAs, ServerName: "example.com"}
	config.MinVersion, config.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	if conn, err := tls.Dial("tcp", strings.TrimPrefix(p.url, "https://"), config); err == nil {
		conn.Close()
		t.Error("TLS 1.1 is accepted")
	}
	if status, log := p.stop(syscall.SIGTERM); status != 0 || !strings.Contains(log, `level=WARN msg="http: TLS handshake error`) || strings.Contains(log, testKey) {
		t.Errorf("status %d, log %s", status, log)
	}
}

// TestSettings runs the program with mistakes in the command line, in files and in the environment.
func TestSettings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string { return writeFile(t, dir, name, text) }
	database := func(name, statements string) string {
		path := filepath.Join(dir, name)
		(&service{t: t, db: file(name, "")}).sql(statements)
		return path
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	none := filepath.Join(dir, "none")
	dangling := filepath.Join(dir, "dangling")
	must(t, os.Symlink(none, dangling))
	moved, emptied := strings.TrimSuffix(file("moved-wal", "some log"), "-wal"), file("emptied", "")
	file("emptied-wal", "some log")
	fifo := filepath.Join(t.TempDir(), "fifo")
	must(t, syscall.Mkfifo(fifo, 0o600))
	for _, c := range []struct {
		args   string // separated by spaces; _ stands for an empty argument, ~ for a line break
		env    string
		status int
		words  string
	}{
		{"-colour", "", 2, "not defined: -colour"},
		{"serve", "", 2, `unexpected argument "serve"`},
		{"-db _", "", 2, "-db must not be empty"},
		{"-backup _", "", 2, "-backup must not be empty"},
		{"-addr _", "", 2, "-addr must not be empty"},
		{"-addr localhost", "k", 1, "missing port in address"},
		{"-addr localhost:65536", "k", 1, "invalid port"},
		{"-tls-cert x", "", 2, "give both or neither"},
		{"-tls-key x", "", 2, "give both or neither"},
		{"-tls-cert " + none + " -tls-key " + none, "k", 1, "no such file"},
		{"-addr " + taken.Addr().String(), "k", 1, "address already in use"},
		{"-addr " + taken.Addr().String(), "LISTEN_FDS=0", 1, "address already in use"},
		{"-addr :0", "", 1, "set API_KEYS or -keys"},
		{"", "API_KEYS= , ", 1, "contain no API key"},
		{"", "API_KEYS=", 1, "contain no API key"},
		{"", "API_KEYS=one, k # tom", 1, "API_KEYS, item 2: an API key must consist of visible ASCII"},
		{"", "API_KEYS=one\ntwo", 1, "API_KEYS, item 1: "},
		{"", "API_KEYS=,\u200bone", 1, "API_KEYS, item 2: "},
		{"-keys " + file("spaced", "# none\r\none\r\nk # tom\r\n"), "k", 1, `spaced", line 3: an API key must`},
		{"", "LISTEN_FDS=2", 1, "one socket"},
		{"-keys " + none + "/keys", "k", 1, `none/keys": open `},
		{"-keys " + file("comments", "# none\n\n  \r\n"), "", 1, "contain no API key"},
		{"-keys " + file("listed", "one,tom"), "k", 1, `listed", line 1: an API key must`},
		{"-db " + dir, "k", 1, "is it a file"},
		{"-db " + fifo, "k", 1, "is it a file"},
		{"-db " + none + "/animals.db", "k", 1, "in an existing folder"},
		{"-db /proc/animals.db", "k", 1, "may this user write both"},
		{"-db " + none + "/a~b", "k", 1, "/a\\nb"},
		{"-db " + moved, "k", 1, `moved-wal" is the write-ahead log of one`},
		{"-db " + emptied, "k", 1, `emptied-wal" is the write-ahead log of one`},
		{"-db " + database("dump", schema+"PRAGMA application_id = 0"), "k", 1, "its application_id is not 1348826227"},
		{"-db " + file("text", "some text"), "k", 1, "file is not a database"},
		{"-db " + file("short-text", "\n"), "k", 1, "not a database of this service"},
		{"-db " + database("foreign-wal", "PRAGMA journal_mode = WAL; CREATE TABLE t (x)"), "k", 1, "not a database of this service"},
		{"-db " + database("newer", schema+"PRAGMA user_version = 2"), "k", 1, "a newer version"},
		{"-db " + database("newer", schema+"PRAGMA user_version = 2") + " -backup " + none, "", 1, "a newer version"},
		{"-backup " + none, "", 1, "unable to open database file"},
		{"-db " + file("short", "\n") + " -backup " + none, "", 1, "not a database of this service"},
		{"-db " + database("foreign-too", "CREATE TABLE t (x)") + " -backup " + none, "", 1, "not a database of this service"},
		{"-db " + database("fine", schema) + " -backup " + file("exists", ""), "", 1, "exists already"},
		{"-db " + database("fine", schema) + " -backup " + dangling, "", 1, "exists already"},
		{"-db " + database("fine", schema) + " -backup " + none + "/copy", "", 1, `none/copy.`},
	} {
		var args []string
		for _, arg := range strings.Fields(c.args) {
			args = append(args, strings.NewReplacer("_", "", "~", "\n").Replace(arg))
		}
		if !strings.Contains(c.args, "-db") {
			args = append([]string{"-db", filepath.Join(dir, "new.db")}, args...)
		}
		if !strings.Contains(c.args, "-addr") {
			args = append([]string{"-addr", "localhost:0"}, args...)
		}
		env := map[string]string{"LISTEN_PID": strconv.Itoa(os.Getpid())}
		if name, value, ok := strings.Cut(c.env, "="); ok {
			env[name] = value
		} else if c.env != "" {
			env["API_KEYS"] = c.env
		}
		before := snapshot(t, dir)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // in case the service starts
		var stdout, stderr strings.Builder
		status := run(ctx, args, lookup(env), &stdout, &stderr)
		if ctx.Err() != nil {
			t.Fatalf("the service has started with %q: %s", args, stderr.String())
		}
		cancel()
		if status != c.status || !strings.Contains(stderr.String(), c.words) {
			t.Errorf("%q with %q: status %d, %q; want %d, %q", args, c.env, status, stderr.String(), c.status, c.words)
		}
		if strings.Count(stderr.String(), "\n") != 1 || stdout.String() != "" || strings.Contains(stderr.String(), "tom") {
			t.Errorf("%q: standard error is %q, want one line without a key, and standard output is %q", args, stderr.String(), stdout.String())
		}
		if after := snapshot(t, dir); after != before {
			t.Errorf("%q changed the files from\n%s to\n%s", args, before, after)
		}
	}
}

// snapshot lists the files in dir with their sizes, times and contents.
func snapshot(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		info, _ := e.Info()
		data, _ := os.ReadFile(filepath.Join(dir, e.Name()))
		fmt.Fprintf(&b, "%s %v %x\n", e.Name(), info.ModTime(), sha256.Sum256(data))
	}
	return b.String()
}

// TestOddNamesOfDatabases opens files with names that have a meaning in a URI, directly and through a symbolic link.
func TestOddNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{":memory:", "file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", "ä\n"} {
		db := writeFile(t, t.TempDir(), name, "") // an empty file is a new database
		s := openService(t, db)
		s.add("Rex", 7, "sold")
		if info, err := os.Stat(db); err != nil || info.Size() == 0 {
			t.Errorf("the database is not in %q (%v)", name, err)
		}
		link := filepath.Join(t.TempDir(), "link")
		must(t, os.Symlink(db, link))
		s = openService(t, link)
		s.add("Tom", 7, "sold")
		must(t, os.Remove(link))
		s.want(s.do("POST", "/v1/pets", `{"name":"Rex","categoryId":7}`), http.StatusServiceUnavailable, "")
	}
}

func TestLoadKeys(t *testing.T) {
	t.Parallel()
	file := writeFile(t, t.TempDir(), "keys", "\ufeff# old, older\r\none\r\n\r\n  two#2 \n\t# oldest\n\tthree")
	k, err := loadKeys(lookup(map[string]string{"API_KEYS": " four, #five ,,one"}), file)
	if err != nil || len(k) != 5 {
		t.Fatalf("%d keys, %v", len(k), err)
	}
	for key, want := range map[string]bool{"one": true, "two#2": true, "three": true, "four": true, "#five": true,
		"": false, "# old": false, "older": false, "# oldest": false, "one\r": false} {
		header := http.Header{"Authorization": {"Bearer " + key}}
		if _, challenge := k.authenticate(header); (challenge == "") != want {
			t.Errorf("key %q is valid: %v, want %v", key, challenge == "", want)
		}
	}
	if k, err := loadKeys(lookup(map[string]string{"API_KEYS": " ,"}), file); err != nil || len(k) != 3 {
		t.Errorf("with a file alone: %d keys, %v", len(k), err)
	}
}

// TestSocketForOthersNeedsAKey starts the program without a key on a socket that other users can reach.
func TestSocketForOthersNeedsAKey(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
	must(t, err)
	defer ln.Close()
	socket, err := ln.(*net.UnixListener).File()
	must(t, err)
	defer socket.Close()
	cmd := command(t, "unset API_KEYS; LISTEN_FDS=1 LISTEN_PID=$$ "+execSelf)
	cmd.ExtraFiles = []*os.File{socket}
	out, _ := cmd.CombinedOutput()
	if status := cmd.ProcessState.ExitCode(); status != 1 || !strings.Contains(string(out), "set API_KEYS or -keys") {
		t.Errorf("status %d: %s", status, out)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	for flag, want := range map[string]string{"-h": `-addr HOST:PORT[^-]* \(default "127\.0\.0\.1:8080"\)\n  -backup FILE(?s:.*)-db FILE[^-]*\(default "animalstore\.db"\)`, "-version": `^animalstore \S+ go1\.\d+\S*\n$`} {
		var stdout, stderr strings.Builder
		if status := run(t.Context(), []string{flag}, lookup(nil), &stdout, &stderr); status != 0 || stderr.Len() > 0 ||
			!regexp.MustCompile(want).MatchString(stdout.String()) {
			t.Errorf("%s: status %d, %s%s", flag, status, stdout.String(), stderr.String())
		}
	}
}

// TestBackup writes a backup while animals are added.
func TestBackup(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for range 100 {
		s.add("before", 1, "sold")
	}
	dir := t.TempDir()
	copied := filepath.Join(dir, "copy.db")
	backup := func() (status int, output string) { // in another process: POSIX locks do not work within one
		cmd := command(t, "unset API_KEYS; "+execSelf, "-db", s.db, "-backup", "copy.db")
		cmd.Dir = dir
		out, _ := cmd.CombinedOutput()
		return cmd.ProcessState.ExitCode(), string(out)
	}
	stop := repeat(4, func(int) { s.add("meanwhile", 1, "available") })
	status, output := backup()
	stop()
	if status != 0 {
		t.Fatalf("status %d: %s", status, output)
	}
	before := snapshot(t, dir)
	if status, output := backup(); status != 1 || !strings.Contains(output, "exists already") {
		t.Errorf("a backup to an existing file: status %d: %s", status, output)
	}
	if after := snapshot(t, dir); after != before || strings.Count(after, "\n") != 1 {
		t.Errorf("the files were\n%s and are\n%s", before, after)
	}
	restored := openService(t, copied)
	if got := decode[[]pet](t, restored.do("GET", "/v1/pets?limit=100", "")); len(got) != 100 || got[99].ID != 100 {
		t.Errorf("the first page of the backup has %d animals, want the 100 that were there before", len(got))
	}
	if last, sequence := restored.ask("SELECT max(id) FROM pets"), restored.ask("SELECT seq FROM sqlite_sequence"); last != sequence {
		t.Errorf("the last id in the backup is %s, and the sequence is at %s", last, sequence)
	}
	restored.add("after", 1, "sold")
}

// TestFailedBackupLeavesNothing backs up a damaged database, and interrupts another backup.
func TestFailedBackupLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	db := filepath.Join(dir, "animals.db")
	t.Run("fill", func(t *testing.T) {
		s := openService(t, db)
		for range 10 {
			s.add("Rex", 7, "sold")
		}
	})
	(&service{t: t, db: db}).sql("PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, 'BETWEEN 1', 'BETWEEN 9')")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for what, ctx := range map[string]context.Context{"damaged": t.Context(), "interrupted": ctx} {
		if backup(ctx, db, filepath.Join(dir, "copy.db")) == nil {
			t.Errorf("the %s backup has succeeded", what)
		}
		if files := snapshot(t, dir); strings.Count(files, "\n") != 1 {
			t.Errorf("after the %s backup the files are\n%s", what, files)
		}
	}
}

// TestNewerVersionInTheLog opens a database of a newer version whose version number is still in the write-ahead log.
func TestNewerVersionInTheLog(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.pragma("user_version = 2")
	if _, _, err := openStore(s.db); err == nil || !strings.Contains(err.Error(), "a newer version") {
		t.Errorf("openStore returned %v", err)
	}
}

// FuzzCreatePet sends a body. The response must be 201, 400 or 413, and an accepted animal must read back as it was sent.
func FuzzCreatePet(f *testing.F) {
	for _, body := range []string{`{"name":"Rex","categoryId":7}`, `{"name":"\ud83d\udc36","categoryId":-9223372036854775808,"status":"sold"}`,
		`{"name":"\ud83d","categoryId":1e2}`, `{"name":"x","name":"y"}`, "{\"name\":\"\xff\"}", `[]`, ``} {
		f.Add([]byte(body))
	}
	handler := newService(f).server
	f.Fuzz(func(t *testing.T, body []byte) {
		s := &service{t: t, server: handler}
		a := s.do("POST", "/v1/pets", string(body))
		if a.status == http.StatusBadRequest || a.status == http.StatusRequestEntityTooLarge && len(body) > maxBody {
			return
		}
		if a.status != http.StatusCreated {
			t.Fatalf("%q = %d %s", body, a.status, a.body)
		}
		if got := s.do("GET", a.header.Get("Location"), ""); got.body != a.body {
			t.Errorf("POST %q = %s, but it reads back as %s", body, a.body, got.body)
		}
		var sent, got map[string]any
		for text, members := range map[string]*map[string]any{string(body): &sent, a.body: &got} {
			dec := json.NewDecoder(strings.NewReader(text))
			dec.UseNumber()
			must(t, dec.Decode(members))
		}
		for name, value := range sent {
			if got[name] != value {
				t.Errorf("%q reads back as %s", body, a.body)
			}
		}
	})
}

// FuzzListPets sends a query string. The response must be 200 or 400.
func FuzzListPets(f *testing.F) {
	for _, query := range []string{"", "limit=5&status=sold&after=3", "limit=101", "status=x", "after=-1", "%zz", "a;b", "limit=1&limit=1"} {
		f.Add(query)
	}
	s := newService(f)
	s.add("Rex", 7, "sold")
	handler := s.server
	f.Fuzz(func(t *testing.T, query string) {
		s := &service{t: t, server: handler}
		r := httptest.NewRequest("GET", "/v1/pets", nil)
		r.URL.RawQuery = query
		if a := s.serve(r); a.status != http.StatusOK && a.status != http.StatusBadRequest {
			t.Fatalf("%q = %d %s", query, a.status, a.body)
		}
	})
}

// BenchmarkRequests measures how many requests per second the service answers over TCP.
func BenchmarkRequests(b *testing.B) {
	const animal = `{"name":"Rex the dog","categoryId":7,"status":"available"}`
	for _, c := range []struct {
		name, target string // %d stands for a random number up to 100,000
		creates      int    // how many of 100 requests add an animal
		key          string // Idempotency-Key, with a number behind it
		connections  int
	}{
		{"add, 64 connections", "", 100, "", 64},
		{"add, 1 connection", "", 100, "", 1},
		{"add with Idempotency-Key, 64 connections", "", 100, "key-", 64},
		{"add with Idempotency-Key, 1 connection", "", 100, "key-", 1},
		{"list, first page", "/v1/pets", 0, "", 32},
		{"list, first page of a status", "/v1/pets?status=sold", 0, "", 32},
		{"fetch, one animal", "/v1/pets/77", 0, "", 32},
		{"list, any page", "/v1/pets?after=%d", 0, "", 32},
		{"fetch, any animal", "/v1/pets/%d", 0, "", 32},
		{"list, first page, and 1 of 10 adds, 1000 connections", "/v1/pets", 10, "", 1000},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := newService(b)
			s.sql(`WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
				INSERT INTO pets (name, category_id, status) SELECT 'animal number ' || i, i % 50,
					CASE i % 3 WHEN 0 THEN 'available' WHEN 1 THEN 'pending' ELSE 'sold' END FROM n`)
			ts := httptest.NewServer(s)
			defer ts.Close()
			client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: c.connections, MaxIdleConnsPerHost: c.connections}}
			defer client.CloseIdleConnections()
			var keys atomic.Int64
			b.SetParallelism(max(64, c.connections) / runtime.GOMAXPROCS(0))
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					method, target, body, headers := "GET", strings.Replace(c.target, "%d", strconv.Itoa(1+rand.Intn(100000)), 1), "", []string(nil)
					if rand.Intn(100) < c.creates {
						method, target, body = "POST", "/v1/pets", animal
						if c.key != "" {
							headers = []string{fmt.Sprint("Idempotency-Key: ", c.key, keys.Add(1))}
						}
					}
					if status, text, err := send(client, method, ts.URL+target, body, headers...); err != nil || status >= 300 {
						b.Errorf("%s %s = %d %s, %v", method, target, status, text, err)
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}
