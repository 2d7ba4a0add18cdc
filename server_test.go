package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
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
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
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

	"modernc.org/sqlite"
)

// There are three kinds of tests. A new case belongs to the first kind that can show it.
//
// Most tests send requests to the handler of a service in this process, which has a database file
// of its own. SQL on that file plays the other programs:
//
//	s := newService(t)
//	execSQL(t, s.file, "INSERT INTO pets (name, category_id) VALUES ('Rex', 7)")
//	s.get("/v1/pets").want(t, 200, "Rex")
//
// Tests of time run that service under the fake clock of testing/synctest, with connections in
// memory:
//
//	withFakeClock(t, func(t *testing.T, s *service) {
//		ln, stop := s.serve(t)
//		defer stop()
//		conn := ln.dial("GET /v1/pets HTTP/1.1\r\n")
//		time.Sleep(6 * time.Second)
//	})
//
// Tests of kills, signals, disks and panics run the program as a process:
//
//	p := start(t, "-db", file)
//	p.add(t, "Rex", 7, "sold")
//	p.stop(syscall.SIGKILL)
//
// Beside these, wantRefused runs the program in this process until it ends, and a few tests call
// one function, such as TestKeys.
//
// Each reply is also checked against openapi.json: see checkReply. The helpers stand at the end
// of this file.

// TestMain runs the tests. In a process that a test has started, it runs the program instead.
func TestMain(m *testing.M) {
	registerHooks()
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // returns when the test process ends, even if it is killed
			os.Exit(1)
		}()
		main()
	}
	flag.Set("test.parallel", "8") // unless -parallel is given: most tests wait for something
	flag.Parse()
	os.Exit(m.Run())
}

// Paths, methods and API keys.

func TestPathsAndMethods(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add(t, "Rex", 7, "sold")

	for _, c := range []struct {
		methods string
		paths   string
		status  int
		allow   string // the Allow header
		open    bool   // no API key is needed
	}{
		{methods: "GET HEAD", paths: "/healthz /openapi.json", status: 200, open: true},
		{methods: "GET HEAD", paths: "/v1/pets /v1/pets/1", status: 200},
		{methods: "GET HEAD", paths: "/v1/pets/2 /v1/pets/x", status: 404},
		{
			methods: "POST PUT DELETE OPTIONS CONNECT",
			paths:   "/healthz /openapi.json /v1/pets/1 /v1/pets/2 /v1/pets/x",
			status:  405,
			allow:   "GET, HEAD",
		},
		{
			methods: "PUT PATCH DELETE OPTIONS TRACE CONNECT QUERY",
			paths:   "/v1/pets",
			status:  405,
			allow:   "GET, HEAD, POST",
		},
		{
			methods: "GET POST CONNECT",
			paths: "/ /v1 /pets /V1/pets /v1/pets/ /v1/pets/1/ /v1/pets/1/name //v1/pets /v1//pets /v1/./pets " +
				"/v1/../v1/pets /v1%2Fpets /v1/pets/%2F /v1/store/orders /metrics /debug/pprof/ /healthz/",
			status: 404,
		},
	} {
		for _, path := range strings.Fields(c.paths) {
			for _, method := range strings.Fields(c.methods) {
				s.do(method, path, rex).want(t, c.status).wantHeader(t, "Allow", c.allow)

				a := s.do(method, path, rex, "Authorization:")
				if c.open {
					a.want(t, c.status)
				} else {
					a.want(t, 401).wantHeader(t, "Allow", "")
				}
			}
		}
	}
}

func TestAPIKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add(t, "Rex", 7, "sold")

	const valid = "Authorization: Bearer " + testKey
	for _, headers := range [][]string{
		{valid}, {"Authorization: Bearer " + otherKey}, {"Authorization: bEARER " + testKey},
	} {
		s.get("/v1/pets", headers...).want(t, 200, "Rex") // and later it is in the cache
	}

	const missing, invalid = `Bearer realm="animalstore"`, `Bearer realm="animalstore", error="invalid_token"`
	for _, c := range []struct {
		headers   []string
		challenge string
	}{
		{headers: []string{"Authorization:"}, challenge: missing},
		{headers: []string{"Authorization: Basic " + testKey}, challenge: missing},
		{headers: []string{"Authorization: " + testKey}, challenge: missing},
		{headers: []string{"Authorization: Bearer  "}, challenge: missing},
		{headers: []string{valid, valid}, challenge: missing},
		{headers: []string{"Authorization: Bearer guess"}, challenge: invalid},
		{headers: []string{valid + "," + otherKey}, challenge: invalid},
	} {
		a := s.get("/v1/pets", c.headers...).want(t, 401, "Authorization: Bearer API_KEY", "GET /openapi.json")
		a.wantHeader(t, "WWW-Authenticate", c.challenge)
	}
}

// TestOrderOfFaults sends requests with several faults. Each row lacks the fault of the row above.
func TestOrderOfFaults(t *testing.T) {
	t.Parallel()
	s := newService(t)

	const guess, text, badKey = "Authorization: Bearer guess", "Content-Type: text/plain", "Idempotency-Key: a b"
	for _, c := range []struct {
		method, path string
		headers      []string
		status       int
		want         string
	}{
		{method: "PATCH", path: "/v1/dogs", headers: []string{guess, text, badKey}, status: 401},
		{method: "PATCH", path: "/v1/dogs", headers: []string{text, badKey}, status: 404},
		{method: "PATCH", path: "/v1/pets", headers: []string{text, badKey}, status: 405},
		{method: "POST", path: "/v1/pets", headers: []string{text, badKey}, status: 415},
		{method: "POST", path: "/v1/pets", headers: []string{badKey}, status: 400, want: "Idempotency-Key must be"},
		{method: "POST", path: "/v1/pets", status: 413},
	} {
		const size = 1 << 20
		body := strings.NewReader(strings.Repeat("x", size))

		s.send(newRequest(c.method, c.path, body, c.headers...)).want(t, c.status, c.want)

		most := 0 // bytes of the body that may be read
		if c.status == 413 {
			most = 2 * maxBody
		}
		if read := size - body.Len(); read > most {
			t.Fatalf("%s %s read %d bytes of the body, want at most %d", c.method, c.path, read, most)
		}
	}
}

func TestHeadIsGetWithoutABody(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add(t, "Rex", 7, "sold")
	s.add(t, "Tom", 8, "sold")

	for _, target := range []string{
		"/v1/pets?limit=1", "/v1/pets?limit=0", "/v1/pets/1", "/v1/pets/3", "/healthz", "/openapi.json", "/x",
	} {
		get := s.get(target)
		head := s.do("HEAD", target, "").want(t, get.StatusCode)

		get.Header.Del("X-Request-Id")
		head.Header.Del("X-Request-Id")
		if head.body != "" || !maps.EqualFunc(head.Header, get.Header, slices.Equal) {
			t.Fatalf("HEAD %s = %v %q, want %v and no body", target, head.Header, head.body, get.Header)
		}
	}
}

// TestReferences resolves the references in headers as a client does behind a proxy that strips /shop.
func TestReferences(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add(t, "Rex", 7, "sold")
	s.add(t, "Tom", 8, "sold")

	for _, c := range []struct {
		method, target string
		status         int
		header         string
		want           string // after https://example.com/shop
	}{
		{"GET", "/v1/pets?limit=1", 200, "Link", "/v1/pets?after=1&limit=1"},
		{"HEAD", "/v1/pets?limit=1", 200, "Link", "/v1/pets?after=1&limit=1"},
		{"POST", "/v1/pets", 201, "Location", "/v1/pets/3"},
		{"GET", "/v1/pets/1", 200, "Link", "/v1/pets"},
		{"HEAD", "/v1/pets/1", 200, "Link", "/v1/pets"},
		{"GET", "/v1/pets/99", 404, "Link", "/v1/pets"},
	} {
		a := s.do(c.method, c.target, rex).want(t, c.status)

		const proxy = "https://example.com/shop"
		var err error
		a.Request.URL, err = url.Parse(proxy + c.target)
		must(t, err)
		if got := a.reference(t, c.header); got != proxy+c.want {
			t.Fatalf("%s has a %s to %s, want %s", a.request, c.header, got, proxy+c.want)
		}
	}
}

func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	var log logBuffer
	srv := newServer(map[string]handler{
		"/panic": func(*request) (response, error) { panic("a mistake in the code") },
		"/":      unknownPath,
	}, slog.New(slog.NewTextHandler(&log, nil)))
	c := clientOf(srv)

	a := c.get("/panic").want(t, 500, `"internal error"`)
	c.get("/").want(t, 404)

	log.want(t, "level=ERROR", "status=500", `error="panic: a mistake in the code`, a.Header.Get("X-Request-Id"),
		"TestPanicInAHandler") // in the stack
}

// Lists and fetches.

func TestListPets(t *testing.T) {
	t.Parallel()
	s := newService(t)
	var all []Pet
	for i := range 45 {
		all = append(all, s.add(t, fmt.Sprint("animal ", i), int64(-i), petStatuses[i%3]))
	}

	for query, next := range map[string]string{ // to the query of the next page, "" for none
		"":                               "?after=20",
		"?limit=100":                     "",
		"?limit=45":                      "",
		"?limit=44":                      "?after=44&limit=44",
		"?after=0&limit=1":               "?after=1&limit=1",
		"?after=7&limit=2":               "?after=9&limit=2",
		"?after=44":                      "",
		"?after=45":                      "",
		"?after=9223372036854775807":     "",
		"?status=sold":                   "",
		"?status=sold&limit=15":          "",
		"?limit=14&status=sold":          "?after=42&limit=14&status=sold",
		"?after=42&limit=14&status=sold": "",
	} {
		link := ""
		if next != "" {
			link = "<pets" + next + `>; rel="next"`
		}
		want, _ := expectedPage(all, strings.TrimPrefix(query, "?"))
		for range 2 { // the second time from the cache
			a := s.get("/v1/pets"+query).want(t, 200)
			a.wantHeader(t, "Link", link)
			if got := decode[[]Pet](t, a); got == nil || !slices.Equal(got, want) {
				t.Fatalf("%s = %v, want %v", a.request, got, want)
			}
		}
	}
}

func TestInvalidListParameters(t *testing.T) {
	t.Parallel()
	s := newService(t)

	const (
		limitRule = "limit must be an integer from 1 to 100"
		afterRule = "after must be the last id of a page, an integer from 0 to 9223372036854775807"
		malformed = "the query string is malformed"
	)
	long := strings.Repeat("x", 5000)
	for _, c := range []struct{ query, message string }{
		{query: "limit=0", message: limitRule},
		{query: "limit=101", message: limitRule},
		{query: "limit=9223372036854775808", message: limitRule},
		{query: "limit=4294967301", message: limitRule}, // 5 in 32 bits
		{query: "limit=%2B5", message: limitRule},
		{query: "limit=05", message: limitRule},
		{query: "limit=", message: limitRule},
		{query: "status=Sold", message: statusRule},
		{query: "status=", message: statusRule},
		{query: "after=-1", message: afterRule},
		{query: "after=007", message: afterRule},
		{query: "limit=5&limit=5", message: `\"limit\" must not be repeated`},
		{query: "colour=red", message: `unknown parameter \"colour\"`},
		{query: "Limit=5", message: `unknown parameter \"Limit\"`},
		{query: "limit=5;after=1", message: malformed},
		{query: "status=%zz", message: malformed},
		{query: "limit=0&status=x&foo=1", message: `unknown parameter \"foo\"; ` + limitRule + "; " + statusRule},
		{query: long, message: `unknown parameter \"` + long[:64] + `\"`},
	} {
		s.get("/v1/pets?"+c.query).want(t, 400, `"message":"`+c.message+`"`)
	}

	// Of many faults, ten are listed.
	s.get("/v1/pets?a&b&c&d&e&f&g&h&i&j").want(t, 400, `unknown parameter \"j\""`)
	s.get("/v1/pets?a&b&c&d&e&f&g&h&i&j&k").want(t, 400, `unknown parameter \"j\"; and 1 more"`)
}

// TestWalk follows the links from page to page, while animals are added and deleted.
func TestWalk(t *testing.T) {
	t.Parallel()
	s := newService(t)
	var want []int64
	for i := range 30 {
		if p := s.add(t, "Rex", 7, petStatuses[i%3]); p.Status == "sold" {
			want = append(want, p.ID)
		}
	}

	var got []int64
	for next := "/v1/pets?limit=4&status=sold"; next != ""; {
		a := s.get(next).want(t, 200)
		for _, p := range decode[[]Pet](t, a) {
			got = append(got, p.ID)
		}
		next = a.reference(t, "Link")

		s.add(t, "late", 7, "sold")
		execSQL(t, s.file, "DELETE FROM pets WHERE id = ?", got[0]) // pages by number would shift
	}

	late := len(got) - len(want)
	once := slices.IsSorted(got) && len(slices.Compact(slices.Clone(got))) == len(got)
	if late < 1 || !slices.Equal(got[:len(want)], want) || !once {
		t.Fatalf("a walk lists %v, want %v and late ones, each once", got, want)
	}
}

func TestGetPet(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add(t, "Rex", 7, "pending")
	execSQL(t, s.file, `INSERT INTO pets (id, name, category_id)
		VALUES (3, 'Tom', 8), (9223372036854775807, 'Max', 9)`)

	for range 2 { // the second time from the cache
		for id, want := range map[string]string{
			"1":                   `{"id":1,"name":"Rex","categoryId":7,"status":"pending"}`,
			"3":                   `{"id":3,"name":"Tom","categoryId":8,"status":"available"}`,
			"9223372036854775807": "Max",
		} {
			wantDeprecated(t, s.get("/v1/pets/"+id).want(t, 200, want))
		}
	}
	for _, id := range []string{
		"2", "0", "-1", "-9223372036854775808", "9223372036854775808", "01", "+1", "-0", "1.0", "%201", "Rex",
	} {
		wantDeprecated(t, s.get("/v1/pets/"+id).want(t, 404))
	}
	wantDeprecated(t, s.do("HEAD", "/v1/pets/1", "").want(t, 200))
	wantDeprecated(t, s.get("/v1/pets/1", "Authorization:").want(t, 401))
	execSQL(t, s.file, "DROP TABLE pets")
	wantDeprecated(t, s.get("/v1/pets/2").want(t, 500))
}

// wantDeprecated checks the headers of the deprecated operation.
func wantDeprecated(t *testing.T, a reply) {
	t.Helper()
	a.wantHeader(t, "Deprecation", "@1795132800") // 20 November 2026
	a.wantHeader(t, "Sunset", "Thu, 05 Dec 2030 00:00:00 GMT")
	a.wantHeader(t, "Link", `<../pets>; rel="successor-version"`)
}

func TestIgnoredPartsOfRequests(t *testing.T) {
	t.Parallel()
	s := newService(t)
	headers := []string{"Accept: text/html", "Content-Type: text/plain", "If-None-Match: *", "Range: bytes=0-3"}

	s.do("POST", "/v1/pets?limit=x&a;b&%zz", rex).want(t, 201)
	s.get("/v1/pets/1?limit=x&a;b&%zz").want(t, 200, "Rex")
	s.do("GET", "/v1/pets", "a body", headers...).want(t, 200, "Rex")
}

// TestFailedReads fails more reads than there are connections. One that is not given back would be
// missing later.
func TestFailedReads(t *testing.T) {
	t.Parallel()
	const failsAtTheSecondAnimal = `ALTER TABLE pets RENAME TO old;
		CREATE VIEW pets AS SELECT id, name, abs(category_id) AS category_id, status FROM old`
	const hasNoNumbers = `ALTER TABLE pets RENAME TO old;
		CREATE VIEW pets AS SELECT id, name, 'none' AS category_id, status FROM old`
	for _, c := range []struct {
		target string
		damage string // SQL
		status int
	}{
		{target: "/v1/pets", damage: "DROP TABLE pets", status: 500},
		{target: "/v1/pets", damage: failsAtTheSecondAnimal, status: 500},
		{target: "/v1/pets?status=sold", damage: hasNoNumbers, status: 500},
		{target: "/v1/pets/1", damage: "DROP TABLE pets", status: 500},
		{target: "/healthz", damage: "DROP TABLE pets", status: 503},
	} {
		t.Run(c.target+" "+c.damage, func(t *testing.T) {
			s := newService(t)
			s.add(t, "Rex", 7, "sold")
			s.add(t, "Tom", -9223372036854775808, "sold") // abs fails
			execSQL(t, s.file, c.damage)

			for range 20 {
				s.get(c.target).want(t, c.status)
			}
			s.log.want(t, "level=ERROR")

			execSQL(t, s.file, `DROP VIEW IF EXISTS pets; DROP TABLE IF EXISTS old;
				CREATE TABLE pets (id INTEGER PRIMARY KEY, name, category_id, status);
				INSERT INTO pets VALUES (1, 'Max', 9, 'sold')`)
			hang := time.AfterFunc(10*time.Second, func() { panic("failed reads have kept all connections") })
			defer hang.Stop()
			s.get(c.target).want(t, 200)
		})
	}
}

// The cache.

// TestCreatesShowAtOnce lists animals all the time while they are added. A list that begins after a
// 201 must have the animal, whatever other requests have put into the cache meanwhile.
func TestCreatesShowAtOnce(t *testing.T) {
	t.Parallel()
	s := newService(t)
	var stopped atomic.Bool
	readers := startTogether(4, func(int) (a reply) {
		for a.fault == "" && !stopped.Load() {
			a = s.get("/v1/pets?limit=100")
		}
		return a
	})

	for range 50 {
		p := s.add(t, "Rex", 7, "sold")
		s.get("/v1/pets?limit=100").want(t, 200, fmt.Sprintf(`"id":%d,`, p.ID))
		s.get("/v1/pets?status=sold&limit=100").want(t, 200, fmt.Sprintf(`"id":%d,`, p.ID))
	}
	stopped.Store(true)
	for _, a := range readers() {
		a.want(t, 200)
	}
}

// TestCache adds an animal during each of two reads. What these return must not be found later.
func TestCache(t *testing.T) {
	t.Parallel()
	s := newService(t)
	a := &api{store: s.store}
	reads := 0
	list := a.cached(func(*request) (response, error) {
		if reads++; reads <= 2 {
			s.add(t, "Rex", 7, "sold")
		}
		return response{body: []byte{byte(reads)}}, nil
	})
	r := &request{Request: httptest.NewRequest("GET", "/v1/pets", nil)}

	for _, want := range []byte{1, 2, 3, 3, 3} {
		resp, err := list(r)
		must(t, err)
		if resp.body[0] != want {
			t.Fatalf("a list has the response of read %d, want that of %d", resp.body[0], want)
		}
	}
}

// TestCacheIsBounded keeps many responses, of which the cache must forget most, but not the last. Then
// it must keep some again.
func TestCacheIsBounded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		responses int
		uri, body int // bytes of each
		least     int // responses that must be kept
		most      int // responses that may be kept
	}{
		{responses: 100, uri: 1 << 20, body: 1, least: 1, most: 9},
		{responses: 100, uri: 1, body: 1 << 20, least: 1, most: 9},
		{responses: 100_000, uri: 3, body: 3, least: 1000, most: 30_000},
	} {
		uri, body := strings.Repeat("x", c.uri), make([]byte, c.body)
		keyOf := func(i int) cacheKey { return cacheKey{generation: 1, uri: strconv.Itoa(i) + uri} }
		var responses cache
		var clients sync.WaitGroup // without a lock, they would collide
		for range 4 {
			clients.Go(func() {
				for i := range c.responses {
					responses.put(keyOf(i), response{body: body})
					responses.get(keyOf(0))
				}
			})
		}
		clients.Wait()

		kept, last := 0, false
		for i := range c.responses {
			if _, last = responses.get(keyOf(i)); last {
				kept++
			}
		}
		if !last || kept < c.least || kept > c.most {
			t.Fatalf("of %d responses of %d bytes, %d are kept, the last: %v; want %d to %d, and the last",
				c.responses, c.uri+c.body, kept, last, c.least, c.most)
		}
	}
}

// Creates.

// Rules in the messages about an animal.
const (
	nameRule = "name must be a string of 1 to 255 characters, not all white space, " +
		"without U+0000, U+FFFD or unpaired surrogates"
	categoryRule = "categoryId must be an integer from -9223372036854775808 to 9223372036854775807, " +
		"with no fraction, exponent or quotes"
	statusRule = "status must be one of available, pending, sold"
)

// validBodies are unusual, but accepted.
var validBodies = []string{
	`{"name":"Rex","categoryId":7}`,
	" {\r\n\t\"status\" : \"sold\" , \"categoryId\" : -1 , \"name\" : \" a b \" } \r\n\t",
	`{"name":"<&>","categoryId":0,"status":"pending"}`,
	`{"n\u0061me":"\"\\\/\b\f\n\r\t","categoryId":1}`,
	`{"name":"}]:,{[\"\\","categoryId":-9223372036854775808}`,
	`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`,
	`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":0,"status":"available"}`,
}

func TestCreatePet(t *testing.T) {
	t.Parallel()
	s := newService(t)

	for i, body := range validBodies {
		a := s.post(body).want(t, 201)

		wantSent(t, a, body)
		a.wantHeader(t, "Location", fmt.Sprint("pets/", i+1))
		wantReplayed(t, a, false)
		s.get(a.reference(t, "Location")).want(t, 200, a.body)
	}
	s.get("/v1/pets/1").want(t, 200, `{"id":1,"name":"Rex","categoryId":7,"status":"available"}`+"\n")
	s.get("/v1/pets/3").want(t, 200, `"<&>"`) // and not escaped for HTML

	execSQL(t, s.file, "DELETE FROM pets")
	next := fmt.Sprintf(`"id":%d,`, len(validBodies)+1)
	s.post(rex).want(t, 201, next) // no id is used again
}

// wantSent checks that the response to a create has the animal that body describes.
func wantSent(t *testing.T, a reply, body string) {
	t.Helper()
	sent, _ := parseJSON(body).(map[string]any)
	if sent["status"] == nil {
		sent["status"] = "available"
	}
	got, _ := parseJSON(a.body).(map[string]any)
	delete(got, "id")
	if !maps.Equal(got, sent) {
		t.Fatalf("%s = %s, want the animal that was sent", a.request, a.body)
	}
}

func TestInvalidBodies(t *testing.T) {
	t.Parallel()
	s := newService(t)

	const objectRule = "the body must be one JSON object"
	long := strings.Repeat("é", 256)
	for _, c := range []struct{ body, message string }{
		{body: "", message: objectRule},
		{body: "null", message: objectRule},
		{body: `{"name":"x","categoryId":1 `, message: objectRule},
		{body: `{"name":"x","categoryId":1,}`, message: objectRule},
		{body: rex + "{}", message: objectRule},
		{body: "{\"name\":\"\xff\",\"categoryId\":1}", message: "the body must be UTF-8"},

		{body: `{"name":null,"categoryId":1}`, message: nameRule},
		{body: `{"name":1,"categoryId":1}`, message: nameRule},
		{body: `{"name":"","categoryId":1}`, message: nameRule},
		{body: `{"name":" \u00a0\u2003\u3000\u0085","categoryId":1}`, message: nameRule},
		{body: `{"name":"a\u0000b","categoryId":1}`, message: nameRule},
		{body: `{"name":"a\uFFFDb","categoryId":1}`, message: nameRule},
		{body: `{"name":"\uD83D","categoryId":1}`, message: nameRule}, // half a surrogate pair
		{body: `{"name":"` + long + `","categoryId":1}`, message: nameRule},

		{body: `{"name":"x","categoryId":null}`, message: categoryRule},
		{body: `{"name":"x","categoryId":"1"}`, message: categoryRule},
		{body: `{"name":"x","categoryId":1.0}`, message: categoryRule},
		{body: `{"name":"x","categoryId":1e2}`, message: categoryRule},
		{body: `{"name":"x","categoryId":-0}`, message: categoryRule},
		{body: `{"name":"x","categoryId":9223372036854775808}`, message: categoryRule},

		{body: `{"name":"x","categoryId":1,"status":null}`, message: statusRule},
		{body: `{"name":"x","categoryId":1,"status":"Sold"}`, message: statusRule},

		{body: `{}`, message: "name is required; categoryId is required"},
		{body: `{"name":"x"}`, message: "categoryId is required"},
		{body: `{"name":"x","categoryId":1,"id":5}`, message: `unknown member \"id\"`},
		{body: `{"Name":"x","categoryId":1}`, message: `unknown member \"Name\"; name is required`},
		{body: `{"name":"x","n\u0061me":"y","categoryId":1}`, message: `\"name\" must not be repeated`},
		{
			body:    `{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`,
			message: statusRule + "; " + nameRule + `; unknown member \"x\"; ` + categoryRule,
		},
		{body: `{"name":"x","categoryId":1,"` + long + `":1}`, message: `unknown member \"` + long[:128] + `\"`},
	} {
		s.post(c.body).want(t, 400, `"message":"`+c.message)
	}
	s.get("/v1/pets").want(t, 200, "[]")
}

func TestContentType(t *testing.T) {
	t.Parallel()
	s := newService(t)

	s.post(rex).want(t, 201)
	for _, accepted := range []string{
		"application/json", "Application/JSON", `application/json;charset="utf-16"`,
	} {
		s.post(rex, "Content-Type: "+accepted).want(t, 201)
	}

	const rule = `"Content-Type must be application/json, not \"`
	for _, refused := range []string{"text/plain", "", "application/json; x"} {
		s.post(rex, "Content-Type: "+refused).want(t, 415, rule+refused+`\""`)
	}
	long := "application/json" + strings.Repeat("x", 99)
	s.post(rex, "Content-Type: "+long).want(t, 415, rule+long[:64]+`\""`)
	s.post(rex, "Content-Type: application/json", "Content-Type: application/json").want(t, 415, rule)
}

func TestSizeOfABody(t *testing.T) {
	t.Parallel()
	s := newService(t)
	largest := rex + strings.Repeat(" ", 64<<10-len(rex))

	s.post(largest).want(t, 201)
	s.post(largest+" ").want(t, 413)

	chunked := io.MultiReader(strings.NewReader(largest), strings.NewReader(" "))
	s.send(newRequest("POST", "/v1/pets", chunked)).want(t, 413)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "1")
}

func TestInterruptedBody(t *testing.T) {
	t.Parallel()
	s := newService(t)

	for _, received := range []string{"", `{"name":`, rex} {
		body := io.MultiReader(strings.NewReader(received), iotest.ErrReader(io.ErrUnexpectedEOF))
		a := s.send(newRequest("POST", "/v1/pets", body))
		a.want(t, 400, "the request body could not be read to its end")
	}
	s.get("/v1/pets").want(t, 200, "[]")
}

// TestClientThatIsGone sends requests whose context has ended, as net/http does for a client that
// has closed its connection.
func TestClientThatIsGone(t *testing.T) {
	t.Parallel()
	s := newService(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	create := newRequest("POST", "/v1/pets", strings.NewReader(rex))
	s.send(create.WithContext(gone)).want(t, 201)
	s.send(newRequest("GET", "/v1/pets", nil).WithContext(gone)).want(t, 200, "Rex")
}

// TestWaitingCreatesShareCommits adds animals to a locked database.
func TestWaitingCreatesShareCommits(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const animals = 80
	before := fileSize(s.file + "-wal")

	for _, a := range createWhileLocked(t, s.file, animals, func(int) reply { return s.post(rex) }) {
		a.want(t, 201)
	}

	wantSQL(t, s.file, "SELECT count(*) FROM pets", strconv.Itoa(animals))
	const ownCommits = animals * 3 * 4096 // bytes: a commit for each animal would write 3 pages
	if grown := fileSize(s.file+"-wal") - before; grown > ownCommits/2 {
		t.Fatalf("the write-ahead log has grown by %d bytes, want at most %d", grown, ownCommits/2)
	}
}

// TestRefusedCreates adds animals that a rule of the operator refuses together with others, which
// must be stored.
func TestRefusedCreates(t *testing.T) {
	t.Parallel()
	const (
		refused  = `"a rule in the database of the shop refuses this animal"`
		internal = `"internal error"`

		onPets = "CREATE TRIGGER rule AFTER INSERT ON pets WHEN new.category_id = 13 BEGIN "
		before = "CREATE TRIGGER rule BEFORE INSERT ON pets WHEN new.category_id = 13 BEGIN "
		onKeys = "CREATE TRIGGER rule BEFORE INSERT ON idempotency_keys WHEN new.category_id = 13 BEGIN "
		unique = `CREATE UNIQUE INDEX rule ON pets (category_id) WHERE category_id = 13;
			INSERT INTO pets (name, category_id) VALUES ('Zoe', 13)`
		ids = "CREATE TABLE ids (id INTEGER PRIMARY KEY); "
	)
	for _, c := range []struct {
		rule    string // SQL: refuses the animals of category 13
		status  int
		message string
		cause   string // in the log
	}{
		{rule: unique, status: 400, message: refused, cause: "UNIQUE constraint failed"},
		{rule: onPets + "SELECT RAISE(ABORT, 'no cats'); END", status: 400, message: refused, cause: "no cats"},
		{rule: onPets + "SELECT RAISE(ROLLBACK, 'no cats'); END", status: 400, message: refused, cause: "no cats"},
		{rule: before + "SELECT RAISE(IGNORE); END", status: 400, message: refused, cause: "a trigger left it out"},
		{rule: onKeys + "SELECT RAISE(ABORT, 'no cats'); END", status: 400, message: refused, cause: "no cats"},
		{rule: onKeys + "SELECT RAISE(IGNORE); END", status: 400, message: refused, cause: "a trigger left it out"},
		{rule: onPets + "SELECT abs(-9223372036854775808); END", status: 500, message: internal, cause: "overflow"},
		{rule: ids + onPets + "INSERT INTO ids VALUES ('x'); END", status: 500, message: internal, cause: "mismatch"},
	} {
		t.Run(c.rule, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			execSQL(t, s.file, c.rule)

			const others = "20"
			replies := createWhileLocked(t, s.file, 40, func(i int) reply {
				return s.post([]string{rex, zoe}[i%2], fmt.Sprint("Idempotency-Key: ", i))
			})
			for i, a := range replies {
				if i%2 == 0 {
					a.want(t, 201)
				} else {
					a.want(t, c.status, c.message)
				}
			}

			s.log.want(t, c.cause)
			wantSQL(t, s.file, "SELECT count(*) FROM pets WHERE name = 'Rex'", others)
			wantSQL(t, s.file, "SELECT count(*) FROM pets JOIN idempotency_keys USING (id, name)", others)
			wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", others)

			execSQL(t, s.file, "DROP TRIGGER IF EXISTS rule; DROP INDEX IF EXISTS rule")
			wantReplayed(t, s.post(zoe, "Idempotency-Key: 1").want(t, 201), false) // not used up
		})
	}
}

// TestStoreAll stores batches in which a rule refuses each Zoe. The others must get the next ids, in
// their order.
func TestStoreAll(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, `CREATE TRIGGER rule BEFORE INSERT ON pets WHEN new.name = 'Zoe'
		BEGIN SELECT RAISE(ROLLBACK, 'no cats'); END`)

	id := int64(0)
	for _, names := range []string{
		"Rex", "Zoe", "Rex Zoe", "Zoe Rex", "Zoe Zoe Zoe", "Zoe Rex Rex Rex Zoe Zoe Rex", "Rex Rex Rex",
	} {
		creations := newCreations(names)
		s.store.storeAll(creations, time.Now())

		for i, c := range creations {
			switch {
			case c.pet.Name == "Zoe":
				if !errors.Is(c.result.err, errRefused) {
					t.Fatalf("in %q, number %d got %+v, want %v", names, i, c.result, errRefused)
				}
			default:
				id++
				if want := (Pet{id, c.pet}); c.result.pet != want || c.result.err != nil {
					t.Fatalf("in %q, number %d got %+v, want %+v", names, i, c.result, want)
				}
			}
		}
	}
	wantSQL(t, s.file, "SELECT max(id) FROM pets WHERE name = 'Rex'", fmt.Sprint(id))
}

// newCreations returns creations of animals with these names.
func newCreations(names string) (creations []*creation) {
	for name := range strings.FieldsSeq(names) {
		creations = append(creations, &creation{pet: NewPet{Name: name, CategoryID: 7, Status: "sold"}})
	}
	return creations
}

// TestStoreAllEndsInTime stores a batch that a slow rule refuses in part. It must not be tried again for
// long, because each transaction could wait for a lock.
func TestStoreAllEndsInTime(t *testing.T) {
	for _, c := range []struct {
		seconds int // that the rule takes
		names   string
		want    error // for each Rex
	}{
		{seconds: 1, names: "Rex Zoe", want: nil},
		{seconds: 3, names: "Rex Zoe Rex Zoe Rex", want: errUnavailable},
	} {
		t.Run(c.names, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				execSQL(t, s.file, fmt.Sprintf(`CREATE TRIGGER rule BEFORE INSERT ON pets
					WHEN new.name = 'Zoe' BEGIN SELECT sleep(%d), RAISE(ABORT, 'no cats'); END`, c.seconds))
				creations := newCreations(c.names)

				s.store.storeAll(creations, time.Now())

				for i, created := range creations {
					if err := created.result.err; created.pet.Name == "Rex" && !errors.Is(err, c.want) {
						t.Fatalf("number %d got %v, want %v", i, err, c.want)
					}
				}
			})
		})
	}
}

// Idempotency.

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := newService(t)
	first := s.post(rex, "Idempotency-Key: k").want(t, 201)
	wantReplayed(t, first, false)

	for _, meanwhile := range []string{ // SQL
		"SELECT 1", "UPDATE pets SET name = 'edited', status = 'sold'", "DELETE FROM pets",
	} {
		execSQL(t, s.file, meanwhile)
		must(t, s.close())
		s = openService(t, s.file) // the keys survive a restart

		for _, same := range []string{rex, `{ "status":"available", "categoryId":7, "name":"\u0052ex" }`} {
			again := s.post(same, "Idempotency-Key: k").want(t, 201, first.body)
			again.wantHeader(t, "Location", first.Header.Get("Location"))
			wantReplayed(t, again, true)
		}
	}
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "0")
}

// wantReplayed checks whether a response says that it repeats an earlier one.
func wantReplayed(t *testing.T, a reply, want bool) {
	t.Helper()
	if got := slices.Equal(a.Header["Idempotency-Replayed"], []string{"true"}); got != want {
		t.Fatalf("%s = %d with Idempotency-Replayed %q", a.request, a.StatusCode, a.Header["Idempotency-Replayed"])
	}
}

func TestIdempotencyKeyOfAnotherAnimal(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.post(`{"name":1}`, "Idempotency-Key: k").want(t, 400) // uses up no key
	first := s.post(rex, "Idempotency-Key: k").want(t, 201)

	for _, other := range []string{
		`{"name":"rex","categoryId":7}`,
		`{"name":"Rex","categoryId":8}`,
		`{"name":"Rex","categoryId":7,"status":"sold"}`,
	} {
		a := s.post(other, "Idempotency-Key: k").want(t, 422)
		a.wantHeader(t, "Location", "")
		wantReplayed(t, a, false)
	}
	s.post(`{"name":1}`, "Idempotency-Key: k").want(t, 400) // and not 422
	s.post(rex, "Idempotency-Key: k").want(t, 201, first.body)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "1")
}

func TestIdempotencyKeysAreApart(t *testing.T) {
	t.Parallel()
	s := newService(t)
	first := s.post(rex, "Idempotency-Key: k").want(t, 201)

	for _, headers := range [][]string{
		{}, {}, {"Idempotency-Key: k2"}, {"Idempotency-Key: K"},
		{"Idempotency-Key: k", "Authorization: Bearer " + otherKey},
	} {
		wantReplayed(t, s.post(rex, headers...).want(t, 201), false)
	}
	wantReplayed(t, s.post(rex, "Idempotency-Key: k").want(t, 201, first.body), true)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "6")
}

func TestInvalidIdempotencyKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const rule = "Idempotency-Key must be one value of 1 to 255 visible ASCII characters"
	longest := "!" + strings.Repeat("~", 254)

	s.post(rex, "Idempotency-Key: "+longest).want(t, 201)
	for _, invalid := range []string{longest + "~", "", "a b", "\x7f", "é"} {
		s.post(rex, "Idempotency-Key: "+invalid).want(t, 400, rule)
	}
	s.post(rex, "Idempotency-Key: a", "Idempotency-Key: a").want(t, 400, rule)
}

// TestIdempotencyKeysExpire checks that a key is remembered for 24 hours, and that each create
// with a key deletes two that have expired.
func TestIdempotencyKeysExpire(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		s.post(rex, "Idempotency-Key: "+key).want(t, 201)
	}
	age := func(d time.Duration) {
		execSQL(t, s.file, "UPDATE idempotency_keys SET created = created - ?", int(d.Seconds()))
	}

	age(24*time.Hour - time.Minute)
	wantReplayed(t, s.post(rex, "Idempotency-Key: a").want(t, 201), true)
	age(2 * time.Minute)
	second := s.post(rex, "Idempotency-Key: a").want(t, 201)
	wantReplayed(t, second, false)
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "3") // a, and two that have expired

	s.post(rex, "Idempotency-Key: new").want(t, 201)
	wantSQL(t, s.file, "SELECT group_concat(key ORDER BY key) FROM idempotency_keys", "a,new")
	wantReplayed(t, s.post(rex, "Idempotency-Key: a").want(t, 201, second.body), true)
}

// TestSameIdempotencyKeyAtOnce sends several requests with each Idempotency-Key at the same moment:
// three with Rex, and one with Zoe.
func TestSameIdempotencyKeyAtOnce(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const keys = 20
	animals := []string{rex, rex, rex, zoe}
	replies := createWhileLocked(t, s.file, keys*len(animals), func(i int) reply {
		return s.post(animals[i%len(animals)], fmt.Sprint("Idempotency-Key: ", i/len(animals)))
	})

	for ofOneKey := range slices.Chunk(replies, len(animals)) {
		var got []string
		for _, a := range ofOneKey {
			got = append(got, fmt.Sprint(a.want(t, a.StatusCode).StatusCode, a.Header["Idempotency-Replayed"]))
		}
		slices.Sort(got)
		rexWasFirst := slices.Equal(got, []string{"201 []", "201 [true]", "201 [true]", "422 []"})
		zoeWasFirst := slices.Equal(got, []string{"201 []", "422 []", "422 []", "422 []"})
		if !rexWasFirst && !zoeWasFirst {
			t.Fatalf("%s and the others got %v", ofOneKey[0].request, got)
		}
	}
	wantSQL(t, s.file, "SELECT count(*) FROM pets", strconv.Itoa(keys))
}

// The log.

func TestLogOfARequest(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("x", 1024)
	const fingerprint = "key_sha256=62af8704" // printf %s test-key | sha256sum

	for _, c := range []struct {
		request string
		headers []string
		want    string // the line, after the id
	}{
		{
			request: "GET /v1/pets?after=7",
			headers: []string{"X-Request-Id: mine"},
			want:    "method=GET path=/v1/pets status=200 bytes=3 duration=D " + fingerprint,
		},
		{
			request: "GET /v1/pets?limit=0",
			want: "method=GET path=/v1/pets status=400 bytes=91 duration=D " + fingerprint +
				` error="limit must be an integer from 1 to 100"`,
		},
		{
			request: "HEAD /v1/pets",
			headers: []string{"Authorization: Bearer guess"},
			want: `method=HEAD path=/v1/pets status=401 bytes=0 duration=D error="a valid API key is required, ` +
				`in one header Authorization: Bearer API_KEY; GET /openapi.json describes this interface"`,
		},
		{
			request: long + "y /" + long + "y",
			want: "method=" + long + " path=/" + long[1:] + " status=404 bytes=76 duration=D " + fingerprint +
				` error="there is nothing at this path"`,
		},
	} {
		before := s.log.String()
		method, target, _ := strings.Cut(c.request, " ")
		a := s.do(method, target, "", c.headers...)

		want := "level=INFO msg=request id=" + a.Header.Get("X-Request-Id") + " client=192.0.2.1:1234 " + c.want
		got := strings.TrimSuffix(strings.TrimPrefix(s.log.String(), before), "\n")
		_, got, _ = strings.Cut(got, " ") // after the time
		got = regexp.MustCompile(`duration=[0-9.µm]+s`).ReplaceAllString(got, "duration=D")
		if got != want {
			t.Fatalf("%s logged\n%s, want\n%s", a.request, got, want)
		}
	}
}

// TestLogOfNetHTTP expects that the lines of net/http, which a stranger can make very long, are
// cut, and that a panic is an error.
func TestLogOfNetHTTP(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		strings.Repeat("x", 64<<10) + "\n":  "level=INFO msg=" + strings.Repeat("x", 1024) + "\n",
		"http: panic serving x: y\nstack\n": `level=ERROR msg="http: panic serving x: y\nstack"` + "\n",
	} {
		var log logBuffer
		io.WriteString(httpLog{slog.New(slog.NewTextHandler(&log, nil))}, line)
		log.want(t, want)
	}
}

// Settings.

func TestKeys(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		list     string // API_KEYS
		file     string
		accepted []string
		refused  []string
	}{
		{
			list:     " four, #five ,,one\n",
			accepted: []string{"four", "#five", "one"},
			refused:  []string{"", ",", "five", "four, #five"},
		},
		{
			file:     "# old, older\n  one \n\n\ttwo\t\n\t# oldest\nthree#3",
			accepted: []string{"one", "two", "three#3"},
			refused:  []string{"", "old", "# oldest", "oldest", "three"},
		},
		{ // with the line breaks and the byte order mark of Windows
			file:     "\ufeff# none\r\none\r\n\r\ntwo\r\n",
			accepted: []string{"one", "two"},
			refused:  []string{"", "none", "# none"},
		},
		{
			list:     "both,new",
			file:     "old\nboth\n",
			accepted: []string{"old", "both", "new"},
			refused:  []string{"", "old,both"},
		},
		{list: " ,", file: "one", accepted: []string{"one"}, refused: []string{"", ","}},
	} {
		k, err := loadKeys(c.list, true, writeFile(t, "keys", c.file))
		must(t, err)
		for _, key := range slices.Concat(c.accepted, c.refused) {
			want := slices.Contains(c.accepted, key)
			if got := k[sha256.Sum256([]byte(key))]; got != want {
				t.Fatalf("API_KEYS=%q with the file %q accepts %q: %v, want %v", c.list, c.file, key, got, want)
			}
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	t.Parallel()

	status, help, stderr := runProgram(t, noKey, "-h")
	flags := regexp.MustCompile(`(?m)^  -\S+ ?\S*`).FindAllString(help, -1)
	want := "[  -addr HOST:PORT   -backup FILE   -db FILE   -keys FILE   -restore FILE   -tls-cert FILE   -tls-key FILE   -version]"
	if status != 0 || fmt.Sprint(flags) != want || stderr != "" {
		t.Fatalf("animalstore -h = %d, %s, %s, want 0 and %s", status, flags, stderr, want)
	}

	status, version, stderr := runProgram(t, noKey, "-version")
	form := regexp.MustCompile(`^animalstore (v\S+|\(devel\)) go1\S+\n$`)
	if !form.MatchString(version) || status != 0 || stderr != "" {
		t.Fatalf("animalstore -version = %d, %s, %s, want 0 and the version", status, version, stderr)
	}
}

func TestMistakesInTheCommandLine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const pair = "-tls-cert and -tls-key go together"
	for _, c := range []refusal{
		{args: []string{"a\nb"}, want: `unexpected argument "a\nb"`},
		{args: []string{"-api-key", testKey}, want: "not defined: -api-key"},
		{args: []string{"-addr"}, want: "needs an argument: -addr"},
		{args: []string{"-addr", ""}, want: "-addr must not be empty"},
		{args: []string{"-db", ""}, want: "-db must not be empty"},
		{args: []string{"-keys", ""}, want: "-keys must not be empty"},
		{args: []string{"-tls-cert", ""}, want: "-tls-cert must not be empty"},
		{args: []string{"-tls-key", ""}, want: "-tls-key must not be empty"},
		{args: []string{"-backup", ""}, want: "-backup must not be empty"},
		{args: []string{"-restore", ""}, want: "-restore must not be empty"},
		{args: []string{"-backup", "x", "-restore", "y"}, want: "-backup and -restore exclude each other"},
		{args: []string{"-tls-cert", "x"}, want: pair},
		{args: []string{"-tls-key", "x"}, want: pair},
	} {
		c.status = 2
		wantRefused(t, dir, c)
	}
}

func TestMistakesInTheKeys(t *testing.T) {
	t.Parallel()
	const (
		none    = "API_KEYS and -keys contain no API key"
		invalid = "an API key must consist of visible ASCII characters"
	)
	dir := t.TempDir()
	comments := writeFile(t, "keys", "# "+testKey+"\n\n  \r\n")
	comma := writeFile(t, "keys", "# none\r\none\r\ntwo,"+testKey+"\r\n")
	for _, c := range []refusal{
		{env: env{"API_KEYS": ""}, want: none},
		{env: env{"API_KEYS": " ,"}, want: none},
		{env: env{"API_KEYS": "one, my " + testKey}, want: "API_KEYS, item 2: " + invalid},
		{env: env{"API_KEYS": ",,é" + testKey}, want: "API_KEYS, item 3: " + invalid},
		{args: []string{"-keys", dir + "/none"}, want: "no such file"},
		{args: []string{"-keys", comments}, env: noKey, want: none},
		{args: []string{"-keys", comma}, want: `keys": line 3: ` + invalid},
	} {
		wantRefused(t, dir, c)
	}
}

func TestMistakesInOtherSettings(t *testing.T) {
	t.Parallel()
	cert, key, _ := newCertificate(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	inUse := taken.Addr().String()

	dir := t.TempDir()
	missing := dir + "/none/animals.db"
	const needsKey = "set API_KEYS or -keys"
	for _, c := range []refusal{
		{args: []string{"-addr", ":0"}, env: noKey, want: needsKey},
		{args: []string{"-addr", networkAddress(t)}, env: noKey, want: needsKey},
		{args: []string{"-addr", inUse}, want: `-addr "` + inUse + `": listen tcp `},
		{args: []string{"-tls-cert", key, "-tls-key", cert}, want: "-tls-cert and -tls-key: tls: "},
		{
			args: []string{"-db", missing},
			want: `-db "` + missing + `": unable to open database file (14): it must be a file in an existing folder`,
		},
	} {
		wantRefused(t, dir, c)
	}
}

// networkAddress returns an address at which other machines may reach this one, with port 0, or
// that of all addresses if there is none.
func networkAddress(t *testing.T) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	must(t, err)
	for _, a := range addrs {
		if ip := a.(*net.IPNet).IP; ip.To4() != nil && !ip.IsLoopback() {
			return ip.String() + ":0"
		}
	}
	return ":0"
}

// The database file.

func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		":memory:", "file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", "ä\n", "a;b", `"'`,
	} {
		dir := t.TempDir()

		s := openService(t, filepath.Join(dir, name))

		s.add(t, "Rex", 7, "sold")
		must(t, s.close())
		wantFiles(t, dir, name)
		wantSQL(t, s.file, "SELECT count(*) FROM pets", "1")
	}
}

// TestDatabaseBehindALink names a link as the database. SQLite follows it.
func TestDatabaseBehindALink(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 1)
	dir := filepath.Dir(file)
	link := filepath.Join(t.TempDir(), "link.db")
	target, err := filepath.Rel(filepath.Dir(link), file)
	must(t, err)
	must(t, os.Symlink(target, link))

	s := openService(t, link)
	s.post(rex).want(t, 201)
	must(t, s.close())
	wantSQL(t, file, "SELECT count(*) FROM pets", "2")

	shell(t, dir, "mv animals.db animals.db-wal")
	wantRefused(t, dir, refusal{args: []string{"-db", link}, want: "animals.db: no such file or directory"})
	shell(t, dir, ": >animals.db")
	wantRefused(t, dir, refusal{args: []string{"-db", link}, want: "is the write-ahead log of one"})
}

// TestEmptyFile opens files that SQLite takes for an empty database.
func TestEmptyFile(t *testing.T) {
	t.Parallel()
	const warning = `level=WARN msg="the database is new and empty"`
	for _, content := range []string{"", "x"} {
		file := writeFile(t, "animals.db", content)
		s := openService(t, file)
		s.log.want(t, warning)
		s.add(t, "Rex", 7, "sold")
		must(t, s.close())

		openService(t, file).log.wantNot(t, warning)
	}
}

// TestRefusedDatabases expects that a file which is not a database of this service is refused, and
// stays as it is: by a start, and as the source of a backup.
func TestRefusedDatabases(t *testing.T) {
	t.Parallel()
	const (
		damaged = "it is damaged, or not an SQLite database: check the path, or restore a backup"
		foreign = "not a database of this service: its application_id is 0"
		orphan  = `animals.db-wal" is the write-ahead log of one`
	)
	for _, c := range []struct {
		shell string // changes animals.db, a database of this service
		sql   string // goes on with that
		want  string
	}{
		{shell: "echo some text >animals.db", want: "file is not a database (26): " + damaged},
		{shell: "truncate -s 8192 animals.db", want: "malformed (11): " + damaged},
		{shell: "rm animals.db; mkdir animals.db", want: "unable to open database file (14): it must be a file"},
		{shell: "rm animals.db", sql: "PRAGMA journal_mode = WAL; CREATE TABLE t (x)", want: foreign},
		{sql: "PRAGMA application_id = 0", want: foreign},
		{sql: "PRAGMA user_version = 99", want: "a newer version of this service has written it"},
		{shell: "mv animals.db animals.db-wal", want: orphan},
		{shell: "mv animals.db animals.db-wal; : >animals.db", want: orphan},
		{shell: "mv animals.db animals.db-wal; echo >animals.db", want: orphan}, // one byte

		// SQLite only reads this format. For root, no permissions make a file read-only.
		{
			shell: `printf '\3' | dd of=animals.db bs=1 seek=18 conv=notrunc`,
			want:  "attempt to write a readonly database (8): it must be a file",
		},
	} {
		t.Run(c.shell+" "+c.sql, func(t *testing.T) {
			file := newDatabase(t, 1)
			dir := filepath.Dir(file)
			shell(t, dir, c.shell)
			if c.sql != "" {
				execSQL(t, file, c.sql)
			}

			wantRefused(t, dir, refusal{want: c.want})
			if !strings.Contains(c.want, "readonly") {
				wantRefused(t, dir, refusal{args: []string{"-backup", dir + "/copy.db"}, want: c.want})
			}
		})
	}
}

// TestPragmas lets a trigger tell the settings of the connection on which the service adds animals.
func TestPragmas(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, `CREATE TABLE settings (text);
		CREATE TRIGGER tell AFTER INSERT ON pets BEGIN
			INSERT INTO settings SELECT 'synchronous ' || synchronous FROM pragma_synchronous;
			INSERT INTO settings SELECT 'fullfsync ' || fullfsync FROM pragma_fullfsync;
			INSERT INTO settings SELECT 'at checkpoints ' || checkpoint_fullfsync FROM pragma_checkpoint_fullfsync;
			INSERT INTO settings SELECT 'busy ' || timeout FROM pragma_busy_timeout;
			INSERT INTO settings SELECT 'limit ' || journal_size_limit FROM pragma_journal_size_limit;
		END`)

	s.add(t, "Rex", 7, "sold")

	wantSQL(t, s.file, "SELECT group_concat(text, ', ') FROM settings",
		"synchronous 2, fullfsync 1, at checkpoints 1, busy 5000, limit 64000000") // 2 is FULL
	wantSQL(t, s.file, "PRAGMA journal_mode", "wal")
	wantSQL(t, s.file, "PRAGMA application_id", "1348826227") // "Pets"
}

// TestSchema checks that the schema has the rules of the handlers, for edits by other programs.
func TestSchema(t *testing.T) {
	t.Parallel()
	s := newService(t)
	db := connect(t, s.file)
	longest := strings.Repeat("é", maxName)

	for _, status := range petStatuses {
		execSQL(t, s.file, "INSERT INTO pets (name, category_id, status) VALUES (?, 1, ?)", longest, status)
	}
	for _, edit := range []string{
		"INSERT INTO pets (name, category_id) VALUES ('" + longest + "é', 1)",
		"UPDATE pets SET name = ''",
		"UPDATE pets SET name = NULL",
		"UPDATE pets SET name = x'00'",
		"UPDATE pets SET category_id = 1.5",
		"UPDATE pets SET category_id = NULL",
		"UPDATE pets SET status = 'lost'",
		"UPDATE pets SET status = NULL",
		"INSERT INTO pets (id, name, category_id) VALUES (0, 'x', 1)",
	} {
		if _, err := db.Exec(edit); err == nil {
			t.Fatalf("%.60s is allowed", edit)
		}
	}
	s.get("/v1/pets").want(t, 200, `[{"id":1,`, `"status":"sold"}]`)
}

// countRuns is a migration that cannot run twice, and that counts how often it has changed an
// animal. It ends in a comment, as a migration may.
const countRuns = `ALTER TABLE pets ADD COLUMN age INTEGER;
	UPDATE pets SET category_id = category_id + 1 -- a comment`

func TestMigration(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 3)
	newer := append(slices.Clone(migrations), countRuns)

	// Several processes may start at once, and each has its own connection.
	errs := make([]error, 4)
	var migrated sync.WaitGroup
	for i := range errs {
		migrated.Go(func() {
			pool := openPool(file, "rwc", 1)
			errs[i] = errors.Join(migrate(pool, newer), pool.Close())
		})
	}
	migrated.Wait()

	must(t, errors.Join(errs...))
	wantSQL(t, file, "PRAGMA user_version", strconv.Itoa(len(newer)))
	wantSQL(t, file, "SELECT group_concat(category_id) FROM pets", "8,8,8")
}

func TestMigrationThatFails(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 3)
	pool := openPool(file, "rwc", 1)
	defer pool.Close()

	err := migrate(pool, append(slices.Clone(migrations), countRuns, "DROP TABLE dogs"))

	if err == nil || !strings.Contains(err.Error(), "no such table: dogs") {
		t.Fatalf("migrate = %v, want no such table", err)
	}
	wantSQL(t, file, "PRAGMA user_version", strconv.Itoa(len(migrations)))
	openService(t, file).get("/v1/pets").want(t, 200, `"id":3,"name":"Rex","categoryId":7`)
}

func TestFullDatabase(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 1)
	onConnect(file, "PRAGMA max_page_count = 20")
	s := openService(t, file)
	large := string(encode(NewPet{Name: strings.Repeat("x", 200), Status: "sold"}))

	created := 0
	for ; s.post(large, fmt.Sprint("Idempotency-Key: ", created)).StatusCode == 201; created++ {
	}

	s.post(large).want(t, 503)
	s.get("/v1/pets?limit=1").want(t, 200, "Rex")
	s.get("/healthz").want(t, 200)
	must(t, s.close())
	wantSQL(t, file, "SELECT count(*) FROM pets", strconv.Itoa(1+created))

	onConnect(file, "")
	s = openService(t, file)
	a := s.post(large, fmt.Sprint("Idempotency-Key: ", created)).want(t, 201)
	wantReplayed(t, a, false) // the key of a failed create is not used up
}

func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 1)
	onConnect(file, "PRAGMA busy_timeout = 50") // milliseconds, not to wait for 5 seconds
	s := openService(t, file)

	whileLocked(t, file, func() {
		s.post(rex).want(t, 503)
		s.log.want(t, "level=ERROR", "database is locked")
		s.get("/v1/pets?limit=2").want(t, 200, "Rex")
		s.get("/healthz").want(t, 200)
	})

	wantSQL(t, file, "SELECT count(*) FROM pets", "1")
	s.post(rex).want(t, 201)
}

// Time: these tests run under a fake clock.

func TestEditsShowWithinASecond(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add(t, "old", 7, "sold")
		time.Sleep(time.Minute + time.Millisecond) // a quiet spell that ends after a look
		targets := []string{"/v1/pets", "/v1/pets?status=sold", "/v1/pets/1"}
		for _, target := range targets {
			s.get(target).want(t, 200, "old")
		}

		execSQL(t, s.file, "UPDATE pets SET name = 'new'")
		for _, target := range targets {
			s.get(target).want(t, 200, "old") // from the cache
		}

		time.Sleep(time.Second)
		for _, target := range targets {
			s.get(target).want(t, 200, "new")
		}
	})
}

func TestConnectionsAreClosed(t *testing.T) {
	for _, c := range []struct {
		name  string
		sent  string
		later string // is sent every second
		want  time.Duration
	}{
		{name: "nothing is sent", want: 5 * time.Second},
		{name: "a part of the headers is sent", sent: "GET /v1/pets HT", want: 5 * time.Second},
		{name: "the headers come slowly", sent: "GET / HTTP/1.1\r\n", later: "X: x\r\n", want: 5 * time.Second},
		{name: "the body comes slowly", sent: rawCreate, later: " ", want: 10 * time.Second},
		{name: "no request follows a response", sent: rawList, want: 150 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serve(t)
				defer stop()
				start := time.Now()

				conn := ln.dial(c.sent)
				go func() {
					for err := error(nil); err == nil && c.later != ""; _, err = io.WriteString(conn, c.later) {
						time.Sleep(time.Second)
					}
				}()
				io.Copy(io.Discard, conn)

				if took := time.Since(start); took != c.want {
					t.Fatalf("the connection was closed after %v, want %v", took, c.want)
				}
			})
		})
	}
}

func TestResponseThatIsNotRead(t *testing.T) {
	for wait, whole := range map[time.Duration]bool{24 * time.Second: true, 26 * time.Second: false} {
		t.Run(wait.String(), func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serve(t)
				defer stop()
				conn := ln.dial("GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

				time.Sleep(wait)
				response, _ := io.ReadAll(conn)

				if got := bytes.HasSuffix(response, openAPI); got != whole {
					t.Fatalf("the response of %d bytes is whole: %v, want %v", len(response), got, whole)
				}
			})
		})
	}
}

func TestRawRequests(t *testing.T) {
	header := func(size int) string {
		return "GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", size) + "\r\n\r\n"
	}
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		defer stop()

		receive(ln.dial(rawCreate+`{"name":`), "POST", "/v1/pets").want(t, 408, "within 10 seconds")
		receive(ln.dial("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"), "OPTIONS", "*").want(t, 401)
		receive(ln.dial(header(15<<10)), "GET", "/healthz").want(t, 200)

		got, _ := io.ReadAll(ln.dial(header(17 << 10)))
		if !bytes.HasPrefix(got, []byte("HTTP/1.1 431 ")) {
			t.Fatalf("a request with 17 KiB of headers got %s, want 431", got)
		}
	})
}

// TestRefusalsBeforeTheBody refuses requests whose connections are closed after the response. What
// such a client sends must be read, or a reset could overtake the response.
func TestRefusalsBeforeTheBody(t *testing.T) {
	for _, c := range []struct {
		name   string
		first  string // line of the request
		header string
		sent   int  // bytes of the body
		size   int  // that the request announces
		read   bool // all that is sent is read
	}{
		{"it closes the connection", "POST /v1/pets HTTP/1.1", "Connection: close\r\n", 200 << 10, 200 << 10, true},
		{"it speaks HTTP/1.0", "POST /v1/pets HTTP/1.0", "", 200 << 10, 200 << 10, true},
		{"it has another path", "PUT /x HTTP/1.1", "Connection: close\r\n", 200 << 10, 200 << 10, true},
		{"it sends too much", "POST /v1/pets HTTP/1.0", "", 300 << 10, 300 << 10, false},
		{"it announces too much", "POST /v1/pets HTTP/1.0", "", 0, 300 << 10, true},
		{"it waits for 100 Continue", "POST /v1/pets HTTP/1.1", "Connection: close\r\nExpect: 100-continue\r\n", 0, 9, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serve(t)
				defer stop()
				start := time.Now()
				conn := ln.dial("")
				sent := make(chan error, 1)
				go func() {
					_, err := fmt.Fprintf(conn, "%s\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s",
						c.first, c.header, c.size, strings.Repeat(" ", c.sent))
					sent <- err
				}()

				receive(conn, "POST", "/x").want(t, 401)

				if err := <-sent; (err == nil) != c.read {
					t.Fatalf("the request was sent with the error %v, want none: %v", err, c.read)
				}
				if took := time.Since(start); took > time.Second {
					t.Fatalf("the response took %v, want it at once", took)
				}
			})
		})
	}
}

// Stops, under the fake clock. A stop takes at least 250 milliseconds, in which requests are
// accepted.

func TestStopClosesIdleConnections(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		conn := ln.dial(rawList)
		if receive(conn, "GET", "/v1/pets").want(t, 200).Close {
			t.Fatal("a response before the stop has Connection: close")
		}

		wantStop(t, s, stop, 250*time.Millisecond, func() {
			io.Copy(io.Discard, conn) // hangs unless the service closes the connection
		})
	})
}

func TestRequestOnAnIdleConnectionDuringAStop(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		conn := ln.dial(rawList)
		receive(conn, "GET", "/v1/pets").want(t, 200)

		meanwhile := func() {
			time.Sleep(200 * time.Millisecond)
			io.WriteString(conn, rawList)
			if !receive(conn, "GET", "/v1/pets").want(t, 200).Close {
				t.Fatal("a response during the stop has no Connection: close")
			}
		}
		wantStop(t, s, stop, 250*time.Millisecond, meanwhile)
	})
}

func TestNewConnectionDuringAStop(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)

		meanwhile := func() {
			time.Sleep(200 * time.Millisecond)
			receive(ln.dial(rawList), "GET", "/v1/pets").want(t, 200)
		}
		wantStop(t, s, stop, 250*time.Millisecond, meanwhile)
	})
}

func TestRequestInProgressDuringAStop(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		conn := ln.dial(rawCreate)

		meanwhile := func() {
			time.Sleep(4 * time.Second)
			io.WriteString(conn, rex)
			receive(conn, "POST", "/v1/pets").want(t, 201)
		}
		wantStop(t, s, stop, 4*time.Second, meanwhile)
	})
}

func TestRequestThatDoesNotEndDuringAStop(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		conn := ln.dial(rawCreate)
		start := time.Now()

		stop()
		io.Copy(io.Discard, conn)

		if took := time.Since(start); took != 6250*time.Millisecond {
			t.Fatalf("the connection was closed after %v, want 6.25s", took)
		}
		s.log.want(t, `level=WARN msg="connections were cut off"`)
	})
}

// TestSilentConnectionDuringAStop opens a connection and sends nothing, as browsers do.
func TestSilentConnectionDuringAStop(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		ln.dial("")

		wantStop(t, s, stop, 5*time.Second, func() {})
	})
}

// TestStopRefusesLateConnections holds a request, so that the stop goes on, and waits until the
// service accepts no connections any more.
func TestStopRefusesLateConnections(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serve(t)
		ln.dial(rawCreate)
		start := time.Now()

		stopped := make(chan struct{})
		go func() {
			stop()
			close(stopped)
		}()
		<-ln.closed

		if took := time.Since(start); took != 250*time.Millisecond {
			t.Fatalf("the service accepted connections for %v, want 250ms", took)
		}
		<-stopped
	})
}

// wantStop stops a service, and calls meanwhile. It checks how long the stop takes, and that no
// connection is cut off. To notice the end of a request may take net/http 600 ms more.
func wantStop(t *testing.T, s *service, stop func(), want time.Duration, meanwhile func()) {
	t.Helper()
	start := time.Now()
	stopped := make(chan time.Duration, 1)
	go func() {
		stop()
		stopped <- time.Since(start)
	}()
	meanwhile()
	if took := <-stopped; took < want || took > want+600*time.Millisecond {
		t.Fatalf("the stop took %v, want %v", took, want)
	}
	s.log.wantNot(t, "cut off")
}

func TestBrokenListenerEndsTheService(t *testing.T) {
	t.Parallel()
	s := newService(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, ln.Close())

	if err := s.server.serve(t.Context(), ln); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("serve = %v, want %v", err, net.ErrClosed)
	}
}

// Processes: settings, signals, panics.

// TestSettingsOfAProcess checks that the real settings reach the service.
func TestSettingsOfAProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keysFile := writeFile(t, "keys", "filed-key\n")

	p := start(t, "-addr", "0.0.0.0:0", "-db", dir+"/:memory:", "-keys", keysFile)

	p.get("/v1/pets").want(t, 200) // with testKey
	p.get("/v1/pets", "Authorization: Bearer filed-key").want(t, 200)
	p.get("/v1/pets", "Authorization: Bearer "+otherKey).want(t, 401)
	p.log.want(t,
		`level=WARN msg="the database is new and empty" database=`+dir+"/:memory:\n",
		" database="+dir+"/:memory: keys=2 version=",
	)
	p.log.wantNot(t, testKey, "filed-key", "api_key")
	p.stop(syscall.SIGTERM)
	wantFiles(t, dir, ":memory:")
}

func TestRelativeNameOfADatabase(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := command(t, withKey, "-db", "relative.db")
	cmd.Dir = dir
	p := startCommand(t, cmd)
	p.post(rex).want(t, 201)
	p.log.want(t, " database="+dir+"/relative.db ")
	wantSQL(t, dir+"/relative.db", "SELECT count(*) FROM pets", "1")
}

// TestNotifySocket plays systemd, which a unit with Type=notify makes wait for READY=1.
func TestNotifySocket(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	must(t, err)
	defer systemd.Close()

	p := startCommand(t, command(t, env{"API_KEYS": testKey, "NOTIFY_SOCKET": socket}))

	must(t, systemd.SetReadDeadline(time.Now().Add(10*time.Second)))
	message := make([]byte, 100)
	n, err := systemd.Read(message)
	if string(message[:n]) != "READY=1" || err != nil {
		t.Fatalf("systemd was told %q, %v, want READY=1", message[:n], err)
	}
	p.get("/v1/pets").want(t, 200)

	wantRefused(t, t.TempDir(), refusal{
		args: []string{"-db", "/none/animals.db"},
		env:  env{"API_KEYS": testKey, "NOTIFY_SOCKET": socket},
		want: "unable to open database file",
	})
	must(t, systemd.SetReadDeadline(time.Now()))
	if n, err := systemd.Read(message); err == nil {
		t.Fatalf("after a start that failed, systemd was told %q", message[:n])
	}

	p = startCommand(t, command(t, env{"API_KEYS": testKey, "NOTIFY_SOCKET": socket + "-missing"}))
	p.get("/v1/pets").want(t, 200)
	p.log.await(t, `level=WARN msg="systemd was not told that the service is ready"`)
}

func TestServiceWithoutAKeyMakesOne(t *testing.T) {
	t.Parallel()
	made := map[string]bool{}
	for range 2 {
		p := startCommand(t, command(t, noKey))
		key := p.log.await(t, ` api_key=([A-Z2-7]{26})\n`)[1]
		made[key] = true
		p.get("/v1/pets", "Authorization: Bearer "+key).want(t, 200)
		p.get("/v1/pets", "Authorization:").want(t, 401)
		if count := strings.Count(p.log.String(), key); count != 1 {
			t.Fatalf("the log has the key %d times, want once: %s", count, &p.log)
		}
	}
	if len(made) != 2 {
		t.Fatal("two starts made the same key")
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	cert, key, trusting := newCertificate(t)
	p := start(t, "-tls-cert", cert, "-tls-key", key)
	p.roundTrip = trusting.RoundTrip // which would use HTTP/2, too

	a := p.post(rex).want(t, 201)

	if !strings.HasPrefix(p.url, "https://") || a.Proto != "HTTP/1.1" {
		t.Fatalf("POST %s was answered over %s, want https and HTTP/1.1", p.url, a.Proto)
	}
	old := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}
	if _, err := tls.Dial("tcp", strings.TrimPrefix(p.url, "https://"), old); err == nil {
		t.Fatal("a client connects with TLS 1.1")
	}
	p.log.await(t, `level=INFO msg="http: TLS handshake error from .*"\n`)
}

// TestLogThatNobodyReads closes the other end of the pipe to which the program logs.
func TestLogThatNobodyReads(t *testing.T) {
	t.Parallel()
	p := start(t)
	p.stderr.Close()

	p.post(rex).want(t, 201)
	p.get("/v1/pets").want(t, 200, "Rex")

	p.stop(syscall.SIGTERM)
	wantExit(t, p, 0, "")
}

func TestStopSignals(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		file := newDatabase(t, 1)
		p := start(t, "-db", file)
		p.post(rex).want(t, 201)

		p.cmd.Process.Signal(sig)
		p.log.await(t, fmt.Sprintf(`msg=stopping cause="%v signal received"\n`, sig))
		p.cmd.Process.Signal(syscall.SIGINT) // changes nothing, like the next one
		p.cmd.Process.Signal(syscall.SIGTERM)

		wantExit(t, p, 0, " msg=stopped\n")
		wantFiles(t, filepath.Dir(file), "animals.db")
	}
}

// wantExit waits until the process has ended, and checks its exit status and that its log contains
// words.
func wantExit(t *testing.T, p *process, status int, words string) {
	t.Helper()
	if got := p.wait(); got != status {
		t.Fatalf("exit status %d, want %d; log %s", got, status, &p.log)
	}
	p.log.want(t, words)
}

func TestHangup(t *testing.T) {
	t.Parallel()
	if signal.Ignored(syscall.SIGHUP) {
		t.Skip("the program inherits from nohup that SIGHUP is ignored")
	}
	p := start(t)
	p.stop(syscall.SIGHUP)
	wantExit(t, p, -1, "")
}

// TestStopWhileACreateWaitsForALock unlocks the database when the service accepts no connections
// any more. The create must be answered.
func TestStopWhileACreateWaitsForALock(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 1)
	p := start(t, "-db", file)

	var created func() []reply
	whileLocked(t, file, func() {
		reading := make(chan struct{}) // closed when the service reads the body
		trace := &httptrace.ClientTrace{Got100Continue: func() { close(reading) }}
		r := newRequest("POST", p.url+"/v1/pets", strings.NewReader(rex), "Expect: 100-continue")
		r = r.WithContext(httptrace.WithClientTrace(t.Context(), trace))
		created = startTogether(1, func(int) reply { return p.send(r) })
		<-reading

		p.cmd.Process.Signal(syscall.SIGTERM)
		eventually(t, "connections are refused", func() bool {
			conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
			if err == nil {
				conn.Close()
			}
			return err != nil
		})
	})
	created()[0].want(t, 201)

	wantExit(t, p, 0, " msg=stopped\n")
	wantSQL(t, file, "SELECT count(*) FROM pets", "2")
}

// TestPanicInTheStore expects that a panic there ends the program, which would otherwise go on
// without a connection, or with an open transaction.
func TestPanicInTheStore(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "GET /v1/pets/1", "GET /healthz", "POST /v1/pets"} {
		file := newDatabase(t, 1)
		p := start(t, "-db", file)
		execSQL(t, file, `ALTER TABLE pets RENAME TO old;
			CREATE VIEW pets AS SELECT panic() AS id, name, category_id, status FROM old;
			CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN SELECT panic(); END`)

		method, target, _ := strings.Cut(request, " ")
		if a := p.do(method, target, rex); a.StatusCode != 0 {
			t.Fatalf("%s = %d, want no response", request, a.StatusCode)
		}
		wantExit(t, p, 1, `level=ERROR msg="panic in the store" panic="a mistake"`)
		p.log.want(t, "store.go:") // in the stack
	}
}

// Processes: kills, full disks, moved files.

// TestKilledProcessLosesNothing kills the program several times while clients add animals, each
// with an Idempotency-Key. Repeats must get the first response, and nothing is added twice.
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 0)
	var sent atomic.Int64
	var acknowledged sync.Map // Idempotency-Key to the body of the 201

	// create adds animal i, or repeats that. There is no response when the program is killed.
	create := func(p *process, i int64) reply {
		key := fmt.Sprint("animal-", i)
		a := p.post(fmt.Sprintf(`{"name":%q,"categoryId":1}`, key), "Idempotency-Key: "+key)
		if a.StatusCode == 201 {
			if before, again := acknowledged.LoadOrStore(key, a.body); again && before != a.body {
				a.fault = fmt.Sprintf("it was acknowledged before as %s", before)
			}
		}
		return a
	}

	for range 6 {
		p := start(t, "-db", file)
		before := sent.Load()
		for i := range before {
			create(p, i).want(t, 201)
		}

		last := startTogether(16, func(int) (a reply) {
			for {
				a = create(p, sent.Add(1)-1)
				if a.StatusCode != 201 || a.fault != "" {
					return a
				}
			}
		})
		eventually(t, "some animals are added", func() bool { return sent.Load() > before+60 })
		p.stop(syscall.SIGKILL)
		for _, a := range last() {
			if a.StatusCode != 0 {
				a.want(t, 201)
			}
		}
	}

	s := openService(t, file)
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
	wantSQL(t, file, "SELECT count(*) - count(DISTINCT name) FROM pets", "0")
	acknowledged.Range(func(_, body any) bool {
		var p Pet
		must(t, json.Unmarshal([]byte(body.(string)), &p))
		s.get(fmt.Sprint("/v1/pets/", p.ID)).want(t, 200, body.(string))
		return true
	})
}

// TestCheckpointAtAStart expects that a start copies what a killed process has left in the
// write-ahead log.
func TestCheckpointAtAStart(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 0)
	p := start(t, "-db", file)
	p.add(t, "Rex", 7, "sold")
	p.stop(syscall.SIGKILL)
	start(t, "-db", file).stop(syscall.SIGKILL)

	must(t, os.Remove(file+"-wal"))

	wantSQL(t, file, "SELECT name FROM pets", "Rex")
}

// TestFullDisk fills a small disk, kills the program and starts it again. The write-ahead log then
// has more than fits into the database.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t)
	file := dir + "/animals.db"
	p := start(t, "-db", file)
	addMany(t, file, 10_000)
	shell(t, dir, "dd if=/dev/zero of=other || true")

	for range 2 { // before and after a kill
		p.post(rex).want(t, 503)
		p.log.await(t, "level=ERROR .*database or disk is full")
		p.get("/v1/pets?after=9999").want(t, 200, `"id":10000,`)
		p.get("/healthz").want(t, 200)
		p.stop(syscall.SIGKILL)
		p = start(t, "-db", file)
	}
	if err := backup(t.Context(), file, dir+"/copy.db"); err == nil {
		t.Fatal("a backup to a full disk succeeds")
	}
	wantFiles(t, dir, "animals.db", "animals.db-shm", "animals.db-wal", "other")

	shell(t, dir, "rm other")
	p.post(rex).want(t, 201)
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
	p.stop(syscall.SIGKILL)
}

// smallDisk mounts a disk of 2 MB. A shell unmounts it when its standard input ends: at the end of
// the test, or when the test process is killed.
func smallDisk(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	cmd := exec.Command("sh", "-c", `trap '' HUP INT TERM
		mount -t tmpfs -o size=2m none "$0" && echo mounted && cat && umount -l "$0"`, dir)
	stdin, err := cmd.StdinPipe()
	must(t, err)
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		cmd.Wait()
	})
	if line, _ := bufio.NewReader(stdout).ReadString('\n'); line != "mounted\n" {
		t.Skip("needs the right to mount a file system")
	}
	return dir
}

// The next tests move the database of a running service, which has the animals 1 to 5. The file
// backup is a backup with the first three.

func startToMove(t *testing.T) (dir string, p *process) {
	t.Helper()
	file := newDatabase(t, 3)
	dir = filepath.Dir(file)
	must(t, backup(t.Context(), file, dir+"/backup"))
	p = start(t, "-db", file)
	p.add(t, "Rex", 7, "sold")
	p.add(t, "Rex", 7, "sold")
	wantLists(t, p, "/v1/pets?after=0&limit=")
	return dir, p
}

// wantLists requests many lists at once, which the cache does not have.
func wantLists(t *testing.T, p *process, target string) {
	t.Helper()
	for _, a := range together(50, func(i int) reply { return p.get(target + strconv.Itoa(5+i)) }) {
		a.want(t, 200, `"id":5,`)
	}
}

// wantNotInPlace expects what the service does while its database is not in its place.
func wantNotInPlace(t *testing.T, p *process) {
	t.Helper()
	p.post(rex).want(t, 503)
	p.get("/healthz").want(t, 503)
	p.log.await(t, "level=ERROR .*the database is not in its place")
	wantLists(t, p, "/v1/pets?limit=")
}

// wantIDs checks the ids of all animals in a database.
func wantIDs(t *testing.T, file, want string) {
	t.Helper()
	wantSQL(t, file, "SELECT coalesce(group_concat(id ORDER BY id), 'none') FROM pets", want)
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
}

func TestDatabaseThatIsMovedAndPutBack(t *testing.T) {
	t.Parallel()
	dir, p := startToMove(t)

	shell(t, dir, "mv animals.db away")
	wantNotInPlace(t, p)
	shell(t, dir, "mv away animals.db")

	p.post(rex).want(t, 201)
	p.get("/healthz").want(t, 200)
	p.stop(syscall.SIGTERM)
	wantExit(t, p, 0, " msg=stopped\n")
	wantIDs(t, dir+"/animals.db", "1,2,3,4,5,6")
}

// TestListsOfAMovedDatabase requests lists that take a second each, so that all need a connection at
// the same time. One that was opened now would not find the database.
func TestListsOfAMovedDatabase(t *testing.T) {
	t.Parallel()
	file := newDatabase(t, 1)
	p := start(t, "-db", file)
	execSQL(t, file, `ALTER TABLE pets RENAME TO old;
		CREATE VIEW pets AS SELECT * FROM old WHERE sleep(1) IS NULL`)

	shell(t, filepath.Dir(file), "mv animals.db away")

	for _, a := range together(4, func(i int) reply { return p.get(fmt.Sprint("/v1/pets?limit=", 1+i)) }) {
		a.want(t, 200, "Rex")
	}
}

func TestDatabaseThatIsNotPutBack(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		move string // a line of shell
		away string // ids in the file away, "" if there is none
		next string // ids that the next start lists
	}{
		{move: "mv animals.db away", away: "1,2,3,4,5", next: "none"},
		{move: "mv animals.db away; cp backup animals.db", away: "1,2,3,4,5", next: "1,2,3"},
		{move: "rm animals.db", next: "none"},
	} {
		t.Run(c.move, func(t *testing.T) {
			t.Parallel()
			dir, p := startToMove(t)

			shell(t, dir, c.move)
			wantNotInPlace(t, p)
			p.stop(syscall.SIGTERM)

			wantExit(t, p, 1, "animalstore: the database is not in its place")
			if c.away != "" {
				wantIDs(t, dir+"/away", c.away)
			}
			start(t, "-db", dir+"/animals.db").get("/v1/pets").want(t, 200)
			wantIDs(t, dir+"/animals.db", c.next)
		})
	}
}

// TestMovedDatabaseThatIsRead stops a service whose database was moved while another program reads
// it, so that the log cannot be emptied. Beside another database, that log would damage it.
func TestMovedDatabaseThatIsRead(t *testing.T) {
	t.Parallel()
	dir, p := startToMove(t)
	p.post(rex).want(t, 201)
	reader := connect(t, dir+"/animals.db")
	_, err := reader.Exec("BEGIN; SELECT * FROM pets")
	must(t, err)

	shell(t, dir, "mv animals.db away")
	p.stop(syscall.SIGTERM)

	wantExit(t, p, 1, "its write-ahead log is not empty, because another program reads it")
	must(t, reader.Close())
	shell(t, dir, "mv away animals.db")
	wantIDs(t, dir+"/animals.db", "1,2,3,4,5,6")
}

func TestDatabaseThatIsMovedBeforeAKill(t *testing.T) {
	t.Parallel()
	dir, p := startToMove(t)

	shell(t, dir, "mv animals.db away")
	wantNotInPlace(t, p)
	p.stop(syscall.SIGKILL)

	wantRefused(t, dir, refusal{want: "is the write-ahead log of one"})
	shell(t, dir, "mv away animals.db")
	start(t, "-db", dir+"/animals.db").get("/v1/pets").want(t, 200)
	wantIDs(t, dir+"/animals.db", "1,2,3,4,5")
}

// Backups.

func TestBackupUnderLoad(t *testing.T) {
	t.Parallel()
	s := newService(t)
	addMany(t, s.file, 100)
	file := filepath.Join(t.TempDir(), "copy.db")
	var stopped atomic.Bool
	clients := startTogether(4, func(int) (a reply) {
		for a.fault == "" && !stopped.Load() {
			a = s.post(zoe)
		}
		return a
	})

	out, err := command(t, noKey, "-db", s.file, "-backup", file).CombinedOutput()
	stopped.Store(true)
	for _, a := range clients() {
		a.want(t, 201)
	}

	if err != nil || len(out) > 0 {
		t.Fatalf("-backup: %v, output %q, want none", err, out)
	}
	wantFiles(t, filepath.Dir(file), "copy.db")
	info, err := os.Stat(file)
	must(t, err)
	if info.Mode() != 0o600 {
		t.Fatalf("the mode of the backup is %v, want -rw-------", info.Mode())
	}
	copied := openService(t, file)
	copied.get("/v1/pets?after=99&limit=1").want(t, 200, `"id":100,"name":"Rex"`)
	wantSQL(t, file, "SELECT max(id) - count(*) FROM pets", "0") // it is of one moment
}

// TestInterruptedCopies interrupts -backup and -restore while they verify the copy, which takes long,
// because a rule in the database does. The rule is ignored while the database is made and copied.
func TestInterruptedCopies(t *testing.T) {
	t.Parallel()
	slow := newSlowDatabase(t, 1000)

	for sig, cause := range map[syscall.Signal]string{
		syscall.SIGTERM: "terminated signal received",
		syscall.SIGINT:  "interrupt signal received",
		syscall.SIGHUP:  "hangup signal received",
	} {
		if signal.Ignored(sig) {
			continue // the program inherits that from nohup
		}
		file := newDatabase(t, 2)
		dir := filepath.Dir(file)
		for _, args := range [][]string{
			{"-db", slow, "-backup", dir + "/copy.db"},
			{"-db", file, "-restore", slow},
		} {
			cmd := command(t, noKey, args...)
			var stderr logBuffer
			cmd.Stderr = &stderr
			must(t, cmd.Start())
			eventually(t, "the copy has begun", func() bool { return len(filesIn(t, dir)) > 1 })
			cmd.Process.Signal(sig)
			cmd.Wait()

			if status := cmd.ProcessState.ExitCode(); status != 1 {
				t.Fatalf("after %v, the exit status is %d, want 1", sig, status)
			}
			stderr.want(t, `": `+cause+"\n")
			wantFiles(t, dir, "animals.db")
			wantIDs(t, file, "1,2")
		}
	}
}

// newSlowDatabase is newDatabase with one animal, and with rows that take some milliseconds each to
// be verified, but not to be made and copied.
func newSlowDatabase(t testing.TB, rows int) (file string) {
	t.Helper()
	file = newDatabase(t, 1)
	execSQL(t, file, `PRAGMA ignore_check_constraints = ON;
		CREATE TABLE slow (size CHECK (length(hex(zeroblob(size))) > 0));
		INSERT INTO slow
			WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
			SELECT 1000000 FROM n LIMIT ?`, rows)
	return file
}

// TestBackupUnderNohup sends a hangup, which must change nothing.
func TestBackupUnderNohup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := command(t, noKey, "-db", newSlowDatabase(t, 50), "-backup", dir+"/copy.db")
	cmd.Args = append([]string{"sh", "-c", `trap '' HUP; exec "$0" "$@"`}, cmd.Args...)
	cmd.Path = "/bin/sh"
	must(t, cmd.Start())
	eventually(t, "the backup has begun", func() bool { return len(filesIn(t, dir)) > 0 })

	cmd.Process.Signal(syscall.SIGHUP)

	must(t, cmd.Wait())
	wantFiles(t, dir, "copy.db")
}

func TestRefusedBackups(t *testing.T) {
	t.Parallel()
	const damagedIndex = `PRAGMA writable_schema = ON; UPDATE sqlite_schema
		SET sql = replace(sql, '(status, id', '(name, id') WHERE name = 'pets_by_status'`
	for _, c := range []struct {
		shell  string // is run in the folder of the database
		sql    string // goes on with that
		target string // in that folder; copy.db if it is ""
		want   string
	}{
		{shell: "echo x >copy.db", want: `copy.db" exists already`},
		{shell: "ln -s nowhere copy.db", want: `copy.db" exists already`},
		{shell: "echo x >copy.db-wal", want: `copy.db-wal" exists already`}, // of another database
		{shell: "echo x >copy.db-journal", want: `copy.db-journal" exists already`},
		{target: "animals.db", want: `animals.db" exists already`},
		{target: "none/copy.db", want: "no such file or directory"},
		{shell: "rm animals.db", want: "unable to open database file (14)"},
		{shell: ": >animals.db", want: "the database is empty"},
		{sql: damagedIndex, want: "the database is damaged: row 1 missing from index pets_by_status"},
		{
			sql:  "PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'",
			want: "the database is damaged: CHECK constraint failed in pets",
		},
	} {
		file := newDatabase(t, 1)
		dir := filepath.Dir(file)
		shell(t, dir, c.shell)
		if c.sql != "" {
			execSQL(t, file, c.sql)
		}
		target := filepath.Join(dir, cmp.Or(c.target, "copy.db"))
		wantRefused(t, dir, refusal{args: []string{"-backup", target}, env: noKey, want: c.want})
	}
}

// Restores.

// newBackup returns a database with the animals 1 to 5, of which a backup has the first three.
func newBackup(t *testing.T) (file, copied string) {
	t.Helper()
	file = newDatabase(t, 3)
	copied = filepath.Join(t.TempDir(), "backup.db")
	must(t, backup(t.Context(), file, copied))
	addMany(t, file, 2)
	return file, copied
}

// restoreWith runs the program to restore a backup.
func restoreWith(t *testing.T, file, copied string) {
	t.Helper()
	status, stdout, stderr := runProgram(t, noKey, "-db", file, "-restore", copied)
	if status != 0 || stdout+stderr != "" {
		t.Fatalf("-restore = %d, %s%s, want 0 and no output", status, stdout, stderr)
	}
}

// TestRestoreUnderLoad restores a backup again and again while clients add animals.
func TestRestoreUnderLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, copied := dir+"/animals.db", filepath.Join(t.TempDir(), "backup.db")
	p := start(t, "-db", file)
	first := p.post(rex, "Idempotency-Key: before").want(t, 201)
	must(t, backup(t.Context(), file, copied))
	p.post(rex, "Idempotency-Key: after").want(t, 201)

	var stopped atomic.Bool
	clients := startTogether(4, func(int) (a reply) {
		for a.fault == "" && !stopped.Load() {
			a = p.post(zoe)
		}
		return a
	})
	for range 5 {
		restoreWith(t, file, copied)
	}
	stopped.Store(true)
	for _, a := range clients() {
		a.want(t, 201)
	}

	restoreWith(t, file, copied)
	eventually(t, "the list has the restored animal alone", func() bool {
		return p.get("/v1/pets").want(t, 200).body == "["+strings.TrimSpace(first.body)+"]\n"
	})
	wantReplayed(t, p.post(rex, "Idempotency-Key: before").want(t, 201, first.body), true)
	wantReplayed(t, p.post(rex, "Idempotency-Key: after").want(t, 201, `"id":2,`), false)
	p.stop(syscall.SIGTERM)
	wantExit(t, p, 0, " msg=stopped\n")
	wantIDs(t, file, "1,2")
	wantFiles(t, dir, "animals.db")
}

// endsWhen is a context that has ended when a condition holds.
type endsWhen struct {
	context.Context
	condition func() bool
}

func (c endsWhen) Err() error {
	if c.condition() {
		return context.Canceled
	}
	return nil
}

// TestRestoreInterruptedInTheCopy interrupts a restore when a part of the pages is copied.
func TestRestoreInterruptedInTheCopy(t *testing.T) {
	t.Parallel()
	large, file := newLargeDatabase(t, 10_000), newDatabase(t, 3)
	ctx := endsWhen{t.Context(), func() bool { return fileSize(file+"-wal") > 1<<20 }}

	if err := restore(ctx, file, large); !errors.Is(err, context.Canceled) {
		t.Fatalf("restore = %v, want %v", err, context.Canceled)
	}
	wantIDs(t, file, "1,2,3")
}

// TestKilledRestore kills -restore while it copies the backup into the write-ahead log of a service.
func TestKilledRestore(t *testing.T) {
	t.Parallel()
	large := newLargeDatabase(t, 6000)
	file := newDatabase(t, 3)
	p := start(t, "-db", file)
	for range 3 {
		cmd := command(t, noKey, "-db", file, "-restore", large)
		before, err := os.Stat(file + "-wal")
		must(t, err)
		must(t, cmd.Start())
		eventually(t, "the backup is copied into the log", func() bool {
			now, err := os.Stat(file + "-wal")
			return err == nil && now.ModTime() != before.ModTime()
		})
		cmd.Process.Kill()
		cmd.Wait()

		p.get("/v1/pets?after=2").want(t, 200, `"id":3,`)
		p.post(rex).want(t, 201)
		wantSQL(t, file, "PRAGMA integrity_check", "ok")
		wantSQL(t, file, "SELECT max(id) - count(*) FROM pets", "0")
		wantSQL(t, file, "SELECT count(*) < 10 OR count(*) >= 6000 FROM pets", "1") // old or new
	}
}

// TestRestoreOnAFullDisk restores backups for which a disk of 2 MB is too small: for their copies, and
// for the write-ahead log.
func TestRestoreOnAFullDisk(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t)
	file := dir + "/animals.db"
	p := start(t, "-db", file)
	p.post(rex).want(t, 201)

	for _, animals := range []int{6000, 2400} {
		large := newLargeDatabase(t, animals)
		wantRefusedRestore(t, file, large, "database or disk is full (13)")
		wantFiles(t, dir, "animals.db", "animals.db-shm", "animals.db-wal")
		if size := fileSize(file + "-wal"); size > 100_000 {
			t.Fatalf("after a restore that failed, the log has %d bytes", size)
		}
		p.post(rex).want(t, 201)
	}
	wantIDs(t, file, "1,2,3")
	restoreWith(t, file, newDatabase(t, 2))
	wantIDs(t, file, "1,2")
}

// wantRefusedRestore expects that the program does not restore a backup, and says why.
func wantRefusedRestore(t *testing.T, file, copied, words string) {
	t.Helper()
	status, stdout, stderr := runProgram(t, noKey, "-db", file, "-restore", copied)
	if status != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, words) {
		t.Fatalf("-restore = %d, %s%s, want 1 and one line with %q", status, stdout, stderr, words)
	}
}

// TestRefusedRestores expects that a wrong backup or database is refused, and that nothing changes.
func TestRefusedRestores(t *testing.T) {
	t.Parallel()
	const (
		noDatabase = "there is no database: start the service once, which creates one, and restore again"
		orphan     = `animals.db-wal" is the write-ahead log of one`
		isItself   = "the backup is the database itself"
	)
	for _, c := range []struct {
		shell  string // is run in the folder of animals.db, and of backup.db, the backup
		onDB   string // SQL, goes on with animals.db
		onCopy string // SQL, goes on with backup.db
		want   string
	}{
		{shell: "rm backup.db", want: "the backup cannot be read: no such file or directory\n"},
		{shell: ": >backup.db", want: "the backup was not copied: the database is empty"},
		{shell: "yes | head -c 4096 >backup.db", want: "the backup was not copied: file is not a database (26)\n"},
		{shell: "truncate -s -1 backup.db", want: "the backup is truncated"},
		{shell: "truncate -s -4096 backup.db", want: "the backup was not copied: database disk image is malformed (11)"},
		{shell: "rm backup.db; mkdir backup.db", want: "the backup is not a file"},
		{shell: "rm backup.db; mkfifo backup.db", want: "the backup is not a file"},
		{shell: "rm backup.db; ln -s animals.db backup.db", want: isItself},
		{shell: "rm backup.db; ln animals.db backup.db", want: isItself},
		{onCopy: "PRAGMA application_id = 0", want: "the backup was not copied: not a database of this service"},
		{onCopy: "PRAGMA user_version = 99", want: "the backup was not copied: a newer version of this service"},
		{
			onCopy: "PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'",
			want:   "the backup was not copied: the database is damaged: CHECK constraint failed",
		},

		{shell: "rm animals.db", want: noDatabase},
		{shell: ": >animals.db", want: noDatabase},
		{shell: "echo >animals.db", want: noDatabase}, // one byte
		{shell: "mv animals.db animals.db-wal", want: orphan},
		{shell: "mv animals.db animals.db-wal; echo >animals.db", want: orphan},
		{onDB: "PRAGMA application_id = 0", want: "not a database of this service: its application_id is 0"},
		{
			shell: "yes | dd of=animals.db bs=16 count=1 conv=notrunc",
			want:  "(26): stop the service, move the database and its -wal and -shm files away",
		},
		{
			shell: "yes | dd of=animals.db bs=100 seek=1 count=30 conv=notrunc",
			want:  "(11): stop the service, move the database and its -wal and -shm files away",
		},
	} {
		t.Run(c.shell+c.onDB+c.onCopy, func(t *testing.T) {
			t.Parallel()
			file, copied := newBackup(t)
			dir := filepath.Dir(file)
			must(t, os.Rename(copied, dir+"/backup.db"))
			shell(t, dir, c.shell)
			if c.onDB != "" {
				execSQL(t, file, c.onDB)
			}
			if c.onCopy != "" {
				execSQL(t, dir+"/backup.db", c.onCopy)
			}

			wantRefused(t, dir, refusal{args: []string{"-restore", dir + "/backup.db"}, env: noKey, want: c.want})
		})
	}
}

func TestRestoreOfLockedFiles(t *testing.T) {
	t.Parallel()
	file, copied := newBackup(t)
	onConnect(file, "PRAGMA busy_timeout = 50") // milliseconds, not to wait for 5 seconds
	whileLocked(t, file, func() {
		wantRefusedRestore(t, file, copied, "another program holds a lock; end it, and restore again")
	})
	wantIDs(t, file, "1,2,3,4,5")

	file, copied = newBackup(t)
	onConnect(copied, "PRAGMA busy_timeout = 50")
	execSQL(t, copied, "PRAGMA journal_mode = DELETE") // in which a lock excludes readers
	db := connect(t, copied)
	_, err := db.Exec("BEGIN EXCLUSIVE")
	must(t, err)
	wantRefusedRestore(t, file, copied, "another program holds a lock; end it, and restore again")
}

// TestRestoreOfOddFiles restores to and from files that are unusual, but allowed.
func TestRestoreOfOddFiles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		shell  string // is run in the folder of animals.db, and of backup.db, the backup
		onDB   string // SQL, goes on with animals.db
		db     string // the names for the program, which runs in that folder
		copied string
	}{
		{db: "animals.db", copied: "backup.db"},
		{shell: "mv backup.db 'a?b#c%41 \"d'", db: "animals.db", copied: `a?b#c%41 "d`},
		{shell: "ln -s backup.db link", db: "animals.db", copied: "link"},
		{shell: "mkdir real; mv animals.db real; ln -s real/animals.db link; cd real", db: "link", copied: "backup.db"},
		{shell: "chmod 400 backup.db; sync", db: "animals.db", copied: "backup.db"},
		{onDB: "PRAGMA user_version = 99", db: "animals.db", copied: "backup.db"},
		{
			shell: "yes | dd of=animals.db bs=4096 seek=1 count=2 conv=notrunc", // damages two pages
			db:    "animals.db", copied: "backup.db",
		},
	} {
		file, copied := newBackup(t)
		dir := filepath.Dir(file)
		must(t, os.Rename(copied, dir+"/backup.db"))
		shell(t, dir, c.shell)
		if c.onDB != "" {
			execSQL(t, file, c.onDB)
		}

		cmd := command(t, noKey, "-db", c.db, "-restore", c.copied)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("%s: -db %q -restore %q: %v, %s", c.shell, c.db, c.copied, err, out)
		}

		s := openService(t, filepath.Join(dir, c.db))
		s.post(rex).want(t, 201, `"id":4,`)
		must(t, s.close())
		wantIDs(t, filepath.Join(dir, c.db), "1,2,3,4")
	}
}

// openapi.json.

// TestDocument compares openapi.json with the constants of the code, and what clients are generated
// from with the interface. newReply checks the rest with each response.
func TestDocument(t *testing.T) {
	t.Parallel()
	d := apiDocument
	list, create, get := d.Paths["/pets"]["get"], d.Paths["/pets"]["post"], d.Paths["/pets/{petId}"]["get"]
	schemas := d.Components.Schemas
	limit, after, newPet := list.Parameters[0].Schema, list.Parameters[2].Schema, schemas["NewPet"]

	for _, c := range []struct{ got, want any }{
		{*limit.Minimum, 1},
		{*limit.Default, defaultLimit},
		{*limit.Maximum, maxLimit},
		{*after.Minimum, 0},
		{schemas["Pets"].MaxItems, maxLimit},
		{create.Parameters[0].Schema.MaxLength, maxIdempotencyKey},
		{newPet.Properties["name"].MaxLength, maxName},
		{schemas["PetStatus"].Enum, petStatuses},
		{newPet.Required, []string{"name", "categoryId"}},
		{*newPet.AdditionalProperties, false},
		{create.RequestBody.Required, true},
		{d.Security, []map[string][]string{{"bearerAuth": {}}}},
		{get.Deprecated, true},
		{list.names(), "limit in query, status in query, after in query"},
		{create.names(), "Idempotency-Key in header"},
		{get.names(), "petId in path (required)"},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Fatalf("openapi.json has %v, want %v", c.got, c.want)
		}
	}

	for _, words := range []string{
		fmt.Sprintf("%d KiB of headers and %d KiB of body", maxHeader>>10, maxBody>>10),
		fmt.Sprintf("%v seconds to send the headers and %v to send the request",
			readHeaderTimeout.Seconds(), readTimeout.Seconds()),
		fmt.Sprintf("sent and read within %v seconds", writeTimeout.Seconds()),
		fmt.Sprintf("closed after %v seconds", idleTimeout.Seconds()),
		fmt.Sprintf("within %v seconds, and refuses", shutdownTime.Seconds()),
	} {
		if !strings.Contains(d.Info.Description, words) {
			t.Fatalf("the description in openapi.json has no %q", words)
		}
	}
	for _, name := range []string{"a\x00", "\ufffd"} {
		if namePattern.MatchString(name) {
			t.Fatalf("the pattern of names in openapi.json matches %q", name)
		}
	}
	for status, resp := range get.Responses {
		headers := slices.Sorted(maps.Keys(resolve(resp.Ref, d.Components.Responses, resp).Headers))
		want := map[string]string{"401": " WWW-Authenticate", "503": " Retry-After"}[status]
		if got := fmt.Sprint(headers); !strings.HasPrefix(got, "[Deprecation Link") ||
			!strings.Contains(got, " Sunset") || !strings.Contains(got, want) {
			t.Fatalf("the %s of getPet in openapi.json has the headers %s", status, got)
		}
	}
}

// names returns the names of the parameters of an operation, and where they stand in a request.
func (o operation) names() string {
	var names []string
	for _, p := range o.Parameters {
		name := p.Name + " in " + p.In
		if p.Required {
			name += " (required)"
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}

// namePattern is the pattern of names in openapi.json.
var namePattern = apiDocument.Components.Schemas["NewPet"].Properties["name"].Pattern

// Fuzz tests.

// FuzzListPets lists animals with any query. A page must be what the query says, by the rules of
// the interface.
func FuzzListPets(f *testing.F) {
	queries := []string{
		"", "limit=5&status=sold&after=3", "limit=101", "limit=05", "a;b", "%zz", "limit=1&limit=1",
		"after=9223372036854775807", "after=9223372036854775808", "status=Sold", "&limit=%32",
	}
	for _, query := range queries {
		f.Add(query)
	}
	s := newService(f)
	var all []Pet
	for i := range 30 {
		all = append(all, s.add(f, "Rex", 7, petStatuses[i%3]))
	}

	f.Fuzz(func(t *testing.T, query string) {
		r := newRequest("GET", "/v1/pets", nil)
		r.URL.RawQuery = query

		a := s.send(r)

		if a.StatusCode == 400 {
			return
		}
		want, more := expectedPage(all, query)
		if got := decode[[]Pet](t, a.want(t, 200)); !slices.Equal(got, want) {
			t.Fatalf("%q = %v, want %v", query, got, want)
		}
		if link := a.Header.Get("Link"); (link != "") != more {
			t.Fatalf("%q has Link %q, want one: %v", query, link, more)
		}
	})
}

// expectedPage returns the page of all animals that a valid query selects, and whether more follow.
func expectedPage(all []Pet, query string) (page []Pet, more bool) {
	values, _ := url.ParseQuery(query)
	after, _ := strconv.ParseInt(values.Get("after"), 10, 64)
	limit := 20
	if values.Has("limit") {
		limit, _ = strconv.Atoi(values.Get("limit"))
	}

	for _, p := range all {
		if p.ID > after && (!values.Has("status") || p.Status == values.Get("status")) {
			page = append(page, p)
		}
	}
	return page[:min(limit, len(page))], len(page) > limit
}

// FuzzCreatePet adds an animal with any body. It must be refused, or stored as it was sent.
func FuzzCreatePet(f *testing.F) {
	for _, body := range validBodies {
		f.Add(body)
	}
	for _, body := range []string{
		"{}", "[]", `{"name":"\ud83d","categoryId":1e2}`, `{"name":"x","name":"y"}`,
		"{\"name\":\"\xff\"}", `{"name":"x","categoryId":-0}`, `{"Name":"x","categoryId":1}`,
	} {
		f.Add(body)
	}
	s := newService(f)

	f.Fuzz(func(t *testing.T, body string) {
		a := s.post(body)

		if a.StatusCode == 400 || a.StatusCode == 413 && len(body) > maxBody {
			return
		}
		wantSent(t, a.want(t, 201), body)
		if name := decode[Pet](t, a).Name; !namePattern.MatchString(name) {
			t.Fatalf("openapi.json does not allow the name %q", name)
		}
		s.get(a.reference(t, "Location")).want(t, 200, a.body)
	})
}

// Benchmarks.

func BenchmarkLists(b *testing.B) {
	const animals = 100_000
	s := newService(b)
	addMany(b, s.file, animals)

	for _, c := range []struct{ name, target string }{
		{name: "one page", target: "/v1/pets"}, // from the cache
		{name: "many pages", target: "/v1/pets?after=%d"},
		{name: "many pages of a status", target: "/v1/pets?status=sold&after=%d"},
	} {
		b.Run(c.name, func(b *testing.B) {
			for after := 0; b.Loop(); after = (after + 1) % animals {
				target := strings.Replace(c.target, "%d", strconv.Itoa(after), 1)
				s.measure(b, newRequest("GET", target, nil), 200)
			}
		})
	}
}

// BenchmarkCreates shows what group commit gains. With -cpu 2, there are 64 clients.
func BenchmarkCreates(b *testing.B) {
	for _, c := range []struct {
		name    string
		clients int  // for each processor
		keys    bool // with an Idempotency-Key
	}{
		{name: "one client", clients: 0},
		{name: "many clients", clients: 32},
		{name: "many clients with Idempotency-Keys", clients: 32, keys: true},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := newService(b)
			var requests atomic.Int64
			create := func() {
				r := newRequest("POST", "/v1/pets", strings.NewReader(rex))
				if c.keys {
					r.Header.Set("Idempotency-Key", fmt.Sprint(requests.Add(1)))
				}
				s.measure(b, r, 201)
			}

			if c.clients == 0 {
				for b.Loop() {
					create()
				}
				return
			}
			b.SetParallelism(c.clients)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					create()
				}
			})
		})
	}
}

// measure lets the handler answer a request, and checks only the status, which takes little time.
func (s *service) measure(b *testing.B, r *http.Request, want int) {
	w := httptest.NewRecorder()
	s.server.ServeHTTP(w, r)
	if w.Code != want {
		b.Errorf("%s %s = %d, want %d", r.Method, r.URL, w.Code, want)
	}
}

// Helpers: requests, and their responses.

// testKey and otherKey are the API keys that a service under test accepts.
const (
	testKey  = "test-key"
	otherKey = "other-key"
)

// rex and zoe are animals to add.
const (
	rex = `{"name":"Rex","categoryId":7}`
	zoe = `{"name":"Zoe","categoryId":13}`
)

// newRequest returns a request. A header is written as "Name: value". Without an Authorization, it
// has testKey; "Authorization:" sends no API key.
func newRequest(method, target string, body io.Reader, headers ...string) *http.Request {
	r := httptest.NewRequest(method, target, body)
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ":")
		r.Header.Add(name, strings.TrimPrefix(value, " "))
	}
	if slices.Contains(headers, "Authorization:") {
		r.Header.Del("Authorization")
	} else if r.Header.Get("Authorization") == "" {
		r.Header.Set("Authorization", "Bearer "+testKey)
	}
	return r
}

// client sends requests to a service. Its methods can be used in any goroutine: what is wrong with a
// response is in the reply, and reply.want reports it.
type client struct {
	url       string // of the service, "" if it is in this process
	roundTrip func(*http.Request) (*http.Response, error)
}

// clientOf returns a client that lets a handler in this process answer, without a network.
func clientOf(h http.Handler) client {
	return client{roundTrip: func(r *http.Request) (*http.Response, error) {
		r.RequestURI = r.URL.RequestURI()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Result(), nil
	}}
}

// do sends a request that newRequest makes.
func (c client) do(method, target, body string, headers ...string) reply {
	return c.send(newRequest(method, c.url+target, strings.NewReader(body), headers...))
}

// get sends a GET request.
func (c client) get(target string, headers ...string) reply {
	return c.do("GET", target, "", headers...)
}

// post sends POST /v1/pets.
func (c client) post(body string, headers ...string) reply {
	return c.do("POST", "/v1/pets", body, headers...)
}

// add adds an animal and returns it.
func (c client) add(t testing.TB, name string, category int64, status string) Pet {
	t.Helper()
	body := encode(NewPet{Name: name, CategoryID: category, Status: status})
	return decode[Pet](t, c.post(string(body)).want(t, 201))
}

// send sends a request.
func (c client) send(r *http.Request) reply {
	var sent bytes.Buffer
	r.Body = io.NopCloser(io.TeeReader(r.Body, &sent))
	r.RequestURI = "" // or http.Client refuses a request of httptest.NewRequest
	resp, err := c.roundTrip(r)
	return newReply(r, sent.String(), resp, err)
}

// together calls f with 0 to count-1 at the same time, and returns the replies in this order.
func together(count int, f func(i int) reply) []reply {
	return startTogether(count, f)()
}

// startTogether is together, but does not wait for the replies: wait does.
func startTogether(count int, f func(i int) reply) (wait func() []reply) {
	replies := make([]reply, count)
	var begun, ended sync.WaitGroup
	for i := range count {
		begun.Add(1)
		ended.Go(func() {
			begun.Done()
			replies[i] = f(i)
		})
	}
	begun.Wait()
	return func() []reply {
		ended.Wait()
		return replies
	}
}

// reply is a response that has been read, and the request that it answers.
type reply struct {
	*http.Response
	body    string
	request string // for messages
	fault   string // what is wrong, by the rules of all responses; "" if nothing is
}

// newReply reads the response to a request, of which sent is the body, and checks it. err means that
// there is none.
func newReply(r *http.Request, sent string, resp *http.Response, err error) reply {
	a := reply{Response: &http.Response{}}
	if err == nil {
		defer resp.Body.Close()
		var body []byte
		body, err = io.ReadAll(resp.Body)
		a = reply{Response: resp, body: string(body)}
	}
	a.Request = r

	a.request = fmt.Sprintf("%.200s %.500s %.500q", r.Method, r.URL, sent)
	if err != nil {
		a.StatusCode = 0
		a.fault = err.Error()
		return a
	}
	body := parseJSON(a.body)
	a.fault = cmp.Or(headerFault(a), bodyFault(r, a, body))
	if fault := documentFault(r, a, body); a.fault == "" && fault != "" {
		a.fault = "openapi.json has " + fault
	}
	return a
}

// want checks a response: its status, that its body contains all the words, and the rules for all
// responses.
func (a reply) want(t testing.TB, status int, words ...string) reply {
	t.Helper()
	if a.StatusCode != status {
		t.Fatalf("%s = %d %s %s, want %d", a.request, a.StatusCode, a.body, a.fault, status)
	}
	if a.fault != "" {
		t.Fatalf("%s = %d %.500s: %s", a.request, a.StatusCode, a.body, a.fault)
	}
	for _, w := range words {
		if !strings.Contains(a.body, w) {
			t.Fatalf("%s = %d %s, want %q in it", a.request, a.StatusCode, a.body, w)
		}
	}
	return a
}

// wantHeader checks the value of a header, "" for none.
func (a reply) wantHeader(t testing.TB, name, want string) {
	t.Helper()
	if got := strings.Join(a.Header.Values(name), ", "); got != want {
		t.Fatalf("%s = %d with %s %q, want %q", a.request, a.StatusCode, name, got, want)
	}
}

// reference returns the URL to which the reference in a header leads, as a client resolves it
// (RFC 3986), or "" if there is no such header.
func (a reply) reference(t testing.TB, header string) string {
	t.Helper()
	text, _, _ := strings.Cut(strings.TrimPrefix(a.Header.Get(header), "<"), ">")
	if text == "" {
		return ""
	}
	target, err := a.Request.URL.Parse(text)
	must(t, err)
	return target.String()
}

// decode decodes the body of a response.
func decode[T any](t testing.TB, a reply) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), &v); err != nil {
		t.Fatalf("%s = %s: %v", a.request, a.body, err)
	}
	return v
}

// parseJSON parses JSON, and returns nil for what is not JSON. A number becomes a json.Number,
// which has all its digits.
func parseJSON(text string) (v any) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	if dec.Decode(&v) != nil {
		return nil
	}
	return v
}

// Helpers: a service in this process.

// service is the whole service in this process, on a database file of its own.
type service struct {
	client
	file   string
	log    *logBuffer
	store  *store
	server *server
	close  func() error // closes the store; the end of the test does that, too
}

// newService opens a service on a new database.
func newService(t testing.TB) *service {
	t.Helper()
	return openService(t, filepath.Join(t.TempDir(), "animals.db"))
}

// openService opens a service on the database in a file.
func openService(t testing.TB, file string) *service {
	t.Helper()
	log := &logBuffer{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	k, err := loadKeys(testKey+","+otherKey, true, "")
	must(t, err)
	st, err := openStore(file, logger)
	must(t, err)
	closeOnce := sync.OnceValue(st.close)
	t.Cleanup(func() { must(t, closeOnce()) })

	srv := newServer(routes(st, k), logger)
	return &service{
		client: clientOf(srv),
		file:   file,
		log:    log,
		store:  st,
		server: srv,
		close:  closeOnce,
	}
}

// createWhileLocked is together, but the database is locked until all have begun, so that the
// creates wait and are stored together.
func createWhileLocked(t testing.TB, file string, count int, create func(i int) reply) []reply {
	t.Helper()
	var wait func() []reply
	whileLocked(t, file, func() { wait = startTogether(count, create) })
	return wait()
}

// withFakeClock runs a test on a service under a fake clock, in parallel with other tests.
func withFakeClock(t *testing.T, test func(t *testing.T, s *service)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, newService(t)) })
}

// serve serves connections in memory, under a fake clock, until stop is called. stop returns when
// the service has stopped.
func (s *service) serve(t *testing.T) (ln *memoryListener, stop func()) {
	ln = &memoryListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	t.Cleanup(func() { time.Sleep(time.Minute) }) // until all goroutines of net/http have ended
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.server.serve(ctx, ln) }()

	return ln, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Fatalf("serve: %v", err)
		}
		synctest.Wait() // until all handlers have logged
	}
}

// rawList and rawCreate are GET and POST /v1/pets as they are sent, the latter without its body.
const (
	rawList   = "GET /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\n\r\n"
	rawCreate = "POST /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey +
		"\r\nContent-Length: 29\r\n\r\n"
)

// receive reads the response to a request that was sent on conn. method and target tell what that was.
func receive(conn net.Conn, method, target string) reply {
	r := newRequest(method, target, nil)
	resp, err := http.ReadResponse(bufio.NewReader(conn), r)
	return newReply(r, "", resp, err)
}

// memoryListener is a net.Listener for connections in memory, which work under a fake clock.
type memoryListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{} }

// dial opens a connection and sends text on it.
func (l *memoryListener) dial(text string) net.Conn {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
	case <-l.closed: // the connection is refused
		theirs.Close()
	}
	go io.WriteString(ours, text)
	synctest.Wait()
	return ours
}

// logBuffer is an io.Writer that keeps what is logged. It can be used by several goroutines.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBuffer) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

// String returns all that was logged.
func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// await waits until the log of a process matches pattern, and returns the submatches.
func (l *logBuffer) await(t testing.TB, pattern string) (match []string) {
	t.Helper()
	eventually(t, "the log has "+pattern, func() bool {
		match = regexp.MustCompile(pattern).FindStringSubmatch(l.String())
		return match != nil
	})
	return match
}

// want checks that the log contains all these words.
func (l *logBuffer) want(t testing.TB, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(l.String(), w) {
			t.Fatalf("the log has no %q: %s", w, l)
		}
	}
}

// wantNot checks that the log contains none of these words.
func (l *logBuffer) wantNot(t testing.TB, words ...string) {
	t.Helper()
	for _, w := range words {
		if strings.Contains(l.String(), w) {
			t.Fatalf("the log has %q: %s", w, l)
		}
	}
}

// Helpers: the database, as other programs use it.

// connect opens a database.
func connect(t testing.TB, file string) *sql.DB {
	t.Helper()
	location := url.URL{Scheme: "file", Path: file, RawQuery: "_pragma=busy_timeout(10000)"}
	db, err := sql.Open("sqlite", location.String())
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

// addMany adds animals that are like rex, but sold.
func addMany(t testing.TB, file string, count int) {
	t.Helper()
	execSQL(t, file, `INSERT INTO pets (name, category_id, status)
		WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
		SELECT 'Rex', 7, 'sold' FROM n LIMIT ?`, count)
}

// newDatabase returns a new database file with animals, which no process has open.
func newDatabase(t testing.TB, count int) (file string) {
	t.Helper()
	s := newService(t)
	addMany(t, s.file, count)
	must(t, s.close())
	return s.file
}

// newLargeDatabase is newDatabase with long names: 1000 animals take 500 KB.
func newLargeDatabase(t testing.TB, count int) (file string) {
	t.Helper()
	file = newDatabase(t, count)
	execSQL(t, file, "UPDATE pets SET name = substr(hex(zeroblob(128)), 1, 255); VACUUM")
	return file
}

// whileLocked runs f while another program holds the write lock of a database.
func whileLocked(t testing.TB, file string, f func()) {
	t.Helper()
	db := connect(t, file)
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(t, err)
	f()
	must(t, db.Close())
}

// connectionSQL has the SQL that each new connection of this process runs, by database file.
var connectionSQL sync.Map

// onConnect makes each connection to a database that is opened later in this process run SQL first.
func onConnect(file, statements string) {
	connectionSQL.Store(file, statements)
}

// registerHooks makes connections use connectionSQL, and adds the SQL functions panic and sleep.
func registerHooks() {
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		location, err := url.Parse(dsn)
		if err != nil {
			return err
		}
		statements, _ := connectionSQL.Load(location.Path)
		if statements == nil {
			return nil
		}
		_, err = conn.ExecContext(context.Background(), statements.(string), nil)
		return err
	})
	sqlite.MustRegisterScalarFunction("panic", 0,
		func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) { panic("a mistake") })
	sqlite.MustRegisterScalarFunction("sleep", 1, // seconds
		func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
			time.Sleep(time.Duration(args[0].(int64)) * time.Second)
			return nil, nil
		})
}

// Helpers: the program, as a process or in this one.

// process is the program, running as a process.
type process struct {
	client
	closeIdle func() // closes idle connections to the process
	cmd       *exec.Cmd
	stderr    io.Closer
	log       logBuffer     // what it has written to standard error
	ended     chan struct{} // closed when the process has ended
}

// startedLine matches what the program logs when it serves, with its URL.
var startedLine = regexp.MustCompile(`msg=started url=(\S+)`)

// command returns a command that runs the program on a free port and a new database, unless args say
// otherwise. Its environment is e.
func command(t testing.TB, e env, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)

	all := append([]string{"-addr", "127.0.0.1:0", "-db", t.TempDir() + "/animals.db"}, args...)
	cmd := exec.CommandContext(ctx, os.Args[0], all...)
	cmd.Env = []string{
		"ANIMALSTORE_PROCESS=1",
		"GOCOVERDIR=" + t.TempDir(), // without it, go test -cover makes the program print a warning
	}
	for name, value := range e {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	_, err := cmd.StdinPipe() // its end tells the process that the test is over: see TestMain
	must(t, err)
	return cmd
}

// start starts the program with testKey, and waits until it serves.
func start(t testing.TB, args ...string) *process {
	t.Helper()
	return startCommand(t, command(t, withKey, args...))
}

// startCommand starts the program, and waits until it serves.
func startCommand(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	transport := &http.Transport{}
	stderr, err := cmd.StderrPipe()
	must(t, err)
	p := &process{
		client:    client{roundTrip: transport.RoundTrip},
		closeIdle: transport.CloseIdleConnections,
		cmd:       cmd,
		stderr:    stderr,
		ended:     make(chan struct{}),
	}
	must(t, cmd.Start())
	go func() {
		io.Copy(&p.log, stderr)
		cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() { p.stop(syscall.SIGKILL) })

	p.url = p.log.await(t, startedLine.String())[1]
	return p
}

// stop sends a signal to the process, waits until it has ended, and returns its exit status.
func (p *process) stop(sig syscall.Signal) (status int) {
	p.closeIdle() // the service waits 5 s for one without a request
	p.cmd.Process.Signal(sig)
	return p.wait()
}

// wait waits until the process has ended, and returns its exit status: -1 if a signal has killed
// it.
func (p *process) wait() (status int) {
	<-p.ended
	return p.cmd.ProcessState.ExitCode()
}

// env is the environment of the program, by name of the variable. withKey has the API key testKey.
type env map[string]string

var (
	withKey = env{"API_KEYS": testKey}
	noKey   = env{}
)

// runProgram runs the program in this process, on a free port, until it ends.
func runProgram(t *testing.T, e env, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // in case the service starts
	defer cancel()
	lookupEnv := func(name string) (value string, isSet bool) {
		value, isSet = e[name]
		return value, isSet
	}

	var out, errOut strings.Builder
	status = run(ctx, append([]string{"-addr", "127.0.0.1:0"}, args...), lookupEnv, &out, &errOut)
	return status, out.String(), errOut.String()
}

// refusal is a command line that the program must refuse.
type refusal struct {
	args   []string // follows -db animals.db, a file in the folder of the test
	env    env      // withKey if it is nil
	status int      // 1 if it is 0
	want   string   // in the line on standard error
}

// wantRefused runs the program. It checks that it ends with the status, and one line on standard
// error, which does not reveal testKey, and that it changes nothing in dir.
func wantRefused(t *testing.T, dir string, c refusal) {
	t.Helper()
	if c.env == nil {
		c.env = withKey
	}
	before := snapshot(t, dir)

	status, stdout, stderr := runProgram(t, c.env, append([]string{"-db", dir + "/animals.db"}, c.args...)...)

	if status != cmp.Or(c.status, 1) || stdout != "" || strings.Count(stderr, "\n") != 1 ||
		!strings.HasPrefix(stderr, "animalstore: ") || !strings.Contains(stderr, c.want) {
		t.Fatalf("animalstore %q = %d, standard output %q, standard error %q; want %d, one line with %q",
			c.args, status, stdout, stderr, cmp.Or(c.status, 1), c.want)
	}
	if strings.Contains(stderr, testKey) {
		t.Fatalf("animalstore %q revealed an API key: %s", c.args, stderr)
	}
	if after := snapshot(t, dir); after != before {
		t.Fatalf("animalstore %q changed the files from\n%s to\n%s", c.args, before, after)
	}
}

// Helpers: files and other things.

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

// shell runs a line of shell in a folder.
func shell(t testing.TB, dir, line string) {
	t.Helper()
	cmd := exec.Command("sh", "-e", "-c", line)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v %s", line, err, out)
	}
}

// writeFile creates a file with text in a new folder, and returns its path.
func writeFile(t testing.TB, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// snapshot lists the files in a folder, with their times and the sums of their contents.
func snapshot(t testing.TB, dir string) (text string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		info, err := e.Info()
		must(t, err)
		var data []byte
		if info.Mode().IsRegular() {
			data, err = os.ReadFile(filepath.Join(dir, e.Name()))
			must(t, err)
		}
		text += fmt.Sprintf("%s %v %x\n", e.Name(), info.ModTime(), sha256.Sum256(data))
	}
	return text
}

// filesIn returns the names of all files in a folder.
func filesIn(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// wantFiles checks the names of all files in a folder.
func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	if got := filesIn(t, dir); !slices.Equal(got, want) {
		t.Fatalf("the files are %q, want %q", got, want)
	}
}

// newCertificate writes a certificate and its key to files, and returns a transport that trusts it,
// and would use HTTP/2.
func newCertificate(t *testing.T) (certFile, keyFile string, trusting *http.Transport) {
	t.Helper()
	ts := httptest.NewTLSServer(nil) // has a certificate for 127.0.0.1
	defer ts.Close()
	key, err := x509.MarshalPKCS8PrivateKey(ts.TLS.Certificates[0].PrivateKey)
	must(t, err)
	writePEM := func(name, kind string, content []byte) string {
		return writeFile(t, name, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content})))
	}

	roots := x509.NewCertPool()
	roots.AddCert(ts.Certificate())
	trusting = &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		ForceAttemptHTTP2: true,
	}
	t.Cleanup(trusting.CloseIdleConnections)
	certFile = writePEM("cert.pem", "CERTIFICATE", ts.Certificate().Raw)
	return certFile, writePEM("key.pem", "PRIVATE KEY", key), trusting
}

// Helpers: the check of each response against openapi.json.

// apiDocument is openapi.json. Its types have all members that the file has.
var apiDocument = func() (d document) {
	dec := json.NewDecoder(bytes.NewReader(openAPI))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		panic(err)
	}
	return d
}()

type document struct {
	OpenAPI    string
	Info       struct{ Title, Version, Description string }
	Tags       any
	Servers    []struct{ URL, Description string }
	Security   []map[string][]string
	Paths      map[string]map[string]operation
	Components struct {
		Headers                   map[string]docHeader
		Responses                 map[string]docResponse
		Schemas                   map[string]schema
		SecuritySchemes, Examples any
	}
}

type operation struct {
	OperationID, Summary, Description string
	DeprecatedReason                  string `json:"x-deprecated-reason"`
	Tags                              []string
	Deprecated                        bool
	Parameters                        []struct {
		Name, In, Description string
		Required              bool
		Schema                schema
		Example               any
	}
	RequestBody struct {
		Required bool
		Content  any
	}
	Responses map[string]docResponse // by status
}

type docResponse struct {
	Ref         string `json:"$ref"` // or the rest
	Description string
	Headers     map[string]docHeader
	Content     map[string]struct {
		Schema            schema
		Example, Examples any
	}
}

type docHeader struct {
	Ref         string `json:"$ref"` // or the rest
	Description string
	Required    bool
	Schema      schema
	Example     any
}

type schema struct {
	Ref                            string `json:"$ref"` // or the rest
	Type, Format, Description      string
	Pattern                        *regexp.Regexp
	Enum, Required                 []string
	Default, Minimum, Maximum      *int64
	MinLength, MaxLength, MaxItems int
	AllOf                          []schema
	Items                          *schema
	Properties                     map[string]schema
	AdditionalProperties           *bool
}

// resolve returns the component that a reference such as #/components/schemas/Pet names, or what
// itself if there is no reference.
func resolve[T any](ref string, components map[string]T, what T) T {
	if ref == "" {
		return what
	}
	return components[ref[strings.LastIndex(ref, "/")+1:]]
}

// headerRules are the headers of each response, and the statuses of responses that have others.
var (
	headerRules = map[string]*regexp.Regexp{
		"Cache-Control":          regexp.MustCompile("^no-store$"),
		"Content-Type":           regexp.MustCompile("^application/json$"),
		"X-Content-Type-Options": regexp.MustCompile("^nosniff$"),
		"X-Request-Id":           regexp.MustCompile("^[A-Z2-7]{26}$"),
	}
	headerStatuses = map[string]int{"Www-Authenticate": 401, "Allow": 405, "Retry-After": 503}
)

// headerFault returns what is wrong with the headers of a response, whatever openapi.json says, or
// "".
func headerFault(a reply) string {
	for name, rule := range headerRules {
		if values := a.Header[name]; len(values) != 1 || !rule.MatchString(values[0]) {
			return fmt.Sprintf("%s is %q, want one that matches %s", name, values, rule)
		}
	}
	for name, status := range headerStatuses {
		if has := len(a.Header[name]) == 1; has != (a.StatusCode == status) {
			return fmt.Sprintf("%s is %q", name, a.Header[name])
		}
	}
	return ""
}

// wantCodes has the code of each error.
var wantCodes = map[int]string{
	400: "invalid_request",
	401: "unauthorized",
	404: "not_found",
	405: "method_not_allowed",
	408: "request_timeout",
	413: "body_too_large",
	415: "unsupported_media_type",
	422: "idempotency_key_reused",
	500: "internal",
	503: "unavailable",
}

// bodyFault returns what is wrong with the body of a response, whatever openapi.json says, or "".
func bodyFault(r *http.Request, a reply, body any) string {
	object, _ := body.(map[string]any)
	switch {
	case r.Method == "HEAD":
		if a.body != "" {
			return "a body"
		}
	case body == nil || a.Header.Get("Content-Length") != strconv.Itoa(len(a.body)):
		return "not JSON, or of another length than Content-Length " + a.Header.Get("Content-Length")
	case strings.Contains(a.body, testKey):
		return "the API key"
	case a.StatusCode >= 400:
		status := json.Number(strconv.Itoa(a.StatusCode))
		if len(object) != 3 || object["code"] != wantCodes[a.StatusCode] || object["status"] != status ||
			object["message"] == "" || a.StatusCode == 500 && object["message"] != "internal error" {
			return "not the Error of this status"
		}
	}
	return ""
}

// petPath matches the path of an animal, relative to the base URL.
var petPath = regexp.MustCompile(`^/pets/[^/]+$`)

// documentFault returns what openapi.json lacks for a response, or "".
func documentFault(r *http.Request, a reply, body any) string {
	path, below := strings.CutPrefix(r.URL.Path, apiDocument.Servers[0].URL)
	method := strings.ToLower(strings.Replace(r.Method, "HEAD", "GET", 1))
	op, found := apiDocument.Paths[petPath.ReplaceAllString(path, "/pets/{petId}")][method]
	if !below || !found || r.URL.RawPath != "" { // which is set for an unusual encoding, as of %2F
		// The operator's paths, unknown ones, wrong methods and the panic of a test are not documented.
		operators := r.URL.Path == "/healthz" || r.URL.Path == "/openapi.json"
		if !operators && !slices.Contains([]int{401, 404, 405, 500}, a.StatusCode) {
			return "no such operation"
		}
		return ""
	}

	resp, found := op.Responses[strconv.Itoa(a.StatusCode)]
	if !found {
		return "no such status"
	}
	resp = resolve(resp.Ref, apiDocument.Components.Responses, resp)
	documented := []string{"Cache-Control", "Connection", "Content-Length", "Content-Type", "Date",
		"X-Content-Type-Options"}
	for name, header := range resp.Headers {
		name = http.CanonicalHeaderKey(name)
		documented = append(documented, name)
		header = resolve(header.Ref, apiDocument.Components.Headers, header)
		if count := len(a.Header[name]); count > 1 || count == 0 && header.Required {
			return "one " + name
		}
		for _, text := range a.Header[name] {
			var value any = text
			if header.Schema.Type == "integer" {
				value = json.Number(text)
			}
			if fault := header.Schema.fault(value); fault != "" {
				return name + ": " + fault
			}
		}
	}
	for name := range a.Header {
		if !slices.Contains(documented, name) {
			return "no " + name
		}
	}
	if r.Method == "HEAD" {
		return ""
	}
	return resp.Content["application/json"].Schema.fault(body)
}

// fault returns how a value, as parseJSON returns it, breaks the schema, or "". A member that the
// schema does not name breaks it, too.
func (s schema) fault(value any) string {
	s = resolve(s.Ref, apiDocument.Components.Schemas, s)
	ok := false
	switch value := value.(type) {
	case string:
		ok = s.Type == "string" && (s.Enum == nil || slices.Contains(s.Enum, value)) &&
			(s.Pattern == nil || s.Pattern.MatchString(value))
	case json.Number:
		n, isInt := parseInt(value.String())
		ok = s.Type == "integer" && isInt && (s.Minimum == nil || n >= *s.Minimum) &&
			(s.Maximum == nil || n <= *s.Maximum)
	case []any:
		ok = s.Type == "array" && len(value) <= s.MaxItems
		for _, item := range value {
			if fault := s.Items.fault(item); fault != "" {
				return fault
			}
		}
	case map[string]any:
		ok = s.Type == "object"
		for _, name := range s.Required {
			ok = ok && value[name] != nil
		}
		for name, member := range value {
			if fault := s.Properties[name].fault(member); fault != "" {
				return name + ": " + fault
			}
		}
	}
	if !ok {
		return fmt.Sprintf("a rule that %v breaks: %+v", value, s)
	}
	return ""
}
