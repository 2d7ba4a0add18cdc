package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path"
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
	"unicode/utf8"

	"modernc.org/sqlite"
)

// TestMain also lets the test binary be the program itself (see command).
func TestMain(m *testing.M) {
	watchSQLite()
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // returns when the test process has ended, even if it was killed
			os.Exit(1)
		}()
		main()
	}
	json.Unmarshal(openAPI, &document)
	flag.Parse()
	flag.Set("test.parallel", "8") // most tests wait for processes
	os.Exit(m.Run())
}

// testKey and otherKey are the API keys that a service under test accepts.
const testKey, otherKey = "test-key", "other-key"

// rex is an animal to add.
const rex = `{"name":"Rex","categoryId":7}`

// service is a whole service on its own database file.
type service struct {
	t     testing.TB
	db    string       // the database file
	close func() error // closes the database; the end of the test does that, too
	*server
}

// parallelService opens a service on a new database, for a test that may run in parallel with others.
func parallelService(t *testing.T) *service {
	t.Helper()
	t.Parallel()
	limitTime(t)
	return newService(t)
}

// limitTime ends the tests with a panic that names t if it runs for longer than 30 seconds from now.
func limitTime(t *testing.T) {
	limit := time.AfterFunc(30*time.Second, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { limit.Stop() })
}

// newService opens a service on a new database. It logs to the test and to logs.
func newService(t testing.TB, logs ...io.Writer) *service {
	t.Helper()
	return openService(t, filepath.Join(t.TempDir(), "animals.db"), logs...)
}

// withFakeClock runs a test on a service under a fake clock, in parallel with other tests.
func withFakeClock(t *testing.T, test func(t *testing.T, s *service), logs ...io.Writer) {
	t.Parallel()
	limitTime(t) // by the real clock: the fake one stands still while a goroutine waits for a lock
	synctest.Test(t, func(t *testing.T) { test(t, newService(t, logs...)) })
}

func openService(t testing.TB, db string, logs ...io.Writer) *service {
	t.Helper()
	k := try(loadKeys(lookup(map[string]string{"API_KEYS": testKey + "," + otherKey}), ""))(t)
	st, _, err := openStore(db)
	must(t, err)
	if _, ok := t.(*testing.T); ok { // in benchmarks and fuzz tests there would be too much of it
		logs = append(logs, t.Output())
	}
	log := slog.New(slog.NewTextHandler(io.MultiWriter(logs...), nil))
	s := &service{t: t, db: db, close: sync.OnceValue(st.close), server: newServer(st, k, log)}
	t.Cleanup(func() { must(t, s.close()) })
	return s
}

// reply is a response that has been read.
type reply struct {
	request string // method and URL, and the body if there is one
	status  int
	header  http.Header
	body    string
}

// do sends a request with a valid key and headers ("Name: value"; "Authorization:" sends no key), and checks the response.
func (s *service) do(method, target, body string, headers ...string) reply {
	s.t.Helper()
	a := s.doRequest(httptest.NewRequest(method, target, strings.NewReader(body)), headers...)
	a.request = fmt.Sprintf("%s %.500s", a.request, body)
	return a
}

// doRequest does the same with a request made by the caller.
func (s *service) doRequest(r *http.Request, headers ...string) reply {
	s.t.Helper()
	setHeaders(r, headers)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return checked(s.t, r, w.Result())
}

func setHeaders(r *http.Request, headers []string) {
	if !slices.ContainsFunc(headers, func(h string) bool { return strings.HasPrefix(h, "Authorization:") }) {
		r.Header.Set("Authorization", "Bearer "+testKey)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ":")
		if value = strings.TrimPrefix(value, " "); name != "" && (value != "" || name != "Authorization") {
			r.Header.Add(name, value)
		}
	}
}

// checked reads a response and checks it against openapi.json and the rules for all responses.
func checked(t testing.TB, r *http.Request, resp *http.Response) reply {
	t.Helper()
	defer resp.Body.Close()
	body := try(io.ReadAll(resp.Body))(t)
	a := reply{fmt.Sprintf("%.500s %.500s", r.Method, r.URL), resp.StatusCode, resp.Header, string(body)}
	for _, fault := range contractFaults(r, a) {
		t.Errorf("%s = %d: %s", a.request, a.status, fault)
	}
	return a
}

// want checks the status of a response, and that its body contains words.
func (s *service) want(a reply, status int, words string) {
	s.t.Helper()
	if a.status != status || !strings.Contains(a.body, words) {
		s.t.Errorf("%s = %d %s, want %d with %q", a.request, a.status, a.body, status, words)
	}
}

// add adds an animal and returns it.
func (s *service) add(name string, category int64, status string) pet {
	s.t.Helper()
	body := try(json.Marshal(newPet{name, category, status}))(s.t)
	a := s.do("POST", "/v1/pets", string(body))
	s.want(a, 201, string(body[1:])) // in the response the id precedes it
	return decode[pet](s.t, a)
}

func decode[T any](t testing.TB, a reply) T {
	t.Helper()
	var v T
	must(t, json.Unmarshal([]byte(a.body), &v))
	return v
}

// sqlite3 runs statements as another program would.
func (s *service) sqlite3(statements string, args ...any) {
	s.t.Helper()
	db := connect(s.t, s.db)
	defer db.Close()
	if _, err := db.Exec(statements, args...); err != nil {
		s.t.Fatalf("%s: %v", statements, err)
	}
}

// query returns the value that another program would read.
func (s *service) query(query string) (value string) {
	s.t.Helper()
	db := connect(s.t, s.db)
	defer db.Close()
	must(s.t, db.QueryRow(query).Scan(&value))
	return value
}

// wantSQL checks the value that a query returns.
func (s *service) wantSQL(query, want string) {
	s.t.Helper()
	if got := s.query(query); got != want {
		s.t.Errorf("%s: %s, want %s", query, got, want)
	}
}

// addMany adds animals with a name, as another program would.
func (s *service) addMany(count int, name string) {
	s.t.Helper()
	s.sqlite3(`WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
		INSERT INTO pets (name, category_id, status) SELECT ?, 1, iif(i % 400 = 0, 'pending', 'sold') FROM n`, count, name)
}

// connect opens the database as another program would.
func connect(t testing.TB, file string) *sql.DB {
	t.Helper()
	db := try(sql.Open("sqlite", (&url.URL{Scheme: "file", Path: file, RawQuery: "_pragma=busy_timeout(10000)"}).String()))(t)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	return db
}

// try returns a function that returns v, or fails the test if err is not nil.
func try[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		must(t, err)
		return v
	}
}

// must fails the test unless err is nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until condition returns true. It fails the test after 10 seconds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("this never happened: %s", what)
		}
	}
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
	return func() { stopped.Store(true); all.Wait() }
}

// lookup returns a replacement of os.LookupEnv for the given environment.
func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (value string, ok bool) { value, ok = env[name]; return value, ok }
}

// writeFile creates a file with text in dir, and returns its path.
func writeFile(t testing.TB, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// snapshot lists the files in dir with their times and the sums of their contents, one a line.
func snapshot(t testing.TB, dir string) (text string) {
	t.Helper()
	for _, e := range try(os.ReadDir(dir))(t) {
		info, _ := e.Info()
		data, _ := os.ReadFile(filepath.Join(dir, e.Name()))
		text += fmt.Sprintf("%s %v %x\n", e.Name(), info.ModTime(), sha256.Sum256(data))
	}
	return text
}

func TestListPets(t *testing.T) {
	s := parallelService(t)
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
		{"?after=44", "", all[44:]},
		{"?after=0&limit=1", "</v1/pets?after=1&limit=1>", all[:1]},
		{"?after=9223372036854775807", "", []pet{}},
		{"?status=sold&limit=15", "", sold},
		{"?limit=14&status=sold", "</v1/pets?after=42&limit=14&status=sold>", sold[:14]},
	} {
		a := s.do("GET", "/v1/pets"+c.query, "")
		if got := decode[[]pet](t, a); a.status != 200 || !slices.Equal(got, c.want) {
			t.Errorf("%s = %d %v, want %v", a.request, a.status, got, c.want)
		}
		if link := strings.TrimSuffix(a.header.Get("Link"), `; rel="next"`); link != c.link {
			t.Errorf("%s has Link %s, want %s", a.request, link, c.link)
		}
	}
}

// validBodies are accepted, and read back as they are.
var validBodies = []string{
	"{\r\n\t\"name\":\t\"x\",\r\n\t\"categoryId\":\r\n1,\t\"status\"\n:\r\"pending\"\t}",
	`{"name":"}]:,{[\"\\","categoryId":-9223372036854775808}`,
	`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`,
	`{"name":"\uD83D\uDC36\u00e9\\uD83D","categoryId":1}`,
	`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":0,"status":"available"}`,
}

func TestCreatePet(t *testing.T) {
	s := parallelService(t)
	for i, c := range []struct{ body, want string }{
		{rex, `"name":"Rex","categoryId":7,"status":"available"`},
		{` { "status" : "sold" , "name" : " <&> " , "categoryId" : -1 } ` + "\r\n\t", `"name":" <&> ","categoryId":-1,"status":"sold"`},
		{`{"n\u0061me":"\"\\\/\b\f\n\r\t","categoryId":1}`, `"name":"\"\\/\b\f\n\r\t","categoryId":1,"status":"available"`},
	} {
		want, location := fmt.Sprintf("{\"id\":%d,%s}\n", i+1, c.want), fmt.Sprintf("/v1/pets/%d", i+1)
		a := s.do("POST", "/v1/pets", c.body, "Content-Type: application/json; charset=latin1")
		if a.status != 201 || a.body != want || a.header.Get("Location") != location || a.header.Get("Connection") != "" {
			t.Errorf("POST %s = %d %s, at %q, want %s", c.body, a.status, a.body, a.header.Get("Location"), want)
		}
	}
	disconnected, cancel := context.WithCancel(t.Context())
	cancel()                           // which must not interrupt anything
	for _, body := range validBodies { // FuzzRequests reads them back
		s.want(s.doRequest(httptest.NewRequestWithContext(disconnected, "POST", "/v1/pets", strings.NewReader(body))), 201, "")
	}
	s.want(s.doRequest(httptest.NewRequestWithContext(disconnected, "GET", "/v1/pets/1", nil)), 200, "")
}

func TestCreatePetRefusesInvalidBodies(t *testing.T) {
	s := parallelService(t)
	x99 := strings.Repeat("x", 99)
	const nameRule = "name must be a string of 1 to 255 characters, not all white space, without U+0000, U+FFFD or unpaired surrogates"
	for body, words := range map[string]string{
		"":                                            "one JSON object",
		`{"name":"x","categoryId":1,}`:                `one JSON object: invalid character '}' looking for beginning of object key string, at byte 28"`,
		`["name","Rex","categoryId",7]`:               "one JSON object",
		`{"name":"x","categoryId":1 `:                 `unexpected end of JSON input, at byte 27"`,
		rex + "{}":                                    "one JSON object",
		"{\"name\":\"\xff\",\"categoryId\":1}":        "UTF-8",
		`{}`:                                          "name is required; categoryId is required",
		`{"name":null,"categoryId":null}`:             nameRule + "; categoryId must be an integer",
		`{"name":"x","categoryID":1}`:                 `unknown member \"categoryID\"; categoryId is required`,
		`{"` + x99 + `":1,"` + x99 + `":1}`:           `unknown member \"` + x99[:64] + `\"; \"` + x99[:64] + `\" must not be repeated`,
		`{"name":"x","name":"x","categoryId":1}`:      `\"name\" must not be repeated`,
		`{"name":"x","n\u0061me":"y","categoryId":1}`: `\"name\" must not be repeated`,
		"{\"name\":\" \u00a0\u2003\u3000\u0085\",\"categoryId\":1}":  "name must be",
		`{"name":"a\u0000b","categoryId":1}`:                         "name must be",
		`{"name":"a\uFFFDb","categoryId":1}`:                         "name must be",
		`{"name":"\uD83D","categoryId":1}`:                           "name must be",
		`{"name":"\uD800\uE000","categoryId":1}`:                     "name must be",
		`{"name":"` + strings.Repeat("é", 256) + `","categoryId":1}`: "name must be",
		`{"name":"x","categoryId":9223372036854775808}`:              "categoryId must be",
		`{"name":"x","categoryId":"1"}`:                              "categoryId must be",
		`{"name":"x","categoryId":1e2}`:                              "categoryId must be",
		`{"name":"x","categoryId":1,"status":null}`:                  "status must be available, pending or sold",
		`{"status":["sold",[{}]],"name":"x","categoryId":1}`:         `"status must be available, pending or sold","status"`,
		`{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`:       "sold; " + nameRule + `; unknown member \"x\"; categoryId must be`,
	} {
		s.want(s.do("POST", "/v1/pets", body), 400, words)
	}
	s.want(s.do("GET", "/v1/pets", ""), 200, "[]\n")
	exact := rex + strings.Repeat(" ", 64<<10-len(rex))
	s.want(s.do("POST", "/v1/pets", exact), 201, "")
	s.want(s.do("POST", "/v1/pets", exact+" "), 413, "65536")
	r := httptest.NewRequest("POST", "/v1/pets", io.MultiReader(strings.NewReader(exact), strings.NewReader(" "))) // chunked
	s.want(s.doRequest(r), 413, "65536")
	r = httptest.NewRequest("POST", "/v1/pets", io.MultiReader(strings.NewReader(`{"name":`), iotest.ErrReader(io.ErrUnexpectedEOF)))
	s.want(s.doRequest(r), 400, "read to its end") // the client disconnects
}

// TestRequests tests the status of responses, and which fault of several they report.
func TestRequests(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "pending")
	s.sqlite3("INSERT INTO pets (id, name, category_id) VALUES (3, 'Tom', 8)")
	large := strings.Repeat("x", 64<<10+1)
	parameters := "?" // fifty
	for i := range 50 {
		parameters += fmt.Sprintf("&p%02d=1", i)
	}
	for _, c := range []struct {
		request, headers, body string // headers are separated by |
		status                 int
		words                  string
	}{
		{"GET /v1/pets/1", "", "", 200, "Rex"},
		{"GET /v1/pets/2", "", "", 404, "no animal"}, // the next animal is 3
		{"GET /v1/pets/0", "", "", 404, "no animal"},
		{"GET /v1/pets/-9223372036854775808", "", "", 404, "no animal"},
		{"GET /v1/pets/01", "", "", 404, "no animal"},
		{"GET /v1/pets/" + strings.Repeat("9", 3000), "", "", 404, "no animal"},
		{"GET /v1/pets?limit=101", "", "", 400, "limit must be"},
		{"GET /v1/pets?limit=05", "", "", 400, "limit must be"},
		{"GET /v1/pets?limit=5&limit=5", "", "", 400, `\"limit\" must not be repeated`},
		{"GET /v1/pets?status=Sold", "", "", 400, "status must be available, pending or sold"},
		{"GET /v1/pets?after=-1", "", "", 400, "after must be"},
		{"GET /v1/pets?after=9223372036854775808", "", "", 400, "after must be"},
		{"GET /v1/pets?limit=5;after=1", "", "", 400, "malformed"},
		{"GET /v1/pets?limit=0&status=x&foo=1", "", "", 400, `unknown parameter \"foo\"; limit must be an integer from 1 to 100; status must be`},
		{"GET /v1/pets" + parameters, "", "", 400, `\"p09\"; and 40 more","status"`},
		{"GET /v1/pets" + parameters[:1+10*len("&p00=1")], "", "", 400, `\"p09\"","status"`},
		{"GET /v1/pets?" + strings.Repeat("x", 5000), "", "", 400, `unknown parameter \"` + large[:64] + `\"`},
		{"GET /", "", "", 404, "nothing at this path"},
		{"GET /v1/pets/", "", "", 404, "nothing at this path"},
		{"GET //v1/pets", "", "", 404, "nothing at this path"},
		{"GET /v1%2Fpets", "", "", 404, "nothing at this path"},
		{"GET /v1/pets/%2F", "", "", 404, "nothing at this path"},
		{"DELETE /v1/pets", "", "{", 405, `only GET, HEAD, POST"`},
		{"POST /v1/pets/1", "", "{", 405, `only GET, HEAD"`},
		{"POST /healthz", "", "{", 405, `only GET, HEAD"`},
		{"DELETE /openapi.json", "", "{", 405, `only GET, HEAD"`},
		{"DELETE /openapi.json", "Authorization:", "", 401, "API key"},
		{"DELETE /healthz", "Authorization:", "", 401, "API key"},
		{"GET /healthz", "Authorization:", "", 200, `{"status":"ok"}`},
		{"GET /openapi.json", "Authorization:", "", 200, string(openAPI)},
		{"POST /v1/pets?limit=x&anything", "Accept: text/html", rex, 201, "Rex"},
		{"POST /v1/pets", `Content-Type: Application/JSON;charset="utf-16"`, rex, 201, "Rex"},
		{"POST /v1/pets", "Content-Type: application/json; x", rex, 415, "application/json; x"},
		{"POST /v1/pets", "Content-Type: application/json" + large[:99], rex, 415, `not \"application/json` + large[:48] + `\""`},
		{"POST /v1/pets", "Content-Type:", rex, 415, ""},
		{"POST /v1/pets", "Content-Type: application/json|Content-Type: application/json", rex, 415, ""},
		{"POST /v1/pets", `Content-Type: application/json; x="a|Content-Type: b"`, rex, 415, ""},
		{"POST /v1/pets", "Idempotency-Key: a b|Content-Type: text/plain|Authorization: Bearer x", large, 401, "API key"},
		{"PATCH /v1/pets", "Idempotency-Key: a b|Content-Type: text/plain", large, 405, ""},
		{"POST /v1/pets", "Idempotency-Key: a b|Content-Type: text/plain", large, 415, "text/plain"},
		{"POST /v1/pets", "Idempotency-Key: a b", large, 400, "Idempotency-Key"},
		{"POST /v1/pets", "", large, 413, "65536"},
	} {
		method, target, _ := strings.Cut(c.request, " ")
		s.want(s.do(method, target, c.body, strings.Split(c.headers, "|")...), c.status, c.words)
	}
	for _, path := range []string{"/v1/pets", "/v1/pets/1", "/healthz", "/openapi.json", "/", "/v1", "/metrics", "/debug/vars", "/debug/pprof/"} {
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"} {
			s.do(method, path, "") // contractFaults knows which responses are documented
			s.do(method, path, "", "Authorization:")
		}
	}
}

func TestAPIKeyCheck(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	const missing, invalid = `Bearer realm="animalstore"`, `Bearer realm="animalstore", error="invalid_token"`
	for headers, challenge := range map[string]string{ // "" if the key is valid
		"Authorization: Bearer test-key":                                "",
		"Authorization: bearer  other-key":                              "",
		"Authorization:":                                                missing,
		"Authorization: Basic dGVzdC1rZXk=":                             missing,
		"Authorization: Bearer":                                         missing,
		"Authorization: Bearer TEST-KEY":                                invalid,
		"Authorization: Bearer test-key,other-key":                      invalid,
		"Authorization: Bearer test-key|Authorization: Bearer test-key": missing,
	} {
		for _, target := range []string{"/v1/pets", "/v1/pets/1", "/v1/pets?access_token=test-key"} {
			s.do("GET", target, "") // fills the cache, when it is no error
			a := s.do("GET", target, "", strings.Split(headers, "|")...)
			if refused := a.status == 401; refused != (challenge != "") || a.header.Get("WWW-Authenticate") != challenge {
				t.Errorf("%s with %s = %d and WWW-Authenticate %q, want %q", a.request, headers, a.status, a.header.Get("WWW-Authenticate"), challenge)
			}
		}
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
		if _, challenge := k.authenticate(http.Header{"Authorization": {"Bearer " + key}}); (challenge == "") != want {
			t.Errorf("key %q is valid: %v, want %v", key, challenge == "", want)
		}
	}
	if k, err := loadKeys(lookup(map[string]string{"API_KEYS": " ,"}), file); err != nil || len(k) != 3 {
		t.Errorf("with a file alone: %d keys, %v", len(k), err)
	}
}

func TestIdempotencyKey(t *testing.T) {
	s := parallelService(t)
	first := s.do("POST", "/v1/pets", rex, "Idempotency-Key: k")
	s.want(first, 201, `"id":1,`)
	for i, same := range []string{rex, `{ "status":"available", "categoryId":7, "name":"\u0052ex" }`} {
		s.sqlite3([]string{"UPDATE pets SET name = 'edited'", "DELETE FROM pets"}[i])
		again := s.do("POST", "/v1/pets", same, "Idempotency-Key: k")
		if again.status != 201 || again.body != first.body || again.header.Get("Idempotency-Replayed") != "true" ||
			again.header.Get("Location") != first.header.Get("Location") {
			t.Errorf("%s repeated = %d %s %v, want %s", same, again.status, again.body, again.header, first.body)
		}
	}
	for _, other := range []string{`{"name":"rex","categoryId":7}`, `{"name":"Rex","categoryId":8}`, `{"name":"Rex","categoryId":7,"status":"sold"}`} {
		s.want(s.do("POST", "/v1/pets", other, "Idempotency-Key: k"), 422, "idempotency_key_reused")
	}
	s.want(s.do("POST", "/v1/pets", `{"name":1}`, "Idempotency-Key: k"), 400, "name must")
	s.want(s.do("POST", "/v1/pets", rex, "Idempotency-Key: K"), 201, `"id":2,`)
	s.want(s.do("POST", "/v1/pets", rex, "Idempotency-Key: k", "Authorization: Bearer "+otherKey), 201, `"id":3,`)
	s.want(s.do("POST", "/v1/pets", rex, "Idempotency-Key: k"), 201, first.body)
	s.want(s.do("POST", "/v1/pets", rex), 201, `"id":4,`)
	s.want(s.do("POST", "/v1/pets", rex, "Idempotency-Key: !"+strings.Repeat("~", 254)), 201, `"id":5,`)
	for _, bad := range []string{"", " a b", " \x7f", " é", " a|Idempotency-Key: a", " " + strings.Repeat("k", 256)} {
		s.want(s.do("POST", "/v1/pets", rex, strings.Split("Idempotency-Key:"+bad, "|")...), 400, "1 to 255 visible ASCII")
	}
	if n := s.query("SELECT count(*) FROM pets"); n != "4" || first.header.Get("Idempotency-Replayed") != "" {
		t.Errorf("%s animals are stored, want 4; the headers of the first response are %v", n, first.header)
	}
}

func TestIdempotencyKeyIsForgottenAfterADay(t *testing.T) {
	s := parallelService(t)
	create := func(key any, id int) {
		t.Helper()
		s.want(s.do("POST", "/v1/pets", rex, fmt.Sprint("Idempotency-Key: ", key)), 201, fmt.Sprintf(`"id":%d,`, id))
	}
	age := func(seconds int) { s.sqlite3("UPDATE idempotency_keys SET created = unixepoch() - ?", seconds) }
	for i := range 10 {
		create(i, i+1)
	}
	s.wantSQL("SELECT min(created) > unixepoch() - 60 AND max(created) <= unixepoch() FROM idempotency_keys", "1")
	const day = idempotencyKeyLifetime
	age(day - 1)
	create(0, 1)
	age(day + 1)
	create(0, 11)
	create(0, 11)
	for i := range 4 { // each commit deletes two expired keys
		create(fmt.Sprint("new-", i), 12+i)
	}
	s.wantSQL("SELECT count(*) FROM idempotency_keys", "5")
}

func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := newService(t, &log)
	w, r := httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil)
	s.answer(w, r, func(*exchange, *http.Request) error { panic("in a handler") })
	s.want(checked(t, r, w.Result()), 500, `"internal error"`)
	if !strings.Contains(log.String(), `error="panic: in a handler`) || !strings.Contains(log.String(), "server_test.go:") {
		t.Errorf("no panic with its stack in the log: %s", log.String())
	}
}

// pipes is a net.Listener for connections in memory, which work under a fake clock.
type pipes struct {
	conns  chan net.Conn
	closed context.Context
	close  context.CancelFunc
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed.Done():
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error {
	l.close()
	return nil
}

func (l *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// dial opens a connection and sends text on it.
func (l *pipes) dial(text string) net.Conn {
	client, server := net.Pipe()
	l.conns <- server
	go io.WriteString(client, text)
	synctest.Wait()
	return client
}

// received returns the response to a request on conn.
func (s *service) received(conn net.Conn, method, target string) (a reply, closes bool) {
	s.t.Helper()
	r := httptest.NewRequest(method, target, nil)
	setHeaders(r, nil)
	resp := try(http.ReadResponse(bufio.NewReader(conn), r))(s.t)
	return checked(s.t, r, resp), resp.Close
}

// serve serves connections from ln until stop is called. stop returns when the service has stopped.
func (s *service) serve(ln net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error)
	go func() { ended <- s.server.serve(ctx, ln) }()
	return func() {
		cancel()
		must(s.t, <-ended)
	}
}

// serveInMemory serves connections in memory until stop is called.
func (s *service) serveInMemory() (ln *pipes, stop func()) {
	ln = &pipes{conns: make(chan net.Conn)}
	ln.closed, ln.close = context.WithCancel(context.Background())
	s.t.Cleanup(func() { time.Sleep(time.Minute) }) // until all goroutines of net/http have ended
	return ln, s.serve(ln)
}

const (
	withKey  = "Host: x\r\nAuthorization: Bearer " + testKey + "\r\n"
	length29 = "Content-Length: 29\r\n\r\n" // of rex
	post     = "POST /v1/pets HTTP/1.1\r\n"
	getList  = "GET /v1/pets HTTP/1.1\r\n" + withKey + "\r\n"
)

// TestStop stops the service while a connection is in one of several states.
func TestStop(t *testing.T) {
	t.Parallel()
	const soon, late = 250 * time.Millisecond, 5250 * time.Millisecond
	for what, c := range map[string]struct {
		sent        string
		later       string        // what is sent repeatedly during the stop
		every       time.Duration // how often
		status      int           // of the response, 0 if there is none
		least, most time.Duration
	}{
		"an idle connection":               {getList, "", 0, 200, soon, soon},
		"a request on an idle connection":  {getList, getList, 200 * time.Millisecond, 200, soon, soon},
		"a connection that sent nothing":   {"", "", 0, 0, soon, time.Second},
		"a request on a new connection":    {"", getList, 200 * time.Millisecond, 200, soon, time.Second},
		"a slow body without a key":        {post + "Host: x\r\nContent-Length: 1000000\r\n\r\n", "x", 100 * time.Millisecond, 401, soon, 3 * time.Second},
		"a request whose body comes late":  {post + withKey + length29, rex, 4 * time.Second, 201, 4 * time.Second, late},
		"a request whose body never comes": {post + withKey + length29, "", 0, 0, late, late},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			s := newService(t, &log)
			ln, stop := s.serveInMemory()
			conn := ln.dial(c.sent)
			if c.sent == getList {
				s.received(conn, "GET", "/v1/pets")
			}
			if c.later != "" {
				go func() {
					if c.sent == "" {
						time.Sleep(time.Millisecond) // until the stop has begun
						conn = ln.dial("")
					}
					go func() {
						for err := error(nil); err == nil; _, err = io.WriteString(conn, c.later) {
							time.Sleep(c.every)
						}
					}()
					method, _, _ := strings.Cut(c.sent+c.later, " ")
					if a, closes := s.received(conn, method, "/v1/pets"); a.status != c.status || !closes {
						t.Errorf("%s = %d %s, Connection: close %v", what, a.status, a.body, closes)
					}
				}()
			}
			start := time.Now()
			stop()
			synctest.Wait()
			if took := time.Since(start); took < c.least || took > c.most {
				t.Errorf("%s: the stop took %v, want %v to %v", what, took, c.least, c.most)
			}
			if cut := strings.Contains(log.String(), "connections were cut off"); c.least == late && !cut || c.most < late && cut {
				t.Errorf("%s: the log says that connections were cut off: %v; %s", what, cut, log.String())
			}
		})
	}
}

// TestLimitOfHeaders also sends a request that net/http would answer by itself.
func TestLimitOfHeaders(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		for request, want := range map[string]string{
			"GET /healthz HTTP/1.1\r\nX: " + strings.Repeat("x", 15<<10): "HTTP/1.1 200",
			"GET /healthz HTTP/1.1\r\nX: " + strings.Repeat("x", 17<<10): "HTTP/1.1 431",
			"OPTIONS * HTTP/1.1": "HTTP/1.1 401",
		} {
			conn := ln.dial(request + "\r\nHost: x\r\n\r\n")
			if line, _ := bufio.NewReader(conn).ReadString('\n'); !strings.HasPrefix(line, want) {
				t.Errorf("%.30s with %d bytes = %q, want %s", request, len(request), line, want)
			}
			conn.Close()
		}
		stop()
	})
}

func TestTimeouts(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		for sent, want := range map[string]time.Duration{"": 5 * time.Second, getList[:9]: 5 * time.Second, getList: 75 * time.Second} {
			start := time.Now()
			io.Copy(io.Discard, ln.dial(sent))
			if took := time.Since(start); took != want {
				t.Errorf("after %q the connection was closed after %v, want %v", sent, took, want)
			}
		}
		for wait, whole := range map[time.Duration]bool{19 * time.Second: true, 21 * time.Second: false} {
			conn := ln.dial("GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			time.Sleep(wait)
			if n, _ := io.Copy(io.Discard, conn); (n > int64(len(openAPI))) != whole {
				t.Errorf("a client that reads after %v gets %d bytes", wait, n)
			}
		}
		for header, c := range map[string]struct { // with a part of the body
			status int
			wait   time.Duration // until the response
		}{
			withKey + length29: {408, 10 * time.Second},
			withKey + "Content-Type: text/plain\r\n" + length29:  {415, 2 * time.Second},
			"Host: x\r\n" + length29:                             {401, 2 * time.Second},
			"Host: x\r\nConnection: close\r\n" + length29:        {401, 0},
			"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n": {401, 2 * time.Second},
		} {
			start := time.Now()
			conn := ln.dial(post + header + `{"name":`)
			a, closes := s.received(conn, "POST", "/v1/pets")
			if took := time.Since(start); a.status != c.status || took != c.wait || !closes {
				t.Errorf("%q: %d after %v, Connection: close %v; want %d after %v", header, a.status, took, closes, c.status, c.wait)
			}
			io.Copy(io.Discard, conn) // until the connection is closed
			if took := time.Since(start); took > c.wait+4*time.Second {
				t.Errorf("%q: the connection was closed after %v", header, took)
			}
		}
		stop()
	})
}

// TestResponseReachesClientsThatSendFirst sends large bodies, and reads the response only afterwards.
func TestResponseReachesClientsThatSendFirst(t *testing.T) {
	s := parallelService(t)
	ln := try(net.Listen("tcp", "127.0.0.1:0"))(t)
	stop := s.serve(ln)
	body := bytes.Repeat([]byte("x"), 1_000_000)
	for header, status := range map[string]int{
		post + withKey: 413, post + withKey + "Connection: close\r\n": 413, post + "Host: x\r\n": 401, post + "Host: x\r\nConnection: close\r\n": 401,
		getList[:len(getList)-2]: 200, getList[:len(getList)-2] + "Connection: close\r\n": 200,
	} {
		for range 25 {
			conn := try(net.Dial("tcp", ln.Addr().String()))(t)
			try(fmt.Fprintf(conn, "%sContent-Length: %d\r\n\r\n%s", header, len(body), body))(t)
			a, _ := s.received(conn, strings.Fields(header)[0], "/v1/pets")
			s.want(a, status, "")
			conn.Close()
		}
	}
	stop()
}

// connections holds the open connections of the last service on each database file; the first is the one that writes.
var connections = struct {
	sync.Mutex
	to map[string][]sqlite.ExecQuerierContext
}{to: map[string][]sqlite.ExecQuerierContext{}}

// callbacks maps the path of a database file to the func() error that the SQL expression call(path) runs.
var callbacks sync.Map

// watchSQLite makes the driver fill connections and call callbacks.
func watchSQLite() {
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		opened, err := url.Parse(dsn)
		connections.Lock()
		defer connections.Unlock()
		switch file := opened.Path; opened.Query().Get("mode") {
		case "rwc":
			connections.to[file] = []sqlite.ExecQuerierContext{conn}
		case "ro", "rw":
			connections.to[file] = append(connections.to[file], conn)
		}
		return err
	})
	sqlite.MustRegisterScalarFunction("call", 1, func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
		f, _ := callbacks.Load(args[0])
		return nil, f.(func() error)()
	})
}

// connections returns the open connections of the service; the first is the one that writes.
func (s *service) connections() []sqlite.ExecQuerierContext {
	connections.Lock()
	defer connections.Unlock()
	return slices.Clone(connections.to[s.db])
}

// pragma runs a PRAGMA on connection i of the service (it writes on 0), and returns its result, if there is one.
func (s *service) pragma(i int, text string) string {
	s.t.Helper()
	rows := try(s.connections()[i].QueryContext(context.Background(), "PRAGMA "+text, nil))(s.t)
	defer rows.Close()
	value := make([]driver.Value, max(1, len(rows.Columns())))
	rows.Next(value) // returns io.EOF if there is no result
	return fmt.Sprint(value[0])
}

// onRead makes the service call f whenever it reads an animal. The first call replaces the table by a view.
func (s *service) onRead(f func() error) {
	s.t.Helper()
	if _, again := callbacks.Swap(s.db, f); !again {
		s.sqlite3("ALTER TABLE pets RENAME TO animals; " +
			"CREATE VIEW pets AS SELECT id, coalesce(call('" + s.db + "'), name) AS name, category_id, status FROM animals")
	}
}

// onCommit makes the service call f whenever it commits.
func (s *service) onCommit(f func()) {
	s.connections()[0].(sqlite.HookRegisterer).RegisterCommitHook(func() int32 {
		f()
		return 0
	})
}

// lock takes the write lock, as another program would, until unlock is called.
func (s *service) lock() (unlock func()) {
	s.t.Helper()
	db := connect(s.t, s.db)
	try(db.Exec("BEGIN IMMEDIATE"))(s.t)
	return func() { must(s.t, db.Close()) }
}

// TestCacheIsNeverBehindAnAcknowledgedWrite requests the list before a create, during its commit, and after it.
func TestCacheIsNeverBehindAnAcknowledgedWrite(t *testing.T) {
	s := parallelService(t)
	list := func() string { return s.do("GET", "/v1/pets", "").body }
	s.onCommit(func() { list() })
	for i := range 20 { // repeated, because watch may happen to notice a change
		name := fmt.Sprint("animal ", i)
		list()
		if s.add(name, 7, "sold"); !strings.Contains(list(), name) {
			t.Errorf("the list after %s was added is %s", name, list())
		}
	}
}

// TestChangeDuringARead has another program edit the database during a read, and sends requests for the page during it, or only
// afterwards. The edit shows within a second.
func TestChangeDuringARead(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("old", 7, "sold")
		names := []string{"old", "first edit", "second edit"}
		for i, edited := range names[1:] {
			var held atomic.Bool
			reading, goOn := make(chan bool), make(chan bool)
			s.onRead(func() error {
				if held.CompareAndSwap(false, true) { // the first read
					close(reading)
					<-goOn
				}
				return nil
			})
			time.Sleep(time.Second) // until the service has found the last change
			page := fmt.Sprint("/v1/pets?limit=", 1+i)
			var first reply
			var answered sync.WaitGroup
			answered.Go(func() { first = s.do("GET", page, "") })
			<-reading
			s.sqlite3("UPDATE animals SET name = ?", edited)
			time.Sleep(time.Second)
			if i > 0 {
				s.want(s.do("GET", page, ""), 200, edited)
			}
			close(goOn)
			answered.Wait()
			s.want(first, 200, names[i])
			s.want(s.do("GET", page, ""), 200, edited)
		}
		s.onRead(func() error { return errors.New("unreadable") })
		s.want(s.do("GET", "/v1/pets?limit=9", ""), 500, "internal")
		s.onRead(func() error { return nil })
		s.want(s.do("GET", "/v1/pets?limit=9", ""), 200, "second edit") // an error is not kept
	})
}

// TestRequestsShareOneRead sends many requests for a page at once.
func TestRequestsShareOneRead(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		for range 100 {
			s.add(strings.Repeat("🐶", 255), 7, "sold")
		}
		var read atomic.Int64 // animals
		var sending, answered sync.WaitGroup
		s.onRead(func() error {
			read.Add(1)
			sending.Wait()
			return nil
		})
		time.Sleep(time.Second) // until the service has found the last change
		sending.Add(100)
		for range 100 {
			answered.Go(func() {
				sending.Done()
				s.want(s.do("GET", "/v1/pets?limit=100", ""), 200, `"id":100`)
			})
		}
		answered.Wait()
		if n := read.Load(); n != 100 {
			t.Errorf("%d animals were read, want 100", n)
		}
	})
}

// TestCacheStaysSmall requests pages with many long URLs. It measures memory, and so does not run in parallel.
func TestCacheStaysSmall(t *testing.T) {
	s := newService(t)
	for range 100 {
		s.add(strings.Repeat("x", 255), 1, "sold")
	}
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for i := range 2000 {
		r := httptest.NewRequest("GET", "http://"+strings.Repeat("x", 11000)+"/v1/pets?limit=100"+strings.Repeat("&", i), nil)
		setHeaders(r, nil)
		s.ServeHTTP(httptest.NewRecorder(), r)
	}
	if grown := heap() - before; grown > 12<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
}

func TestConnections(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		synctest.Wait() // until all connections are idle
		for pragma, want := range map[string]string{"synchronous": "2", "fullfsync": "1", "journal_mode": "wal",
			"journal_size_limit": "64000000", "application_id": "1348826227", "user_version": "1"} {
			if got := s.pragma(0, pragma); got != want {
				t.Errorf("%s is %s, want %s", pragma, got, want)
			}
		}
		must(t, os.Rename(s.db, s.db+".away"))
		s.want(s.do("POST", "/v1/pets", rex), 503, "unavailable") // at once: the fake clock stands still
		must(t, os.Rename(s.db+".away", s.db))
		timeouts := "" // of all connections, which are open before the first request
		for i := range s.connections() {
			timeouts += s.pragma(i, "busy_timeout") + " "
		}
		if want := strings.Repeat("5000 ", 1+max(4, runtime.GOMAXPROCS(0))) + "0 "; timeouts != want { // the last is the watcher
			t.Errorf("the busy timeouts are %s, want %s", timeouts, want)
		}
	})
}

// TestSchemaEnforcesTheRules tests edits that would break the rules for animals.
func TestSchemaEnforcesTheRules(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	db := connect(t, s.db)
	for _, edit := range []string{
		`UPDATE pets SET name = ''`,
		`UPDATE pets SET name = printf('%.256c', 'x')`,
		`UPDATE pets SET name = NULL`,
		`UPDATE pets SET name = x'00'`,
		`UPDATE pets SET category_id = 1.5`,
		`UPDATE pets SET status = 'lost'`,
		`UPDATE pets SET id = 0`,
		`INSERT INTO pets (id, name, category_id) VALUES (-1, 'x', 1)`,
	} {
		if _, err := db.Exec(edit); err == nil {
			t.Errorf("%s is allowed", edit)
		}
	}
}

// TestOddNamesOfDatabases opens files with names that have a meaning in a URI.
func TestOddNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{":memory:", "file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", "ä\n"} {
		s := openService(t, writeFile(t, t.TempDir(), name, "")) // an empty file is a new database
		s.add("Rex", 7, "sold")
		s.wantSQL("SELECT count(*) FROM pets", "1")
	}
}

// TestQueriesReadFewPages counts the pages that SQLite looks at. In this database, a scan or a sort looks at hundreds.
func TestQueriesReadFewPages(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.addMany(20000, strings.Repeat("x", 200))
		s.sqlite3("INSERT INTO idempotency_keys SELECT zeroblob(32), id, 1, id, name, category_id, status FROM pets")
		pages := func() (n int) {
			synctest.Wait() // until all connections are idle
			for _, conn := range s.connections() {
				hits, _, _ := conn.(sqlite.DBStatus).Status(sqlite.DBStatusCacheHit, false)
				misses, _, _ := conn.(sqlite.DBStatus).Status(sqlite.DBStatusCacheMiss, false)
				n += hits + misses
			}
			return n
		}
		for request, most := range map[string]int{
			"GET /v1/pets?after=10000&limit=50": 20,
			"GET /v1/pets/10000":                20,
			"POST /v1/pets":                     100,
		} {
			method, target, _ := strings.Cut(request, " ")
			before := pages()
			s.do(method, target, rex, "Idempotency-Key: k")
			if n := pages() - before; n == 0 || n > most {
				t.Errorf("%s looks at %d pages, want at most %d", request, n, most)
			}
		}
	})
}

// TestWaitingCreatesShareOneCommit adds animals to a locked database, two for each Idempotency-Key, until all that waited were
// stored by one commit.
func TestWaitingCreatesShareOneCommit(t *testing.T) {
	s := parallelService(t)
	var commits, rounds atomic.Int64
	s.onCommit(func() { commits.Add(1) })
	eventually(t, "one commit stores all", func() bool {
		unlock, round := s.lock(), rounds.Add(1)
		commits.Store(0)
		var statuses [600]atomic.Int64
		var begun, answered sync.WaitGroup
		for i := range 20 {
			begun.Add(1)
			answered.Go(func() {
				body := fmt.Sprintf(`{"name":"animal %d","categoryId":7}`, i)
				begun.Done()
				statuses[s.do("POST", "/v1/pets", body, fmt.Sprint("Idempotency-Key: ", round, "-", i/2)).status].Add(1)
			})
		}
		begun.Wait()
		unlock()
		answered.Wait()
		if statuses[201].Load() != 10 || statuses[422].Load() != 10 {
			t.Fatalf("%d responses are 201, and %d are 422; want 10 and 10", statuses[201].Load(), statuses[422].Load())
		}
		return commits.Load() == 1
	})
	s.wantSQL("SELECT count(*) FROM pets", fmt.Sprint(10*rounds.Load()))
}

// TestDatabaseThatCannotBeWritten uses a database that is full, then read-only, then locked for too long, and then broken.
func TestDatabaseThatCannotBeWritten(t *testing.T) {
	s := parallelService(t)
	s.pragma(0, "max_page_count = "+s.pragma(0, "page_count"))
	a := reply{status: 201}
	for a.status == 201 { // until the last page is full
		a = s.do("POST", "/v1/pets", `{"name":"`+strings.Repeat("x", 200)+`","categoryId":7}`)
	}
	s.want(a, 503, "unavailable")
	s.want(s.do("GET", "/v1/pets?limit=1", ""), 200, "xxx")
	s.want(s.do("GET", "/healthz", ""), 200, "ok")
	s.pragma(0, "max_page_count = 1000000")
	unlock := s.lock()
	var waiting sync.WaitGroup
	waiting.Go(func() { s.want(s.do("POST", "/v1/pets", rex), 503, "unavailable") })
	must(t, os.Rename(s.db+"-wal", s.db+"-wal.away"))
	eventually(t, "the service is unhealthy while a create waits", func() bool { return s.do("GET", "/healthz", "").status == 503 })
	unlock()
	waiting.Wait()
	must(t, os.Rename(s.db+"-wal.away", s.db+"-wal"))
	eventually(t, "the service is healthy", func() bool { return s.do("GET", "/healthz", "").status == 200 })
	s.pragma(0, "busy_timeout = 50")
	unlock = s.lock()
	s.want(s.do("POST", "/v1/pets", rex), 503, "unavailable")
	s.want(s.do("GET", "/v1/pets?limit=2", ""), 200, "xxx")
	unlock()
	try(s.connections()[0].ExecContext(t.Context(), "BEGIN", nil))(t)
	s.want(s.do("POST", "/v1/pets", rex), 503, "unavailable")
	s.add("Rex", 7, "sold")
	before := s.query("SELECT max(id) FROM pets")
	s.sqlite3(`CREATE TRIGGER refuse BEFORE INSERT ON idempotency_keys BEGIN SELECT RAISE(ABORT, 'refused'); END;
		CREATE TABLE child (parent REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER orphan BEFORE INSERT ON pets WHEN new.name = 'orphan' BEGIN INSERT INTO child VALUES (0); END`)
	s.pragma(0, "foreign_keys = ON")
	s.want(s.do("POST", "/v1/pets", rex, "Idempotency-Key: k"), 500, "internal")
	s.want(s.do("POST", "/v1/pets", `{"name":"orphan","categoryId":7}`), 500, "internal") // COMMIT fails
	s.wantSQL("SELECT max(id) FROM pets", before)                                         // neither create has stored anything
	s.add("Rex", 7, "sold")
	s.sqlite3("CREATE TRIGGER leave_out BEFORE INSERT ON pets WHEN new.name = 'left out' BEGIN SELECT RAISE(IGNORE); END")
	s.want(s.do("POST", "/v1/pets", `{"name":"left out","categoryId":7}`), 500, "internal")
	s.sqlite3("ALTER TABLE idempotency_keys RENAME TO hidden")
	s.want(s.do("POST", "/v1/pets", rex, "Idempotency-Key: k"), 500, "internal")
}

// TestFailingDisk lets writes of the program fail, after which it cannot know what is stored, and then those of a backup and a restore.
func TestFailingDisk(t *testing.T) {
	t.Parallel()
	const limited = `trap "" XFSZ; ulimit -f 100; ` + execSelf // the size of files, to less than that of the write-ahead log
	s := newService(t)
	s.addMany(10000, strings.Repeat("x", 255)) // more than SQLite's cache, so that it writes a journal
	s.sqlite3("VACUUM INTO ?", s.db+".other")
	s.add("Rex", 7, "sold")
	must(t, s.close())
	p := startProcess(t, command(t, limited, "-db", s.db))
	status, added := 201, -1
	for ; status == 201; added++ {
		status, _, _ = fetch(http.DefaultClient, "POST", p.url+"/v1/pets", rex)
	}
	p.read("level=ERROR .*disk I/O error")
	if _, log := p.stop(syscall.SIGKILL); status != 500 {
		t.Errorf("POST /v1/pets = %d, want 500; log %s", status, log)
	}
	copies := t.TempDir()
	for _, args := range [][]string{{"-backup", filepath.Join(copies, "copy")}, {"-restore", s.db + ".other"}} {
		cmd := command(t, limited, append([]string{"-db", s.db}, args...)...)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "disk I/O error") {
			t.Errorf("%s: %v %s", args, err, out)
		}
	}
	if left := snapshot(t, copies); left != "" {
		t.Errorf("the backup has left %s", left)
	}
	s = openService(t, s.db)
	s.wantSQL("PRAGMA integrity_check", "ok")
	s.wantSQL("SELECT count(*) FROM pets", strconv.Itoa(10001+added))
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

// execSelf is the line of shell that becomes the program.
const execSelf = `exec "$0" "$@"`

// command returns a command that runs the program on a free port through a line of shell that ends in execSelf.
func command(t testing.TB, shell string, args ...string) *exec.Cmd {
	args = append([]string{"-c", shell, os.Args[0], "-addr", "127.0.0.1:0", "-db", filepath.Join(t.TempDir(), "animals.db")}, args...)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "sh", args...)
	cmd.Env = append(os.Environ(), "ANIMALSTORE_PROCESS=1", "API_KEYS="+testKey)
	try(cmd.StdinPipe())(t) // see TestMain
	return cmd
}

// startProcess starts the program, and reads its log until it serves.
func startProcess(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	p := spawn(t, cmd)
	p.url = p.read(`msg=started url=(\S+)`)[1]
	return p
}

func spawn(t testing.TB, cmd *exec.Cmd) *process {
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

// send sends a request with a valid key to the program, with an animal as its body, and returns the status of the response.
func (p *process) send(method, target string) (status int) {
	p.t.Helper()
	status, _, err := fetch(http.DefaultClient, method, p.url+target, rex)
	must(p.t, err)
	return status
}

// want sends a request, and checks the status of the response.
func (p *process) want(status int, method, target string) {
	p.t.Helper()
	if got := p.send(method, target); got != status {
		p.t.Errorf("%s %s = %d, want %d", method, target, got, status)
	}
}

// awaitUnhealthy waits until the program is unhealthy, and logs a cause that matches pattern.
func (p *process) awaitUnhealthy(pattern string) {
	p.t.Helper()
	eventually(p.t, "the program is unhealthy because of "+pattern, func() bool {
		return p.send("GET", "/healthz") == 503 && regexp.MustCompile(pattern).MatchString(p.read("path=/healthz .*")[0])
	})
}

// wantRun runs the program on the database, with args, until it ends, and checks its exit status and its output.
func (s *service) wantRun(status int, words string, args ...string) {
	s.t.Helper()
	cmd := command(s.t, execSelf, append([]string{"-db", filepath.Base(s.db)}, args...)...)
	cmd.Dir = filepath.Dir(s.db)
	out, _ := cmd.CombinedOutput()
	if got := cmd.ProcessState.ExitCode(); got != status || !strings.Contains(string(out), words) {
		s.t.Errorf("%q: exit status %d, output %s; want %d, %s", args, got, out, status, words)
	}
}

// fetch sends a request with a valid key and the given headers, as service.do does, over the network.
func fetch(client *http.Client, method, url, body string, headers ...string) (status int, text string, err error) {
	r, _ := http.NewRequest(method, url, strings.NewReader(body))
	setHeaders(r, headers)
	resp, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// TestKilledProcessLosesNothing kills the program several times while clients add animals.
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	db := filepath.Join(t.TempDir(), "animals.db")
	var acknowledged sync.Map // Idempotency-Key to body
	var sent atomic.Int64
	for round := range 6 {
		p := startProcess(t, command(t, execSelf, "-db", db))
		add := func(i int64) error {
			key := fmt.Sprint("animal-", i)
			status, body, err := fetch(http.DefaultClient, "POST", p.url+"/v1/pets", fmt.Sprintf(`{"name":%q,"categoryId":1}`, key), "Idempotency-Key: "+key)
			if err != nil {
				return err
			}
			if before, again := acknowledged.LoadOrStore(key, body); status != 201 || again && before != body {
				t.Errorf("round %d: the response to %s is %d %s, and was %s", round, key, status, body, before)
			}
			return nil
		}
		for i := range sent.Load() { // repeats all earlier creates, acknowledged or not
			must(t, add(i))
		}
		var adding sync.WaitGroup
		before := sent.Load()
		for range 16 {
			adding.Go(func() {
				for add(sent.Add(1)-1) == nil {
				}
			})
		}
		eventually(t, "some animals are added", func() bool { return sent.Load() > before+60 })
		p.stop(syscall.SIGKILL)
		adding.Wait()
	}
	s := openService(t, db)
	s.wantSQL("PRAGMA integrity_check", "ok")
	acknowledged.Range(func(key, body any) bool {
		p := decode[pet](t, reply{body: body.(string)})
		if a := s.do("GET", fmt.Sprint("/v1/pets/", p.ID), ""); a.body != body {
			t.Errorf("%s was acknowledged as %s and is %s", key, body, a.body)
		}
		return true
	})
	s.wantSQL("SELECT count(*) FROM (SELECT 1 FROM pets GROUP BY name HAVING count(*) > 1)", "0")
}

// TestMovedFiles moves, deletes or replaces the files of a running program: five animals, all still in the write-ahead log, and a
// copy with the first three. The program must create nothing until the files are back, or until it is restarted.
func TestMovedFiles(t *testing.T) {
	t.Parallel()
	const (
		database = `/animals.db\\" was moved, deleted or replaced while the service ran; put it back .* or a backup in its place, end all other`
		wal      = `/animals.db-wal\\" was moved.* ran; the animals in the log were saved in the database; end all other programs`
		index    = `/animals.db-shm\\" was moved.* ran; the animals in the log were saved in the database; end all other programs`
		newIndex = `/animals.db-shm\\" was moved.* ran; another program has begun a new log without the old one's animals; put it back, or end`
		started  = "msg=started"
	)
	for what, c := range map[string]struct {
		before  string // SQL that another program runs before the slip
		slip    string // shell commands in the folder of the files
		after   string // SQL that another program runs after the slip, before the program notices
		moved   string // what the log says
		undo    string // shell commands that put the files back; if empty, the program is stopped
		start   string // what the next start says
		mend    string // shell commands, after a start that is refused
		animals string // the ids in the end, after one more animal was added
	}{
		"the database, put back":   {"", "mv animals.db away", "", database, "mv away animals.db", started, "", "1,2,3,4,5,6"},
		"the database, restarted":  {"", "mv animals.db away", "", database, "", "there is no database, but", "mv away animals.db", "1,2,3,4,5,6"},
		"the log, put back":        {"", "mv animals.db-wal away", "", wal, "mv away animals.db-wal", started, "", "1,2,3,4,5,6"},
		"the log, deleted":         {"", "rm animals.db-wal", "", wal, "", started, "", "1,2,3,4,5,6"},
		"the log, beside a reader": {"BEGIN; SELECT * FROM pets", "rm animals.db-wal", "", wal, "", started, "", "1,2,3,4,5,6"},
		"the index, deleted":       {"", "rm animals.db-shm", "", index, "", started, "", "1,2,3,4,5,6"},
		"the index, with an edit":  {"", "rm animals.db-shm", "INSERT INTO pets (name, category_id) VALUES ('Tom', 8)", newIndex, "", started, "", "1,2,3,4,5,6,7"},
		"all files, deleted":       {"", "rm animals.db*", "", database, "", "the database is new and empty", "", "1"},
		"a backup in the place":    {"", "mv copy animals.db", "", database, "", started, "", "1,2,3,4"},
		"a link in the place":      {"", "mv animals.db away; ln -s away animals.db", "", database, "", "name the file that it leads to", "mv away animals.db", "1,2,3,4,5,6"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := &service{t: t, db: filepath.Join(t.TempDir(), "files", "animals.db")} // without a server in this process
			must(t, os.Mkdir(filepath.Dir(s.db), 0o700))
			shell := func(commands string) {
				cmd := exec.Command("sh", "-e", "-c", commands)
				cmd.Dir = filepath.Dir(s.db)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v %s", commands, err, out)
				}
			}
			p := startProcess(t, command(t, execSelf, "-db", s.db))
			for range 3 {
				p.want(201, "POST", "/v1/pets")
			}
			must(t, backup(t.Context(), s.db, filepath.Join(filepath.Dir(s.db), "copy")))
			p.want(201, "POST", "/v1/pets")
			other := connect(t, s.db)
			try(other.Exec(c.before))(t)
			p.want(201, "POST", "/v1/pets")
			shell(fmt.Sprint("kill -STOP ", p.cmd.Process.Pid))
			shell(c.slip)
			try(other.Exec(c.after))(t)
			if c.after != "" {
				must(t, other.Close())
			}
			shell(fmt.Sprint("kill -CONT ", p.cmd.Process.Pid))
			if c.before != "" {
				p.awaitUnhealthy("do not restart the service yet: .*animals.db-wal.* could not be saved in the database: it is in use")
				must(t, other.Close())
			}
			p.awaitUnhealthy(c.moved)
			p.want(503, "POST", "/v1/pets")
			p.want(200, "GET", "/v1/pets")
			if c.undo != "" {
				shell(c.undo)
				eventually(t, "the program is healthy", func() bool { return p.send("GET", "/healthz") == 200 })
				shell(c.slip) // again
				p.awaitUnhealthy(c.moved)
				shell(c.undo)
				eventually(t, "the program is healthy again", func() bool { return p.send("GET", "/healthz") == 200 })
			} else {
				if status, log := p.stop(syscall.SIGTERM); status != 1 || strings.Count(log, "\nanimalstore: ") != 1 || strings.Contains(log, "msg=stopped") {
					t.Errorf("the stop ended with %d, log %s", status, log)
				}
				must(t, other.Close())
				if c.mend != "" {
					s.wantRun(1, c.start)
					shell(c.mend)
				}
				p = startProcess(t, command(t, execSelf, "-db", s.db))
				if log := p.lines.String(); c.mend == "" && !strings.Contains(log, c.start) {
					t.Errorf("the next start says %s, want %s", log, c.start)
				}
			}
			p.want(201, "POST", "/v1/pets")
			if status, log := p.stop(syscall.SIGTERM); status != 0 {
				t.Errorf("the last stop ended with %d, log %s", status, log)
			}
			s.wantSQL("PRAGMA integrity_check", "ok")
			s.wantSQL("SELECT group_concat(id ORDER BY id) FROM pets", c.animals)
		})
	}
}

// TestRollingRestart puts a copy in the place of the database of two services, and restarts them one after the other.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	s := &service{t: t, db: filepath.Join(t.TempDir(), "animals.db")}
	start := func() *process { return startProcess(t, command(t, execSelf, "-db", s.db)) }
	one, other := start(), start()
	one.want(201, "POST", "/v1/pets")
	must(t, backup(t.Context(), s.db, s.db+".copy"))
	for range 9 {
		other.want(201, "POST", "/v1/pets")
	}
	must(t, os.Rename(s.db, s.db+".old"))
	must(t, os.Rename(s.db+".copy", s.db))
	for _, p := range []*process{one, other} {
		p.awaitUnhealthy("or a backup in its place")
	}
	one.stop(syscall.SIGTERM)
	one = start()
	for range 30 {
		one.want(201, "POST", "/v1/pets")
	}
	time.Sleep(2 * watchInterval) // until the other has looked again; it must not touch the log, which now is of the new database
	other.stop(syscall.SIGTERM)
	other = start()
	other.want(201, "POST", "/v1/pets")
	one.stop(syscall.SIGTERM)
	other.stop(syscall.SIGTERM)
	for file, count := range map[string]string{s.db: "32", s.db + ".old": "10"} {
		s.db = file
		s.wantSQL("PRAGMA integrity_check", "ok")
		s.wantSQL("SELECT count(*) FROM pets", count)
	}
}

// TestPanicInTheStore tests that a panic there ends the program, which would otherwise have lost a connection.
func TestPanicInTheStore(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "GET /v1/pets/1", "GET /healthz", "POST /v1/pets"} {
		s := newService(t)
		s.add("Rex", 7, "sold")
		must(t, s.close())
		p := startProcess(t, command(t, execSelf, "-db", s.db))
		s.onRead(nil) // in the process, there is no function to call
		s.sqlite3("CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN SELECT call('no function'); END")
		method, target, _ := strings.Cut(request, " ")
		if status, body, err := fetch(http.DefaultClient, method, p.url+target, rex); err == nil {
			t.Fatalf("%s = %d %s, want no response", request, status, body)
		}
		if status, log := p.stop(); status != 2 || !strings.Contains(log, "panic: ") || !strings.Contains(log, "(*store)") {
			t.Errorf("after %s: exit status %d, log %s", request, status, log)
		}
	}
}

func TestSignals(t *testing.T) {
	t.Parallel()
	for shell, signals := range map[string][]syscall.Signal{ // the last one stops the program, and those sent again change nothing
		execSelf:                   {syscall.SIGTERM},
		"true; " + execSelf:        {syscall.SIGINT},
		`trap "" HUP; ` + execSelf: {syscall.SIGHUP, syscall.SIGTERM}, // like nohup(1)
	} {
		t.Run(shell, func(t *testing.T) {
			t.Parallel()
			p := startProcess(t, command(t, shell))
			for _, sig := range signals {
				p.cmd.Process.Signal(sig)
			}
			cause := signals[len(signals)-1]
			p.read(fmt.Sprintf(`msg=stopping cause="%v signal received"$`, cause))
			if status, log := p.stop(cause, syscall.SIGINT); status != 0 || strings.Count(log, "msg=stop") != 2 || !strings.HasSuffix(log, "msg=stopped\n") {
				t.Errorf("status %d, log %s", status, log)
			}
		})
	}
}

// TestLog tests what the log line of a request contains, and what it must not contain.
func TestLog(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("Rex", 7, "sold")
		s.add("Tom", 8, "sold")
		reads := 0
		s.onRead(func() error { // the second animal of each page cannot be read
			if reads++; reads%2 == 0 {
				return errors.New("no such animal")
			}
			return nil
		})
		time.Sleep(time.Second) // until the service has found the last change
		long := strings.Repeat("x", 1024)
		for _, c := range []struct {
			method, target, headers string
			status                  int
			has, hasNot             string // separated by |
		}{
			{"GET", "/v1/pets?after=7", "X-Request-Id: mine", 200,
				"level=INFO msg=request | client=192.0.2.1:1234 method=GET path=/v1/pets status=200 bytes=3 duration=| key=62af8704\n", "after|mine|error"},
			{"HEAD", "/v1/pets?after=7", "", 200, " bytes=0 ", "error"},
			{"GET", "/v1/pets?limit=0", "", 400, `level=INFO | key=62af8704 error="limit must be`, ""},
			{"GET", "/v1/pets/x%0Ay", "Authorization: Bearer guess", 401, `path="/v1/pets/x\ny" status=401| error="a valid API key is required`, "guess|key="},
			{long + "x", "/" + long, "", 404, " method=" + long + " path=/" + long[1:] + " status=404 ", ""},
			{"GET", "/v1/pets", "", 500, `level=ERROR|no such animal`, ""},
			{"GET", "/v1/pets/1", "", 500, `level=ERROR|no such animal`, ""},
			{"GET", "/healthz", "", 503, `level=ERROR|no such animal`, ""},
			{"GET", "/v1/pets", "", 500, "", ""}, // more failing reads than there are connections
			{"GET", "/v1/pets", "", 500, "", ""},
		} {
			log.Reset()
			a := s.do(c.method, c.target, "", strings.Split(c.headers, "|")...)
			id := " id=" + a.header.Get("X-Request-Id") + " "
			if a.status != c.status || strings.Contains(a.body, "no such") || strings.Count(log.String(), "\n") != 1 {
				t.Errorf("%s = %d %s, log %s", a.request, a.status, a.body, log.String())
			}
			for _, words := range strings.Split(c.has+"|"+id, "|") {
				if !strings.Contains(log.String(), words) {
					t.Errorf("no %q in %s", words, log.String())
				}
			}
			for _, words := range strings.Split(c.hasNot+"|"+testKey, "|") {
				if words != "" && strings.Contains(log.String(), words) {
					t.Errorf("%q in %s", words, log.String())
				}
			}
		}
	}, &log)
}

// TestLogWriter writes to a pipe that is read only after close.
func TestLogWriter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		log, start := newLogWriter(pw), time.Now()
		for range 5000 {
			fmt.Fprintln(log, "line")
		}
		log.close()
		if took := time.Since(start); took != time.Second {
			t.Errorf("close took %v, want 1s", took)
		}
		time.AfterFunc(time.Second, func() { pw.Close() })
		text := string(try(io.ReadAll(pr))(t))
		written, dropped := strings.Count(text, "line\n"), 0
		for _, report := range regexp.MustCompile(`level=WARN .* lines=(\d+)\n`).FindAllStringSubmatch(text, -1) {
			n, _ := strconv.Atoi(report[1])
			dropped += n
		}
		if written < 1024 || dropped == 0 || written+dropped != 5000 {
			t.Errorf("%d lines were written and %d reported as dropped, want 5000 in all: %.500s", written, dropped, text)
		}
	})
}

// TestStalledLogStopsNothing fills the pipe that is the log, or closes it at the other end.
func TestStalledLogStopsNothing(t *testing.T) {
	t.Parallel()
	for _, closed := range []bool{false, true} {
		s := newService(t)
		must(t, s.close())
		p := startProcess(t, command(t, execSelf, "-db", s.db))
		if closed {
			p.stderr.Close()
		}
		for range 100 {
			p.want(404, "GET", "/v1/pets/"+strings.Repeat("x", 8000))
		}
		p.want(201, "POST", "/v1/pets")
		want := 0
		if closed {
			p.cmd.Process.Signal(syscall.SIGTERM)
		} else { // a panic must end the program, although nobody reads the stack
			want = 2
			s.sqlite3("CREATE TRIGGER broken BEFORE INSERT ON pets BEGIN SELECT call('no function'); END")
			fetch(http.DefaultClient, "POST", p.url+"/v1/pets", rex)
		}
		p.cmd.Wait()
		if status := p.cmd.ProcessState.ExitCode(); status != want {
			t.Errorf("exit status %d, want %d", status, want)
		}
	}
}

// TestWithoutAKey starts the program without a key.
func TestWithoutAKey(t *testing.T) {
	t.Parallel()
	cmd := command(t, "unset API_KEYS; "+execSelf, "-db", ":memory:")
	cmd.Dir = t.TempDir()
	p := startProcess(t, cmd)
	key := regexp.MustCompile(`api_key=([A-Z2-7]{26})\n`).FindStringSubmatch(p.lines.String())
	if key == nil {
		t.Fatal(p.lines.String())
	}
	for sent, want := range map[string]int{key[1]: 200, testKey: 401} {
		if status, body, err := fetch(http.DefaultClient, "GET", p.url+"/v1/pets", "", "Authorization: Bearer "+sent); status != want {
			t.Errorf("with the key %s: %d %s %v, want %d", sent, status, body, err, want)
		}
	}
	db := filepath.Join(cmd.Dir, ":memory:")
	status, log := p.stop(syscall.SIGTERM)
	if status != 0 || strings.Count(log, key[1]) != 1 || !strings.Contains(log, "database="+db+" keys=1 ") ||
		!strings.Contains(log, `level=WARN msg="the database is new and empty" database=`+db) {
		t.Errorf("status %d, log %s", status, log)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	ts := httptest.NewTLSServer(nil)
	defer ts.Close()
	key := try(x509.MarshalPKCS8PrivateKey(ts.TLS.Certificates[0].PrivateKey))(t)
	pemFile := func(kind string, der []byte) string {
		return writeFile(t, t.TempDir(), "pem", string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
	}
	p := startProcess(t, command(t, execSelf,
		"-tls-cert", pemFile("CERTIFICATE", ts.Certificate().Raw), "-tls-key", pemFile("PRIVATE KEY", key)))
	transport := ts.Client().Transport.(*http.Transport).Clone()
	transport.TLSClientConfig.ServerName, transport.ForceAttemptHTTP2 = "example.com", true
	r, _ := http.NewRequest("GET", p.url+"/v1/pets", nil)
	setHeaders(r, nil)
	resp := try(transport.RoundTrip(r))(t)
	if a := checked(t, r, resp); a.status != 200 || resp.ProtoMajor != 1 {
		t.Errorf("got %d over HTTP/%d", a.status, resp.ProtoMajor)
	}
	transport.CloseIdleConnections()
	// The log must not repeat all that a client offers: here a hundred versions of TLS.
	io.WriteString(try(net.Dial("tcp", r.Host))(t), "\x16\x03\x01\x00\xfc\x01\x00\x00\xf8\x03\x03"+strings.Repeat("r", 32)+
		"\x00\x00\x02\x13\x01\x01\x00\x00\xcd\x00\x2b\x00\xc9\xc8"+strings.Repeat("\x7a\x7a", 100))
	if line := p.read(`level=WARN msg="http: TLS handshake error.*unsupported versions.*7a7a`)[0]; len(line) > 300 {
		t.Errorf("the log has a line of %d bytes: %s", len(line), line)
	}
}

// TestSettings runs the program with mistakes in the command line, in files and in the environment.
func TestSettings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string { return writeFile(t, dir, name, text) }
	foreign := func(name, statements string) string {
		s := &service{t: t, db: filepath.Join(dir, name)}
		s.sqlite3(statements)
		return s.db
	}
	ours := func(name, statements string) string {
		must(t, openService(t, filepath.Join(dir, name)).close())
		return foreign(name, statements)
	}
	taken := try(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer taken.Close()
	none, link := filepath.Join(dir, "none"), filepath.Join(dir, "link")
	must(t, os.Symlink("fine", link))
	moved, emptied := strings.TrimSuffix(file("moved-wal", "some log"), "-wal"), file("emptied", "\n")
	file("emptied-wal", "some log")
	newer, fine, readOnly := ours("newer", "PRAGMA user_version = 2"), ours("fine", ""), ours("read-only", "")
	damaged := ours("damaged", "INSERT INTO pets (name, category_id) VALUES ('x', 1)")
	must(t, exec.Command("sh", "-c", `printf y | dd of="$0" bs=1 seek=16383 conv=notrunc`, damaged).Run()) // in the index
	cut := ours("cut", "")
	must(t, os.Truncate(cut, 8192))
	must(t, exec.Command("sh", "-c", `printf '\3' | dd of="$0" bs=1 seek=18 conv=notrunc`, readOnly).Run()) // to a format that SQLite only reads
	type args []string
	for _, c := range []struct {
		args   args
		env    string
		status int
		words  string
	}{
		{args{"-h"}, "", 0, "listen on HOST:PORT (default \"127.0.0.1:8080\")"},
		{args{"-version"}, "", 0, "animalstore " + buildVersion() + "\n"},
		{args{"serve"}, "", 2, `unexpected argument "serve"`},
		{args{"-db", ""}, "", 2, "-db must not be empty"},
		{args{"-tls-cert", "x"}, "", 2, "give both or neither"},
		{args{"-tls-cert", none, "-tls-key", none}, "API_KEYS=k", 1, "no such file"},
		{args{"-addr", taken.Addr().String()}, "", 1, taken.Addr().String() + `": listen tcp `},
		{args{"-addr", ":0"}, "", 1, "set API_KEYS or -keys"},
		{args{}, "API_KEYS=", 1, "contain no API key"},
		{args{}, "API_KEYS=one, my secret", 1, "API_KEYS, item 2: an API key must consist of visible ASCII"},
		{args{"-keys", file("spaced", "# none\r\none\r\nmy secret\r\n")}, "API_KEYS=k", 1, `spaced", line 3: an API key must`},
		{args{"-keys", file("listed", "one,secret")}, "API_KEYS=k", 1, `listed", line 1: an API key must`},
		{args{"-addr", ":0", "-db", dir}, "API_KEYS=k", 1, `-db "` + dir + `": it is not a regular file`},
		{args{"-db", link}, "API_KEYS=k", 1, "name the file that it leads to"},
		{args{"-db", cut}, "API_KEYS=k", 1, "malformed (11): it is damaged: put a backup in with -restore"},
		{args{"-keys", none + "/a\nb"}, "", 1, `none/a\nb": open ` + none + "/a b: no such"},
		{args{"-db", moved}, "API_KEYS=k", 1, `moved-wal" is the write-ahead log of one`},
		{args{"-db", emptied}, "API_KEYS=k", 1, `emptied-wal" is the write-ahead log of one`},
		{args{"-db", ours("dump", "PRAGMA application_id = 0")}, "API_KEYS=k", 1, "its application_id is not 1348826227"},
		{args{"-db", file("text", "some text")}, "API_KEYS=k", 1, "file is not a database (26): it is damaged"},
		{args{"-db", foreign("foreign-wal", "PRAGMA journal_mode = WAL; CREATE TABLE t (x)")}, "API_KEYS=k", 1, "not a database of this service"},
		{args{"-db", newer}, "API_KEYS=k", 1, "a newer version"},
		{args{"-db", newer, "-backup", none}, "", 1, "a newer version"},
		{args{"-db", fine, "-backup", strings.TrimSuffix(file("stale-wal", ""), "-wal")}, "", 1, `stale-wal" exists already`},
		{args{"-backup", fine, "-restore", fine}, "", 2, "exclude each other"},
		{args{"-restore", fine}, "", 1, `new.db: no such file`},
		{args{"-db", fine, "-restore", link}, "", 1, "the backup is the database itself"},
		{args{"-db", emptied, "-restore", fine}, "", 1, "emptied\" is empty or not"},
		{args{"-db", foreign("theirs", "CREATE TABLE t (x)"), "-restore", fine}, "", 1, ": not a database of this service"},
		{args{"-db", filepath.Join(dir, "text"), "-restore", fine}, "", 1, "move its files elsewhere and copy a backup into their place"},
		{args{"-db", fine, "-restore", filepath.Join(dir, "theirs")}, "", 1, "the backup cannot be used: not a database of this service"},
		{args{"-db", fine, "-restore", damaged}, "", 1, fmt.Sprintf("-restore %q to -db %q: the backup cannot be used: ", damaged, fine)},
		{args{"-db", fine, "-restore", foreign("empty", "VACUUM")}, "", 1, "the backup cannot be used: "},
		{args{"-db", fine, "-restore", ours("no-pets", "DROP TABLE pets")}, "", 1, "no such table: pets"},
		{args{"-db", fine, "-restore", foreign("without tables", "PRAGMA application_id = 1348826227")}, "", 1, "the backup cannot be used: it is empty"},
		{args{"-db", readOnly}, "API_KEYS=k", 1, "attempt to write a readonly database"},
		{args{"-db", fine, "-backup", link}, "", 1, "exists already"},
		{args{"-db", fine, "-backup", none + "/copy"}, "", 1, `none/copy.`},
		{args{"-db", damaged, "-backup", none}, "", 1, "damaged"},
	} {
		args := append(args{"-addr", "localhost:0", "-db", filepath.Join(dir, "new.db")}, c.args...)
		name, value, _ := strings.Cut(c.env, "=")
		env := map[string]string{name: value}
		before := snapshot(t, dir)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // in case the service starts
		var stdout, stderr strings.Builder
		status := run(ctx, args, lookup(env), &stdout, &stderr)
		cancel()
		output, lines, other := stderr.String(), strings.Count(stderr.String(), "\n"), stdout.String()
		if c.status == 0 {
			output, lines, other = stdout.String(), 1, stderr.String()
		}
		if status != c.status || !strings.Contains(output, c.words) {
			t.Errorf("%q with %q: status %d, %q; want %d, %q", args, c.env, status, output, c.status, c.words)
		}
		if lines != 1 || other != "" || strings.Contains(output, "secret") {
			t.Errorf("%q: %q, want one line without a key, and nothing else: %q", args, output, other)
		}
		if after := snapshot(t, dir); after != before {
			t.Errorf("%q changed the files from\n%s to\n%s", args, before, after)
		}
	}
}

func TestBackup(t *testing.T) {
	s := parallelService(t)
	for range 100 {
		s.add("before", 1, "sold")
	}
	dir := t.TempDir()
	stop := repeat(4, func(int) { s.add("meanwhile", 1, "available") })
	s.wantRun(0, "", "-backup", filepath.Join(dir, "copy.db"))
	stop()
	if mode := try(os.Stat(filepath.Join(dir, "copy.db")))(t).Mode(); mode != 0o600 {
		t.Errorf("the mode of the backup is %v", mode)
	}
	before := snapshot(t, dir)
	s.wantRun(1, "exists already", "-backup", filepath.Join(dir, "copy.db"))
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if err := backup(interrupted, s.db, filepath.Join(dir, "other.db")); !errors.Is(err, context.Canceled) {
		t.Errorf("an interrupted backup ended with %v", err)
	}
	if after := snapshot(t, dir); after != before || strings.Count(after, "\n") != 1 {
		t.Errorf("the files were\n%s and are\n%s", before, after)
	}
	restored := openService(t, filepath.Join(dir, "copy.db"))
	restored.want(restored.do("GET", "/v1/pets?after=99&limit=1", ""), 200, `"id":100,"name":"before"`)
}

// TestRestoreUnderLoad replaces 300 animals while clients add others and list all. No page may have a mixture.
func TestRestoreUnderLoad(t *testing.T) {
	s := parallelService(t)
	s.addMany(300, "from the backup")
	must(t, backup(t.Context(), s.db, s.db+".copy"))
	stop := repeat(4, func(i int) {
		s.add("meanwhile", 1, "sold")
		body := s.do("GET", fmt.Sprint("/v1/pets?limit=100&after=", 50*i), "").body
		if backup, edited := strings.Count(body, "from the backup"), strings.Count(body, "edited"); backup+edited != 100 || backup*edited != 0 {
			t.Errorf("%d animals on one page are from the backup, and %d are edited", backup, edited)
		}
	})
	for range 3 {
		s.sqlite3("UPDATE pets SET name = 'edited' WHERE id <= 300")
		eventually(t, "the edit shows", func() bool { return strings.Contains(s.do("GET", "/v1/pets", "").body, "edited") })
		s.wantRun(0, "", "-restore", filepath.Base(s.db)+".copy")
		eventually(t, "the backup shows", func() bool { return strings.Contains(s.do("GET", "/v1/pets", "").body, "backup") })
	}
	stop()
	s.wantRun(0, "", "-restore", s.db+".copy")
	s.wantSQL("SELECT count(*) FROM pets", "300")
	s.wantSQL("SELECT max(seq) FROM sqlite_sequence", "300")
}

// askedContext is a context that calls err when it is asked for its error.
type askedContext struct {
	context.Context
	err func() error
}

func (c askedContext) Err() error { return c.err() }

// TestRestoreThatIsEnded interrupts a restore that waits for a lock, and kills others that have begun to write.
func TestRestoreThatIsEnded(t *testing.T) {
	s := parallelService(t)
	s.addMany(8000, strings.Repeat("x", 255))
	must(t, backup(t.Context(), s.db, s.db+".copy"))
	s.sqlite3("DELETE FROM pets WHERE id > 7")
	unlock := s.lock()
	interrupted := askedContext{t.Context(), func() error { return context.Canceled }}
	if err := restore(interrupted, s.db, s.db+".copy"); !errors.Is(err, context.Canceled) {
		t.Errorf("a restore that is interrupted while it waits for a lock ended with %v", err)
	}
	s.wantSQL("SELECT count(*) FROM pets", "7")
	unlocking := askedContext{t.Context(), func() error { sync.OnceFunc(unlock)(); return nil }}
	must(t, restore(unlocking, s.db, s.db+".copy"))
	s.wantSQL("SELECT count(*) FROM pets", "8000")
	for range 5 {
		s.sqlite3("DELETE FROM pets WHERE id > 7; PRAGMA wal_checkpoint(TRUNCATE)")
		p := spawn(t, command(t, execSelf, "-db", s.db, "-restore", s.db+".copy"))
		eventually(t, "the restore writes or has ended", func() bool {
			state, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
			return try(os.Stat(s.db+"-wal"))(t).Size() > 0 || strings.Contains(string(state), ") Z ")
		})
		p.stop(syscall.SIGKILL)
		if n := s.query("SELECT count(*) FROM pets"); n != "7" && n != "8000" {
			t.Errorf("%s animals are left, want 7 or 8000", n)
		}
		s.wantSQL("PRAGMA integrity_check", "ok")
		s.add("Rex", 7, "sold")
	}
}

// TestRestoreMends damages a database, also in the schema, and restores a backup into it.
func TestRestoreMends(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{
		"dd if=/dev/urandom of=$0 bs=4096 seek=1 count=99 conv=notrunc",
		"dd if=/dev/urandom of=$0 bs=1 seek=100 count=3996 conv=notrunc",
		"truncate -s 8192 $0",
	} {
		s := newService(t)
		for range 3 {
			s.add("Rex", 7, "sold")
		}
		must(t, backup(t.Context(), s.db, s.db+".copy"))
		s.add("Rex", 7, "sold")
		must(t, s.close())
		if out, err := exec.Command("sh", "-c", damage, s.db).CombinedOutput(); err != nil {
			t.Fatal(string(out))
		}
		must(t, restore(t.Context(), s.db, s.db+".copy"))
		s = openService(t, s.db)
		s.wantSQL("PRAGMA integrity_check", "ok")
		s.wantSQL("SELECT count(*) FROM pets", "3")
		s.add("Rex", 7, "sold")
	}
}

// FuzzRequests adds an animal with any body, which must read back as it was sent, and lists animals with any query.
func FuzzRequests(f *testing.F) {
	for _, body := range append(validBodies, rex, `{"name":"\ud83d","categoryId":1e2}`, `{"name":"x","name":"y"}`, "{\"name\":\"\xff\"}", `[]`) {
		f.Add("", []byte(body))
	}
	for _, query := range []string{"limit=5&status=sold&after=3", "limit=101", "a;b", "%zz", "limit=1&limit=1"} {
		f.Add(query, []byte("{}"))
	}
	handler := newService(f).server
	f.Fuzz(func(t *testing.T, query string, body []byte) {
		s := &service{t: t, server: handler}
		list := httptest.NewRequest("GET", "/v1/pets", nil)
		list.URL.RawQuery = query
		if a := s.doRequest(list); a.status != 200 && a.status != 400 {
			t.Errorf("%q = %d %s", query, a.status, a.body)
		}
		a := s.do("POST", "/v1/pets", string(body))
		if a.status == 400 || a.status == 413 && len(body) > 64<<10 {
			return
		}
		s.want(a, 201, "")
		if got := s.do("GET", a.header.Get("Location"), ""); got.body != a.body {
			t.Errorf("POST %q = %s, but it reads back as %s", body, a.body, got.body)
		}
		stored := try(parseJSON(a.body))(t)
		for name, value := range try(parseJSON(string(body)))(t).(map[string]any) {
			if at(stored, name) != value {
				t.Errorf("%q reads back as %s", body, a.body)
			}
		}
	})
}

// TestReadme checks that README.md has every flag, and a row for every code of an error.
func TestReadme(t *testing.T) {
	t.Parallel()
	readme := try(os.ReadFile("README.md"))(t)
	patterns := []string{fmt.Sprintf("1 to %d, default %d", maxLimit, defaultLimit), fmt.Sprintf("%d KiB of body", maxBody>>10)}
	for status, code := range errorCodes {
		patterns = append(patterns, fmt.Sprintf("(?m)^\\| [^|]*%d.*`%s`", status, code))
	}
	var usage strings.Builder
	run(t.Context(), []string{"-h"}, lookup(nil), &usage, io.Discard)
	for _, flag := range regexp.MustCompile(`(?m)^  -[a-z-]+`).FindAllString(usage.String(), -1) {
		patterns = append(patterns, "`"+strings.TrimSpace(flag))
	}
	for _, pattern := range patterns {
		if !regexp.MustCompile(pattern).Match(readme) {
			t.Errorf("README.md does not match %s", pattern)
		}
	}
}

// TestDocument compares openapi.json with the code. All other tests compare responses with openapi.json: see contractFaults.
func TestDocument(t *testing.T) {
	t.Parallel()
	name := at(document, "components", "schemas", "NewPet", "properties", "name", "pattern").(string)
	const int64Schema, status = `{"type": "integer", "format": "int64"}`, `{"$ref": "#/components/schemas/PetStatus"}`
	for part, want := range map[string]string{ // what outline returns
		"servers":                    `[{"url": "/"}]`,
		"security":                   `[{"bearerAuth": []}]`,
		"components securitySchemes": `{"bearerAuth": {"type": "http", "scheme": "bearer", "bearerFormat": "API key"}}`,
		"components schemas": fmt.Sprintf(`{
			"PetStatus": {"type": "string", "enum": %s},
			"NewPet": {"type": "object", "required": ["name", "categoryId"], "additionalProperties": false, "properties": {
				"name": {"type": "string", "minLength": 1, "maxLength": %d, "pattern": %s},
				"categoryId": `+int64Schema+`, "status": {"allOf": [`+status+`]}}},
			"Pet": {"type": "object", "required": ["id", "name", "categoryId", "status"], "properties": {
				"id": {"type": "integer", "format": "int64", "minimum": 1}, "name": {"type": "string"},
				"categoryId": `+int64Schema+`, "status": `+status+`}},
			"Pets": {"type": "array", "maxItems": %d, "items": {"$ref": "#/components/schemas/Pet"}},
			"Health": {"type": "object", "required": ["status"], "properties": {"status": {"type": "string", "enum": ["ok"]}}},
			"Error": {"type": "object", "required": ["code", "message", "status"], "properties": {"code": {"type": "string"},
				"message": {"type": "string"}, "status": {"type": "integer", "minimum": 400, "maximum": 599}}}}`,
			encode(petStatuses), maxName, encode(name), maxLimit),
		"paths": fmt.Sprintf(`{
			"/healthz": {"get": {"operationId": "getHealth", "security": [], "responses": ["200 Health", "503 Error Retry-After"]}},
			"/v1/pets": {
				"get": {"operationId": "listPets", "parameters": [
					{"in": "query", "name": "limit", "schema": {"type": "integer", "minimum": 1, "maximum": %d, "default": %d}},
					{"in": "query", "name": "status", "schema": `+status+`},
					{"in": "query", "name": "after", "schema": {"type": "integer", "format": "int64", "minimum": 0}}],
					"responses": ["200 Pets", "400 Error", "401 Error WWW-Authenticate", "500 Error", "503 Error Retry-After"]},
				"post": {"operationId": "createPet", "parameters": [{"in": "header", "name": "Idempotency-Key",
					"schema": {"type": "string", "minLength": 1, "maxLength": %d, "pattern": "^[!-~]+$"}}],
					"requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/NewPet"}}}},
					"responses": ["201 Pet Location", "400 Error", "401 Error WWW-Authenticate", "408 Error", "413 Error", "415 Error",
						"422 Error", "500 Error", "503 Error Retry-After"]}},
			"/v1/pets/{petId}": {"get": {"operationId": "getPet", "deprecated": true,
				"parameters": [{"in": "path", "name": "petId", "required": true, "schema": `+int64Schema+`}],
				"responses": ["200 Pet Deprecation Link Sunset", "401 Error Deprecation Link Sunset WWW-Authenticate",
					"404 Error Deprecation Link Sunset", "500 Error Deprecation Link Sunset", "503 Error Deprecation Link Retry-After Sunset"]}}}`,
			maxLimit, defaultLimit, maxIdempotencyKey),
	} {
		got, wanted := encode(outline(at(document, strings.Fields(part)...))), encode(try(parseJSON(want))(t))
		if !bytes.Equal(got, wanted) {
			t.Errorf("in openapi.json, %s is\n%swant\n%s", part, got, wanted)
		}
	}
	for _, fault := range exampleFaults(document["paths"], "") {
		t.Error(fault)
	}
	for c, pattern := rune(0), regexp.MustCompile(name); c <= 0xffff; c++ {
		for _, text := range []string{string(c), "x" + string(c), string(c) + " "} {
			if _, ok := parseName(bytes.TrimSpace(encode(text))); utf8.ValidRune(c) && ok != pattern.MatchString(text) {
				t.Errorf("the pattern of a name is wrong for %q", text)
			}
		}
	}
}

// document is openapi.json, decoded by TestMain.
var document map[string]any

// parseJSON parses JSON with all digits of its numbers.
func parseJSON(text string) (v any, err error) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	err = dec.Decode(&v)
	return v, err
}

// at returns the value at path in a part of openapi.json, or nil. It follows references, also one in an allOf.
func at(part any, path ...string) any {
	members, _ := part.(map[string]any)
	if all, ok := members["allOf"].([]any); ok {
		return at(all[0], path...)
	}
	if ref, ok := members["$ref"].(string); ok {
		return at(document, append(strings.Split(strings.TrimPrefix(ref, "#/"), "/"), path...)...)
	}
	if len(path) == 0 {
		return part
	}
	return at(members[path[0]], path[1:]...)
}

// outline returns a part of openapi.json without prose and examples. Of each response it leaves the status, the name of the schema
// and those of the required headers, without X-Request-Id, which contractFaults requires.
func outline(part any) any {
	kept := map[string]any{}
	switch part := part.(type) {
	default:
		return part
	case []any:
		list := slices.Clone(part)
		for i := range list {
			list[i] = outline(list[i])
		}
		return list
	case map[string]any:
		for name, member := range part {
			if !slices.Contains([]string{"description", "summary", "tags", "x-deprecated-reason", "example", "examples"}, name) {
				kept[name] = outline(member)
			}
		}
	}
	responses, _ := kept["responses"].(map[string]any)
	var lines []string
	for status, response := range responses {
		schema := at(response, "content", "application/json").(map[string]any)["schema"].(map[string]any)["$ref"].(string)
		var headers []string
		for name, header := range at(response, "headers").(map[string]any) {
			if at(header, "required") == true && name != "X-Request-Id" {
				headers = append(headers, name)
			}
		}
		slices.Sort(headers)
		lines = append(lines, strings.Join(append([]string{status, path.Base(schema)}, headers...), " "))
	}
	if slices.Sort(lines); responses != nil {
		kept["responses"] = lines
	}
	return kept
}

// exampleFaults returns how the examples in a part of openapi.json, or in what it refers to, differ from their schemas. status is
// that of the response which the part belongs to, if there is one: an example of an error has it, and the code for it.
func exampleFaults(part any, status string) (f faults) {
	check := func(example any, schema any) {
		f = append(f, schemaFaults(schema, example, "an example")...)
		n, _ := strconv.Atoi(status)
		isError := at(example, "code") != nil
		f.check(!isError || at(example, "code") == errorCodes[n] && fmt.Sprint(at(example, "status")) == status, "an example of %s is %v", status, example)
	}
	list, _ := at(part).([]any)
	for _, item := range list {
		f = append(f, exampleFaults(item, status)...)
	}
	members, _ := at(part).(map[string]any)
	for name, member := range members {
		switch name {
		case "example":
			check(member, members["schema"])
		case "examples":
			for _, example := range member.(map[string]any) {
				check(at(example, "value"), members["schema"])
			}
		case "schema":
		default:
			f = append(f, exampleFaults(member, cmp.Or(regexp.MustCompile(`^\d+$`).FindString(name), status))...)
		}
	}
	return f
}

// contractFaults returns how the response to a request differs from openapi.json and from the rules for all responses.
func contractFaults(r *http.Request, a reply) (f faults) {
	body, err := parseJSON(a.body)
	length, isHead := a.header.Get("Content-Length"), r.Method == "HEAD"
	f.check(isHead || err == nil && length == strconv.Itoa(len(a.body)), "the body of %s bytes is %q (%v)", length, a.body, err)
	f.check(!isHead || a.body == "" && length > "0", "the body is %q, and Content-Length %q", a.body, length)
	f.check(!strings.Contains(a.body, testKey), "the body contains the API key: %s", a.body)
	for name, want := range map[string]string{"Content-Type": "^application/json$", "Cache-Control": "^no-store$",
		"X-Content-Type-Options": "^nosniff$", "X-Request-Id": "^[A-Z2-7]{26}$"} {
		values := a.header[name]
		f.check(len(values) == 1 && regexp.MustCompile(want).MatchString(values[0]), "%s is %q", name, values)
	}
	if a.status >= 400 && body != nil {
		f = append(f, schemaFaults(at(document, "components", "schemas", "Error"), body, "the error")...)
		documented := at(document, "components", "schemas", "Error", "properties", "code", "description").(string)
		f.check(fmt.Sprint(at(body, "status")) == strconv.Itoa(a.status) && at(body, "code") == errorCodes[a.status] &&
			strings.Contains(documented, fmt.Sprintf("`%s` %d", errorCodes[a.status], a.status)), "the error is %s", a.body)
	}
	allowed := strings.HasSuffix(fmt.Sprint(at(body, "message")), " only "+a.header.Get("Allow"))
	f.check(allowed == (a.status == 405), "Allow is %q", a.header["Allow"])
	path := regexp.MustCompile(`^/v1/pets/[^/]+$`).ReplaceAllString(r.URL.Path, "/v1/pets/{petId}")
	operation := at(document, "paths", path, strings.ToLower(strings.Replace(r.Method, "HEAD", "GET", 1)))
	if operation == nil || r.URL.RawPath != "" { // RawPath is set if the encoding is unusual, such as %2F
		itself := r.URL.Path == "/openapi.json" && a.status == 200
		f.check(itself || slices.Contains([]int{401, 404, 405, 500}, a.status), "the operation is not documented")
		return f
	}
	secured := at(operation, "security") == nil
	f.check(r.Header.Get("Authorization") != "" || (a.status == 401) == secured, "the security is not as documented")
	response := at(operation, "responses", strconv.Itoa(a.status))
	headers, documented := at(response, "headers").(map[string]any)
	f.check(documented, "the status is not documented")
	for name, header := range headers {
		values := a.header.Values(name)
		f.check(len(values) == 1 || len(values) == 0 && at(header, "required") != true, "header %s is there %d times", name, len(values))
		for _, value := range values {
			var v any = value
			if at(header, "schema", "type") == "integer" {
				v = json.Number(value)
			}
			f = append(f, schemaFaults(at(header, "schema"), v, "header "+name)...)
		}
	}
	for _, name := range []string{"Link", "Location", "WWW-Authenticate", "Deprecation", "Sunset", "Retry-After", "Idempotency-Replayed", "Allow"} {
		f.check(headers[name] != nil || a.header.Values(name) == nil, "header %s is not documented", name)
	}
	if body != nil {
		f = append(f, schemaFaults(at(response, "content", "application/json", "schema"), body, "the body")...)
	}
	return f
}

// schemaFaults returns how a value differs from a schema. Members that the schema does not name are faults, too.
func schemaFaults(schema, v any, where string) (f faults) {
	check := func(ok bool, keyword string) {
		f.check(ok, "%s is %v, which breaks %s %v", where, v, keyword, at(schema, keyword))
	}
	enum, limited := at(schema, "enum").([]any)
	check(!limited || slices.Contains(enum, v), "enum")
	switch kind := at(schema, "type"); kind {
	case "string":
		text, ok := v.(string)
		pattern, _ := at(schema, "pattern").(string)
		check(ok && regexp.MustCompile(pattern).MatchString(text), "pattern")
	case "integer":
		_, isString := v.(string)
		n, err := strconv.ParseInt(fmt.Sprint(v), 10, 64)
		minimum, bounded := at(schema, "minimum").(float64)
		check(err == nil && !isString && (!bounded || float64(n) >= minimum), "minimum")
	case "array":
		items, ok := v.([]any)
		check(ok, "type")
		for i, item := range items {
			f = append(f, schemaFaults(at(schema, "items"), item, fmt.Sprintf("%s[%d]", where, i))...)
		}
	default:
		members, ok := v.(map[string]any)
		check(ok && kind == "object", "type")
		required, _ := at(schema, "required").([]any)
		for _, name := range required {
			check(members[name.(string)] != nil, "required")
		}
		for name, member := range members {
			f = append(f, schemaFaults(at(schema, "properties", name), member, where+"."+name)...)
		}
	}
	return f
}
