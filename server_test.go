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

	"modernc.org/sqlite"
)

// TestMain runs the tests, or, in a process that a test has started, the program itself.
func TestMain(m *testing.M) {
	watchSQLite()
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // returns when the test process ends, even if it is killed
			os.Exit(1)
		}()
		main()
	}
	flag.Set("test.parallel", "8") // unless -parallel is given: most tests wait for processes
	flag.Parse()
	os.Exit(m.Run())
}

// Requests and answers.

// allMethods are the methods of HTTP, and one that net/http does not know.
var allMethods = []string{
	"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY",
}

func TestAllowedMethods(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	cases := []struct {
		request string
		body    string
		status  int
		want    string
	}{
		{request: "GET /v1/pets", status: 200, want: "Rex"},
		{request: "HEAD /v1/pets", status: 200},
		{request: "POST /v1/pets", body: `{"name":"Tom","categoryId":8}`, status: 201, want: "Tom"},
		{request: "GET /v1/pets/1", status: 200, want: "Rex"},
		{request: "HEAD /v1/pets/1", status: 200},
		{request: "GET /healthz", status: 200, want: `{"status":"ok"}`},
		{request: "HEAD /healthz", status: 200},
		{request: "GET /openapi.json", status: 200, want: string(openAPI)},
		{request: "HEAD /openapi.json", status: 200},
	}
	for _, c := range cases {
		t.Run(c.request, func(t *testing.T) {
			method, target, _ := strings.Cut(c.request, " ")
			s.as(t).do(method, target, c.body).want(c.status, c.want)
		})
	}
}

func TestOtherMethodsAreNotAllowed(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	cases := []struct{ path, allow string }{
		{path: "/v1/pets", allow: "GET, HEAD, POST"},
		{path: "/v1/pets/1", allow: "GET, HEAD"},
		{path: "/v1/pets/2", allow: "GET, HEAD"}, // there is no such animal
		{path: "/v1/pets/x", allow: "GET, HEAD"},
		{path: "/healthz", allow: "GET, HEAD"},
		{path: "/openapi.json", allow: "GET, HEAD"},
	}
	for _, c := range cases {
		for _, method := range allMethods {
			if slices.Contains(strings.Split(c.allow, ", "), method) {
				continue
			}
			t.Run(method+" "+c.path, func(t *testing.T) {
				a := s.as(t).do(method, c.path, rex)

				a.want(405, `"method_not_allowed"`, "this path allows only "+c.allow+`"`)
				a.wantHeader("Allow", c.allow)
				a.wantHeader("Deprecation", "")
			})
		}
	}
	s.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestUnknownPaths(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	paths := []string{
		"/",
		"/v1",
		"/pets",
		"/V1/pets",
		"/v1/pets/",
		"/v1/pets/1/",
		"/v1/pets/1/name",
		"//v1/pets",
		"/v1//pets",
		"/v1/./pets",
		"/v1/../v1/pets",
		"/v1%2Fpets",
		"/v1/pets/%2F",
		"/v1/store/orders",
		"/metrics",
		"/debug/vars",
		"/debug/pprof/",
		"/server.go",
	}
	for _, path := range paths {
		for _, method := range []string{"GET", "POST", "DELETE", "CONNECT"} {
			t.Run(method+" "+path, func(t *testing.T) {
				a := s.as(t).do(method, path, "")

				a.want(404, `"not_found"`, "there is nothing at this path")
				a.wantHeader("Location", "") // a redirect would be to another path
			})
		}
	}
}

func TestTargetsThatAreNoPath(t *testing.T) {
	s := parallelService(t)

	for _, request := range []string{"OPTIONS *", "CONNECT example.com:443"} {
		t.Run(request, func(t *testing.T) {
			method, target, _ := strings.Cut(request, " ")

			s.as(t).do(method, target, "").want(404, "there is nothing at this path")
			s.as(t).do(method, target, "", "Authorization:").want(401)
		})
	}
}

func TestParametersOfAListAreChecked(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	const (
		limitRule = "limit must be an integer from 1 to 100"
		afterRule = "after must be the last id of a page, an integer from 0 to 9223372036854775807"
	)
	cases := []struct{ name, query, want string }{
		{name: "limit below the minimum", query: "limit=0", want: limitRule},
		{name: "limit above the maximum", query: "limit=101", want: limitRule},
		{name: "limit far above the maximum", query: "limit=9223372036854775808", want: limitRule},
		{name: "negative limit", query: "limit=-1", want: limitRule},
		{name: "limit with a plus sign", query: "limit=%2B5", want: limitRule},
		{name: "limit with a leading zero", query: "limit=05", want: limitRule},
		{name: "limit with a fraction", query: "limit=5.0", want: limitRule},
		{name: "empty limit", query: "limit=", want: limitRule},
		{name: "limit without a value", query: "limit", want: limitRule},
		{name: "status in another case", query: "status=Sold", want: statusRule},
		{name: "two statuses in one", query: "status=sold,pending", want: statusRule},
		{name: "empty status", query: "status=", want: statusRule},
		{name: "negative after", query: "after=-1", want: afterRule},
		{name: "after beyond int64", query: "after=9223372036854775808", want: afterRule},
		{name: "after with a leading zero", query: "after=007", want: afterRule},
		{name: "empty after", query: "after=", want: afterRule},
		{name: "repeated parameter", query: "limit=5&limit=5", want: `\"limit\" must not be repeated`},
		{name: "unknown parameter", query: "colour=red", want: `unknown parameter \"colour\"`},
		{name: "parameter in another case", query: "Limit=5", want: `unknown parameter \"Limit\"`},
		{name: "semicolon", query: "limit=5;after=1", want: "the query string is malformed"},
		{name: "broken escape", query: "status=%zz", want: "the query string is malformed"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).get("/v1/pets?"+c.query).want(400, `"message":"`+c.want+`"`)
		})
	}
}

func TestAllFaultsOfAListAreNamed(t *testing.T) {
	s := parallelService(t)
	parameters := func(count int) (query string) {
		for i := range count {
			query += fmt.Sprintf("&p%02d=1", i)
		}
		return query
	}

	cases := []struct{ name, query, want string }{
		{
			name:  "names a fault of each parameter",
			query: "limit=0&status=x&foo=1",
			want:  `"unknown parameter \"foo\"; limit must be an integer from 1 to 100; ` + statusRule + `"`,
		},
		{
			name:  "names two faults of one parameter",
			query: "foo=1&foo=2",
			want:  `"\"foo\" must not be repeated; unknown parameter \"foo\""`,
		},
		{name: "names up to ten", query: parameters(10), want: `; unknown parameter \"p09\""`},
		{name: "counts the eleventh", query: parameters(11), want: `\"p09\"; and 1 more"`},
		{name: "counts what is more", query: parameters(50), want: `\"p09\"; and 40 more"`},
		{
			name:  "cuts a long name",
			query: strings.Repeat("x", 5000),
			want:  `"unknown parameter \"` + strings.Repeat("x", 64) + `\""`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).get("/v1/pets?"+c.query).want(400, c.want)
		})
	}
}

// TestOrderOfFaults sends requests with several faults. Each row lacks the fault of the row above.
func TestOrderOfFaults(t *testing.T) {
	s := parallelService(t)

	const (
		guess  = "Authorization: Bearer guess"
		text   = "Content-Type: text/plain"
		badKey = "Idempotency-Key: a b"
	)
	cases := []struct {
		name    string
		request string
		headers []string
		status  int
		want    string
	}{
		{name: "API key", request: "PATCH /v1/dogs", headers: []string{guess, text, badKey}, status: 401},
		{name: "path", request: "PATCH /v1/dogs", headers: []string{text, badKey}, status: 404},
		{name: "method", request: "PATCH /v1/pets", headers: []string{text, badKey}, status: 405},
		{name: "Content-Type", request: "POST /v1/pets", headers: []string{text, badKey}, status: 415},
		{
			name:    "Idempotency-Key",
			request: "POST /v1/pets",
			headers: []string{badKey},
			status:  400,
			want:    "Idempotency-Key must be",
		},
		{name: "size of the body", request: "POST /v1/pets", status: 413},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			method, target, _ := strings.Cut(c.request, " ")
			tooLarge := strings.Repeat("x", 64<<10+1) // and not JSON

			s.as(t).do(method, target, tooLarge, c.headers...).want(c.status, c.want)
		})
	}
}

func TestContentTypeIsAccepted(t *testing.T) {
	s := parallelService(t)

	cases := []struct {
		name    string
		headers []string
	}{
		{name: "none"},
		{name: "application/json", headers: []string{"Content-Type: application/json"}},
		{name: "another case", headers: []string{"Content-Type: Application/JSON"}},
		{name: "a charset, ignored", headers: []string{`Content-Type: application/json;charset="utf-16"`}},
		{name: "another parameter", headers: []string{"Content-Type: application/json ; version=1"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).post(rex, c.headers...).want(201, `"name":"Rex"`)
		})
	}
}

func TestContentTypeIsRefused(t *testing.T) {
	s := parallelService(t)

	const rule = "Content-Type must be application/json, not "
	long := "application/json" + strings.Repeat("x", 99)
	cases := []struct {
		name   string
		values []string
		quoted string // in the message
	}{
		{name: "text", values: []string{"text/plain"}, quoted: "text/plain"},
		{name: "a form", values: []string{"multipart/form-data"}, quoted: "multipart/form-data"},
		{name: "a longer name", values: []string{"application/json5"}, quoted: "application/json5"},
		{name: "empty", values: []string{""}, quoted: ""},
		{name: "half a parameter", values: []string{"application/json; x"}, quoted: "application/json; x"},
		{name: "very long", values: []string{long}, quoted: long[:64]},
		{
			name:   "two headers",
			values: []string{"application/json", "application/json"},
			quoted: "application/json, application/json",
		},
		{
			name:   "two headers that are valid when joined",
			values: []string{`application/json; x="a`, `b"`},
			quoted: `application/json; x=\\\"a, b\\\"`, // escaped by %q and by JSON
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var headers []string
			for _, v := range c.values {
				headers = append(headers, "Content-Type: "+v)
			}

			s.as(t).post(rex, headers...).want(415, rule+`\"`+c.quoted+`\""`)
		})
	}
	s.get("/v1/pets").want(200, "[]")
}

func TestIgnoredPartsOfRequests(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	cases := []struct {
		name    string
		request string
		headers []string
		status  int
	}{
		{name: "query of a create", request: "POST /v1/pets?limit=x&a;b&%zz", status: 201},
		{name: "query of a fetch", request: "GET /v1/pets/1?limit=x&a;b&%zz", status: 200},
		{name: "Accept", request: "GET /v1/pets", headers: []string{"Accept: text/html"}, status: 200},
		{name: "body of a list", request: "GET /v1/pets", status: 200},
		{
			name:    "Content-Type of a list",
			request: "GET /v1/pets",
			headers: []string{"Content-Type: text/plain"},
			status:  200,
		},
		{
			name:    "condition of a list",
			request: "GET /v1/pets",
			headers: []string{"If-None-Match: *"},
			status:  200,
		},
		{name: "range of a list", request: "GET /v1/pets", headers: []string{"Range: bytes=0-3"}, status: 200},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			method, target, _ := strings.Cut(c.request, " ")
			s.as(t).do(method, target, rex, c.headers...).want(c.status, `"name":"Rex"`)
		})
	}
}

// TestWithoutAnAPIKey requests every path with every method. Only what openapi.json calls open is
// answered.
func TestWithoutAnAPIKey(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	open := []string{"GET /healthz", "HEAD /healthz", "GET /openapi.json", "HEAD /openapi.json"}
	paths := []string{
		"/v1/pets", "/v1/pets/1", "/v1/pets/2", "/healthz", "/openapi.json", // with an operation
		"/", "/v1", "/v1/pets/", "//v1/pets", "/healthz/", "/metrics", "/debug/pprof/", // without
	}
	for _, path := range paths {
		for _, method := range allMethods {
			request := method + " " + path
			t.Run(request, func(t *testing.T) {
				a := s.as(t).do(method, path, rex, "Authorization:")

				if slices.Contains(open, request) {
					a.want(200)
					return
				}
				a.want(401)
				a.wantHeader("Allow", "")
				if method != "HEAD" {
					a.want(401, `"unauthorized"`, "Authorization: Bearer API_KEY", "GET /openapi.json")
				}
			})
		}
	}
	s.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestAPIKeyIsAccepted(t *testing.T) {
	s := parallelService(t)

	cases := []struct{ name, header string }{
		{name: "the first key", header: "Authorization: Bearer test-key"},
		{name: "another key", header: "Authorization: Bearer other-key"},
		{name: "the scheme in another case", header: "Authorization: bEARER test-key"},
		{name: "more than one space", header: "Authorization: Bearer   test-key"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := s.as(t).get("/v1/pets", c.header).want(200, "[]")
			a.wantHeader("WWW-Authenticate", "")
		})
	}
}

func TestAPIKeyIsRefused(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	const (
		missing = `Bearer realm="animalstore"`
		invalid = `Bearer realm="animalstore", error="invalid_token"`
	)
	const valid = "Authorization: Bearer " + testKey
	cases := []struct {
		name      string
		headers   []string
		challenge string
	}{
		{name: "no header", headers: []string{"Authorization:"}, challenge: missing},
		{name: "another scheme", headers: []string{"Authorization: Basic " + testKey}, challenge: missing},
		{name: "no scheme", headers: []string{"Authorization: " + testKey}, challenge: missing},
		{name: "no token", headers: []string{"Authorization: Bearer"}, challenge: missing},
		{name: "an empty token", headers: []string{"Authorization: Bearer  "}, challenge: missing},
		{name: "two headers", headers: []string{valid, valid}, challenge: missing},
		{name: "another key", headers: []string{"Authorization: Bearer guess"}, challenge: invalid},
		{name: "a longer key", headers: []string{valid + "s"}, challenge: invalid},
		{name: "a shorter key", headers: []string{"Authorization: Bearer test-ke"}, challenge: invalid},
		{name: "another case", headers: []string{"Authorization: Bearer TEST-KEY"}, challenge: invalid},
		{name: "two keys", headers: []string{valid + "," + otherKey}, challenge: invalid},
	}
	for _, c := range cases {
		for _, target := range []string{"/v1/pets", "/v1/pets/1", "/v1/pets?access_token=" + testKey} {
			t.Run(c.name+" for "+target, func(t *testing.T) {
				s.as(t).get(target) // so that the page is in the cache

				a := s.as(t).get(target, c.headers...)

				a.want(401, `"unauthorized"`)
				a.wantHeader("WWW-Authenticate", c.challenge)
				if strings.Contains(a.body, "Rex") {
					t.Errorf("%s = %s, want no animal in it", a.request, a.body)
				}
			})
		}
	}
}

func TestBodyIsNotReadWithoutAnAPIKey(t *testing.T) {
	s := parallelService(t)
	var body readCounter
	r := httptest.NewRequest("POST", "/v1/pets", &body)

	s.doRequest(r, "Authorization: Bearer guess").want(401)

	if body.reads > 0 {
		t.Errorf("POST /v1/pets with an invalid key read its body %d times, want 0", body.reads)
	}
}

// readCounter is an endless body that counts the calls of Read.
type readCounter struct{ reads int }

func (c *readCounter) Read(p []byte) (int, error) {
	c.reads++
	return len(p), nil
}

func TestHeadIsGetWithoutABody(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	s.add("Tom", 8, "sold")

	targets := []string{
		"/v1/pets?limit=1", // it has a Link
		"/v1/pets/1",
		"/healthz",
		"/openapi.json",
		"/v1/pets?limit=0",
		"/v1/pets/3",
		"/nothing",
	}
	for _, target := range targets {
		for _, key := range []string{testKey, "guess"} {
			t.Run(target+" with "+key, func(t *testing.T) {
				get := s.as(t).do("GET", target, "", "Authorization: Bearer "+key)
				head := s.as(t).do("HEAD", target, "", "Authorization: Bearer "+key)

				get.header.Del("X-Request-Id")
				head.header.Del("X-Request-Id")
				same := maps.EqualFunc(head.header, get.header, slices.Equal)
				if head.status != get.status || !same || head.body != "" {
					t.Errorf("HEAD %s = %d %v %q, want %d %v and no body",
						target, head.status, head.header, head.body, get.status, get.header)
				}
			})
		}
	}
}

func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	panics := true
	s := &service{t: t, server: newServer(nil,
		func(x *exchange) error {
			if panics {
				panic("a mistake in the code")
			}
			return notFound(x)
		}, slog.New(slog.NewTextHandler(&log, nil)))}
	s.client = client{t: t, send: s.respond}

	a := s.get("/")
	panics = false
	next := s.get("/")

	a.want(500, `{"code":"internal","message":"internal error","status":500}`)
	next.want(404)
	first, _, _ := strings.Cut(log.String(), "\n")
	for _, words := range []string{
		"level=ERROR", "status=500", `error="panic: a mistake in the code`,
		"TestPanicInAHandler", // in the stack
		a.header.Get("X-Request-Id"),
	} {
		if !strings.Contains(first, words) {
			t.Errorf("GET / logged %s, want %q in it", first, words)
		}
	}
}

// Pages.

func TestListOfNoAnimals(t *testing.T) {
	s := parallelService(t)

	a := s.get("/v1/pets").want(200)

	if a.body != "[]\n" {
		t.Errorf("GET /v1/pets = %q, want %q", a.body, "[]\n")
	}
	a.wantHeader("Link", "")
}

func TestListPets(t *testing.T) {
	s := parallelService(t)
	var all, sold []pet
	for i := range 45 {
		p := s.add(fmt.Sprint("animal ", i), int64(-i), []string{"available", "pending", "sold"}[i%3])
		all = append(all, p)
		if i%3 == 2 {
			sold = append(sold, p)
		}
	}

	cases := []struct {
		name  string
		query string
		want  []pet
		link  string // the target of the Link
	}{
		{name: "twenty by default", query: "", want: all[:20], link: "?after=20"},
		{name: "the smallest limit", query: "?limit=1", want: all[:1], link: "?after=1&limit=1"},
		{name: "the largest limit", query: "?limit=100", want: all},
		{name: "a limit that all fit in", query: "?limit=45", want: all},
		{name: "one too many", query: "?limit=44", want: all[:44], link: "?after=44&limit=44"},
		{name: "from the start", query: "?after=0&limit=2", want: all[:2], link: "?after=2&limit=2"},
		{name: "from the middle", query: "?after=7&limit=2", want: all[7:9], link: "?after=9&limit=2"},
		{name: "the last page", query: "?after=44", want: all[44:]},
		{name: "after the last animal", query: "?after=45", want: []pet{}},
		{name: "after the last id", query: "?after=9223372036854775807", want: []pet{}},
		{name: "one status", query: "?status=sold", want: sold},
		{name: "a limit that one status fits in", query: "?status=sold&limit=15", want: sold},
		{
			name:  "a part of one status",
			query: "?limit=14&status=sold",
			want:  sold[:14],
			link:  "?after=42&limit=14&status=sold",
		},
		{
			name:  "the rest of one status",
			query: "?after=42&limit=14&status=sold",
			want:  sold[14:],
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			read := s.as(t).get("/v1/pets" + c.query)
			cached := s.as(t).get("/v1/pets" + c.query)

			link := ""
			if c.link != "" {
				link = "</v1/pets" + c.link + `>; rel="next"`
			}
			for _, a := range []reply{read, cached} {
				a.want(200)
				a.wantHeader("Link", link)
				if got := decode[[]pet](a); !slices.Equal(got, c.want) {
					t.Errorf("%s = %v, want %v", a.request, got, c.want)
				}
			}
		})
	}
}

// TestWalkSeesEachAnimalOnce follows the Links, while the list changes.
func TestWalkSeesEachAnimalOnce(t *testing.T) {
	t.Parallel()

	cases := []struct{ name, target string }{
		{name: "of all animals", target: "/v1/pets?limit=4"},
		{name: "of one status", target: "/v1/pets?limit=4&status=sold"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := parallelService(t)
			var want []int64
			for i := range 30 {
				p := s.add("Rex", 7, []string{"sold", "pending"}[i%2])
				if p.Status == "sold" || !strings.Contains(c.target, "sold") {
					want = append(want, p.ID)
				}
			}

			var got []int64
			for target := c.target; target != ""; {
				a := s.get(target).want(200)
				for _, p := range decode[[]pet](a) {
					got = append(got, p.ID)
				}
				target = a.nextPage()

				s.add("late", 7, "sold")
				s.exec("DELETE FROM pets WHERE id = ?", got[0]) // a page by number would shift
			}

			late := len(got) - len(want)
			if late < 1 || !slices.Equal(got[:len(want)], want) || got[len(want)] <= 30 {
				t.Errorf("a walk from %s = ids %v, want %v and late ones", c.target, got, want)
			}
			if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
				t.Errorf("a walk from %s = ids %v, want each once", c.target, got)
			}
		})
	}
}

func TestGetPet(t *testing.T) {
	s := parallelService(t)
	want := s.add("Rex", 7, "pending")
	s.exec("INSERT INTO pets (id, name, category_id) VALUES (3, 'Tom', 8), (?, 'Max', 9)", int64(1<<63-1))

	got := decode[pet](s.get("/v1/pets/1").want(200))
	if got != want {
		t.Errorf("GET /v1/pets/1 = %v, want %v", got, want)
	}
	s.get("/v1/pets/3").want(200, `{"id":3,"name":"Tom","categoryId":8,"status":"available"}`)
	s.get("/v1/pets/9223372036854775807").want(200, `"name":"Max"`)
}

func TestGetPetThatDoesNotExist(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "pending")
	s.exec("INSERT INTO pets (id, name, category_id) VALUES (3, 'Tom', 8)")

	ids := []string{
		"2", // not the next animal, 3
		"0",
		"4",
		"-1",
		"-9223372036854775808",
		"9223372036854775808",
		"01",
		"+1",
		"-0",
		"1.0",
		"1e0",
		"0x1",
		"%201",
		"Rex",
		strings.Repeat("9", 3000),
	}
	for _, id := range ids {
		t.Run(id[:min(len(id), 20)], func(t *testing.T) {
			s.as(t).get("/v1/pets/"+id).want(404, `"not_found"`, "there is no animal with this id")
		})
	}
}

func TestFetchIsDeprecated(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")

	cases := []struct {
		name    string
		method  string
		target  string
		headers []string
		status  int
	}{
		{name: "an animal", method: "GET", target: "/v1/pets/1", status: 200},
		{name: "an animal again, from the cache", method: "GET", target: "/v1/pets/1", status: 200},
		{name: "HEAD", method: "HEAD", target: "/v1/pets/1", status: 200},
		{name: "no animal", method: "GET", target: "/v1/pets/2", status: 404},
		{name: "no id", method: "GET", target: "/v1/pets/Rex", status: 404},
		{
			name:    "no API key",
			method:  "GET",
			target:  "/v1/pets/1",
			headers: []string{"Authorization:"},
			status:  401,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := s.as(t).do(c.method, c.target, "", c.headers...)

			a.want(c.status)
			a.wantHeader("Deprecation", "@1795132800") // 20 November 2026
			a.wantHeader("Sunset", "Thu, 05 Dec 2030 00:00:00 GMT")
			a.wantHeader("Link", `</v1/pets>; rel="successor-version"`)
		})
	}

	other := s.get("/v1/pets")
	other.wantHeader("Deprecation", "")
	other.wantHeader("Sunset", "")
}

// TestListDuringACommit requests the list before a create, during its commit, and after it.
func TestListDuringACommit(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		synctest.Wait() // until watch sleeps, which must not notice the create
		var during reply
		s.onCommit(func() { during = s.get("/v1/pets") })
		before := s.get("/v1/pets")

		s.add("Rex", 7, "sold")
		after := s.get("/v1/pets")

		for _, a := range []reply{before, during} {
			if a.body != "[]\n" {
				t.Errorf("%s before the commit = %s, want []", a.request, a.body)
			}
		}
		after.want(200, "Rex")
	})
}

func TestCreateShowsAtOnce(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		synctest.Wait() // until watch sleeps, which must not notice the create
		targets := []string{"/v1/pets", "/v1/pets?status=sold"}
		for _, target := range targets {
			s.get(target).want(200, "[]")
		}
		s.get("/v1/pets/1").want(404)

		s.add("Rex", 7, "sold")

		for _, target := range append(targets, "/v1/pets/1") {
			s.get(target).want(200, "Rex")
		}
	})
}

func TestEditShowsWithinASecond(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("old", 7, "sold")
		time.Sleep(time.Minute + time.Millisecond) // a quiet spell that ends after a look
		targets := []string{"/v1/pets", "/v1/pets?status=sold", "/v1/pets/1"}
		for _, target := range targets {
			s.get(target).want(200, "old") // and now it is in the cache
		}

		s.exec("UPDATE pets SET name = 'new'")
		time.Sleep(time.Second)

		for _, target := range targets {
			s.get(target).want(200, "new")
		}
	})
}

// TestEditDuringARead lets another program edit an animal while a request for it is reading.
func TestEditDuringARead(t *testing.T) {
	t.Parallel()

	cases := []struct {
		name      string
		meanwhile bool // the page is requested again before the read has ended
	}{
		{name: "a request after the read sees the edit"},
		{name: "a request during the read sees the edit", meanwhile: true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				s.add("old", 7, "sold")
				reading, goOn := s.holdFirstRead()
				var first reply
				var answered sync.WaitGroup
				answered.Go(func() { first = s.get("/v1/pets") })
				<-reading

				s.exec("UPDATE animals SET name = 'new'")
				time.Sleep(time.Second) // until the service has noticed it
				if c.meanwhile {
					s.get("/v1/pets").want(200, "new")
				}
				close(goOn)
				answered.Wait()

				first.want(200, "old")
				s.get("/v1/pets").want(200, "new")
			})
		})
	}
}

// holdFirstRead makes the service wait when it reads an animal for the first time. It then closes
// reading, and waits until goOn is closed. Under a fake clock, it returns when the service has
// noticed the change of the database that this needs.
func (s *service) holdFirstRead() (reading, goOn chan struct{}) {
	s.t.Helper()
	reading, goOn = make(chan struct{}), make(chan struct{})
	var held atomic.Bool
	s.onRead(func() error {
		if held.CompareAndSwap(false, true) {
			close(reading)
			<-goOn
		}
		return nil
	})
	time.Sleep(time.Second)
	return reading, goOn
}

func TestErrorIsNotCached(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		synctest.Wait() // until watch sleeps: a change would empty the cache
		s.add("Rex", 7, "sold")
		for _, target := range []string{"/v1/pets", "/v1/pets?status=sold", "/v1/pets/1"} {
			s.onRead(func() error { return errors.New("unreadable") })
			a := s.get(target).want(500, `"internal error"`)
			if strings.Contains(a.body, "unreadable") {
				t.Errorf("%s = %s, want no word of the cause", a.request, a.body)
			}

			s.onRead(func() error { return nil })
			s.get(target).want(200, "Rex")
		}
	})
}

// TestFailedReadsReleaseTheirConnections fails more reads than there are connections. A connection
// that is not released would be missing later, and requests would wait forever.
func TestFailedReadsReleaseTheirConnections(t *testing.T) {
	s := parallelService(t)
	for range 3 {
		s.add("Rex", 7, "sold")
	}

	cases := []struct {
		name    string
		target  string
		animals int // that can be read before the error
		status  int
	}{
		{name: "a list, at its first animal", target: "/v1/pets?limit=8", status: 500},
		{name: "a list, at its second animal", target: "/v1/pets?limit=9", animals: 1, status: 500},
		{name: "a list of one status", target: "/v1/pets?status=sold", status: 500},
		{name: "an animal", target: "/v1/pets/1", status: 500},
		{name: "the health check", target: "/healthz", status: 503},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for range 2 * len(s.connections()) {
				read := 0
				s.onRead(func() error {
					if read++; read > c.animals {
						return errors.New("unreadable")
					}
					return nil
				})
				s.as(t).get(c.target).want(c.status)
			}

			s.onRead(func() error { return nil })
			s.as(t).get(c.target).want(200)
		})
	}
}

// TestReadsOfAnotherTypeReleaseTheirConnections fails while a row is converted, which leaves rows
// unread.
func TestReadsOfAnotherTypeReleaseTheirConnections(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	s.add("Tom", 8, "sold")

	s.exec(`ALTER TABLE pets RENAME TO animals;
		CREATE VIEW pets AS SELECT id, NULL AS name, category_id, status FROM animals`)
	for range 2 * len(s.connections()) {
		s.get("/v1/pets").want(500)
		s.get("/v1/pets/1").want(500)
	}
	s.exec("DROP VIEW pets; ALTER TABLE animals RENAME TO pets")

	s.get("/v1/pets").want(200, "Rex", "Tom")
	s.get("/v1/pets/1").want(200, "Rex")
}

// TestCacheStaysSmall requests many pages. It measures memory, and so does not run in parallel.
func TestCacheStaysSmall(t *testing.T) {
	cases := []struct {
		name     string
		requests int
		target   func(i int) string
	}{
		{
			name:     "large pages",
			requests: 600,
			target:   func(i int) string { return "/v1/pets?limit=100" + strings.Repeat("&", i) },
		},
		{
			name:     "long URLs",
			requests: 2000,
			target: func(i int) string {
				return fmt.Sprint("/v1/pets?after=", 10000+i, strings.Repeat("&", 9000))
			},
		},
		{
			name:     "short URLs in long request lines",
			requests: 2000,
			target: func(i int) string {
				return fmt.Sprint("http://", strings.Repeat("x", 10000), "/v1/pets/", 1+i)
			},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := newService(quiet{t}) // the log of a test is kept in memory, too
			s.get("/v1/pets").want(200, "[]")
			s.addMany(c.requests, strings.Repeat("x", 255))
			eventually(t, "the service notices the animals, and empties its cache", func() bool {
				return s.get("/v1/pets").body != "[]\n"
			})
			before := heapInUse()

			for i := range c.requests {
				if status := s.statusOf("GET", c.target(i), ""); status != 200 {
					t.Fatalf("GET %.50s = %d, want 200", c.target(i), status)
				}
			}

			grown := heapInUse() - before
			runtime.KeepAlive(s)
			if grown > 12<<20 {
				t.Errorf("%d requests: the heap grew by %d bytes, want 12 MiB at most", c.requests, grown)
			}
		})
	}
}

// quiet is a testing.TB whose service does not log to the test.
type quiet struct{ testing.TB }

// heapInUse returns the number of bytes in the heap that are still needed.
func heapInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Creates.

func TestCreatePet(t *testing.T) {
	s := parallelService(t)

	cases := []struct{ name, body, want string }{
		{
			name: "an animal without a status is available",
			body: `{"name":"Rex","categoryId":7}`,
			want: `"name":"Rex","categoryId":7,"status":"available"`,
		},
		{
			name: "members in another order, with white space",
			body: ` { "status" : "sold" , "categoryId" : -1 , "name" : " a b " } ` + "\r\n\t",
			want: `"name":" a b ","categoryId":-1,"status":"sold"`,
		},
		{
			name: "characters of HTML come back as they are",
			body: `{"name":"<&>","categoryId":0,"status":"pending"}`,
			want: `"name":"<&>","categoryId":0,"status":"pending"`,
		},
		{
			name: "escapes, in the name of a member too",
			body: `{"n\u0061me":"\"\\\/\b\f\n\r\t","categoryId":1}`,
			want: `"name":"\"\\/\b\f\n\r\t","categoryId":1,"status":"available"`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := s.as(t).post(c.body).want(201)

			id := decode[pet](a).ID
			if want := fmt.Sprintf("{\"id\":%d,%s}\n", id, c.want); a.body != want {
				t.Errorf("POST %s = %s, want %s", c.body, a.body, want)
			}
			a.wantHeader("Location", fmt.Sprint("/v1/pets/", id))
			a.wantHeader("Idempotency-Replayed", "")
		})
	}
}

func TestIDsGrowAndAreNotUsedAgain(t *testing.T) {
	s := parallelService(t)

	s.post(rex).want(201, `"id":1,`)
	s.post(rex).want(201, `"id":2,`)
	s.exec("DELETE FROM pets")
	s.post(rex).want(201, `"id":3,`)
}

// validBodies are unusual, but accepted.
var validBodies = []string{
	"{\r\n\t\"name\":\t\"x\",\r\n\t\"categoryId\":\r\n1,\t\"status\"\n:\r\"pending\"\t}",
	`{"name":"}]:,{[\"\\","categoryId":-9223372036854775808}`,
	`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`,
	`{"name":"\uD83D\uDC36\u00e9\\uD83D","categoryId":1}`,
	`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":0,"status":"available"}`,
}

func TestAnimalsAreStoredAsSent(t *testing.T) {
	s := parallelService(t)

	for _, body := range validBodies {
		t.Run(body, func(t *testing.T) {
			c := s.as(t)
			a := c.post(body).want(201)
			c.wantAsSent(body, a)
		})
	}
}

// wantAsSent checks that a, the response to a create, has the animal that body describes, and that
// the animal reads back the same.
func (c *client) wantAsSent(body string, a reply) {
	c.t.Helper()
	sent, err := parseJSON(body)
	must(c.t, err)
	stored, err := parseJSON(a.body)
	must(c.t, err)

	for name, value := range sent.(map[string]any) {
		if at(stored, name) != value {
			c.t.Errorf("POST %q = %s, want the %s that was sent", body, a.body, name)
		}
	}
	if back := c.get(a.header.Get("Location")); back.body != a.body {
		c.t.Errorf("%s = %s, want %s", back.request, back.body, a.body)
	}
}

// TestClientThatIsGone sends requests whose context has ended, as net/http does for a client that
// has closed its connection.
func TestClientThatIsGone(t *testing.T) {
	s := parallelService(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	create := httptest.NewRequestWithContext(gone, "POST", "/v1/pets", strings.NewReader(rex))
	s.doRequest(create).want(201)
	s.doRequest(httptest.NewRequestWithContext(gone, "GET", "/v1/pets/1", nil)).want(200, "Rex")
	s.doRequest(httptest.NewRequestWithContext(gone, "GET", "/v1/pets", nil)).want(200, "Rex")
}

// Rules in the messages about a body.
const (
	nameRule = "name must be a string of 1 to 255 characters, not all white space, " +
		"without U+0000, U+FFFD or unpaired surrogates"
	categoryRule = "categoryId must be an integer from -9223372036854775808 to 9223372036854775807, " +
		"with no fraction, exponent or quotes"
)

func TestBodyThatIsNoObject(t *testing.T) {
	s := parallelService(t)

	const rule = "the body must be one JSON object"
	cases := []struct{ name, body, want string }{
		{name: "nothing", body: "", want: rule + ": unexpected end of JSON input"},
		{name: "white space", body: " ", want: rule + ": unexpected end of JSON input"},
		{name: "null", body: "null", want: rule},
		{name: "an array", body: `["name","Rex","categoryId",7]`, want: rule},
		{name: "an array of one object", body: "[" + rex + "]", want: rule},
		{name: "a string", body: `"name"`, want: rule},
		{
			name: "half an object",
			body: `{"name":"x","categoryId":1 `,
			want: rule + ": unexpected end of JSON input",
		},
		{
			name: "a trailing comma",
			body: `{"name":"x","categoryId":1,}`,
			want: rule + ": invalid character '}' looking for beginning of object key string",
		},
		{
			name: "two objects",
			body: rex + "{}",
			want: rule + ": invalid character '{' after top-level value",
		},
		{
			name: "a number with a leading zero",
			body: `{"name":"x","categoryId":01}`,
			want: rule + ": invalid character '1' after object key:value pair",
		},
		{name: "invalid UTF-8", body: "{\"name\":\"\xff\",\"categoryId\":1}", want: "the body must be UTF-8"},
		{name: "an encoded surrogate", body: "{\"name\":\"\xed\xa0\x80\"}", want: "the body must be UTF-8"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).post(c.body).want(400, `"message":"`+c.want+`"`)
		})
	}
	s.get("/v1/pets").want(200, "[]")
}

func TestMembersOfABodyAreChecked(t *testing.T) {
	s := parallelService(t)

	cases := []struct{ name, body, want string }{
		{name: "no name", body: `{"categoryId":1}`, want: "name is required"},
		{name: "no categoryId", body: `{"name":"x"}`, want: "categoryId is required"},
		{name: "null as name", body: `{"name":null,"categoryId":1}`, want: nameRule},
		{name: "a number as name", body: `{"name":1,"categoryId":1}`, want: nameRule},
		{name: "an empty name", body: `{"name":"","categoryId":1}`, want: nameRule},
		{name: "a name of white space", body: `{"name":" \u00a0\u2003\u3000\u0085","categoryId":1}`, want: nameRule},
		{name: "U+0000 in the name", body: `{"name":"a\u0000b","categoryId":1}`, want: nameRule},
		{name: "U+FFFD in the name", body: `{"name":"a\uFFFDb","categoryId":1}`, want: nameRule},
		{name: "half a surrogate pair", body: `{"name":"\uD83D","categoryId":1}`, want: nameRule},
		{name: "a surrogate and another escape", body: `{"name":"\uD800\uE000","categoryId":1}`, want: nameRule},
		{
			name: "a name of 256 characters",
			body: `{"name":"` + strings.Repeat("é", 256) + `","categoryId":1}`,
			want: nameRule,
		},
		{name: "null as categoryId", body: `{"name":"x","categoryId":null}`, want: categoryRule},
		{name: "a string as categoryId", body: `{"name":"x","categoryId":"1"}`, want: categoryRule},
		{name: "a fraction", body: `{"name":"x","categoryId":1.0}`, want: categoryRule},
		{name: "an exponent", body: `{"name":"x","categoryId":1e2}`, want: categoryRule},
		{name: "minus zero", body: `{"name":"x","categoryId":-0}`, want: categoryRule},
		{name: "more than int64", body: `{"name":"x","categoryId":9223372036854775808}`, want: categoryRule},
		{name: "less than int64", body: `{"name":"x","categoryId":-9223372036854775809}`, want: categoryRule},
		{name: "null as status", body: `{"name":"x","categoryId":1,"status":null}`, want: statusRule},
		{name: "an empty status", body: `{"name":"x","categoryId":1,"status":""}`, want: statusRule},
		{name: "a status in another case", body: `{"name":"x","categoryId":1,"status":"Sold"}`, want: statusRule},
		{name: "an array as status", body: `{"status":["sold",[{}]],"name":"x","categoryId":1}`, want: statusRule},
		{name: "an unknown member", body: `{"name":"x","categoryId":1,"id":5}`, want: `unknown member \"id\"`},
		{
			name: "a member with a capital letter",
			body: `{"Name":"x","categoryId":1}`,
			want: `unknown member \"Name\"; name is required`,
		},
		{
			name: "a member in another case",
			body: `{"name":"x","categoryID":1}`,
			want: `unknown member \"categoryID\"; categoryId is required`,
		},
		{
			name: "a repeated member",
			body: `{"name":"x","name":"x","categoryId":1}`,
			want: `\"name\" must not be repeated`,
		},
		{
			name: "a member that an escape repeats",
			body: `{"name":"x","n\u0061me":"y","categoryId":1}`,
			want: `\"name\" must not be repeated`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).post(c.body).want(400, `"message":"`+c.want+`"`)
		})
	}
	s.get("/v1/pets").want(200, "[]")
}

func TestAllFaultsOfABodyAreNamed(t *testing.T) {
	s := parallelService(t)

	long := strings.Repeat("x", 99)
	cut := `\"` + long[:64] + `\"`
	cases := []struct{ name, body, want string }{
		{
			name: "names all that is missing",
			body: `{}`,
			want: `"name is required; categoryId is required"`,
		},
		{
			name: "names a fault of each member",
			body: `{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`,
			want: `"` + statusRule + "; " + nameRule + `; unknown member \"x\"; ` + categoryRule + `"`,
		},
		{
			name: "cuts a long name",
			body: `{"name":"x","categoryId":1,"` + long + `":1,"` + long + `":1}`,
			want: `"unknown member ` + cut + "; " + cut + " must not be repeated; unknown member " + cut + `"`,
		},
		{
			name: "names ten and counts what is more",
			body: `{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1}`,
			want: `unknown member \"j\"; and 2 more"`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).post(c.body).want(400, c.want)
		})
	}
}

func TestSizeOfABody(t *testing.T) {
	s := parallelService(t)

	largest := rex + strings.Repeat(" ", 64<<10-len(rex))
	cases := []struct {
		name   string
		body   io.Reader
		status int
		want   string
	}{
		{name: "the largest", body: strings.NewReader(largest), status: 201, want: "Rex"},
		{name: "the largest, chunked", body: chunked(largest), status: 201, want: "Rex"},
		{name: "one byte more", body: strings.NewReader(largest + " "), status: 413, want: "65536 bytes"},
		{name: "one byte more, chunked", body: chunked(largest, " "), status: 413, want: "65536 bytes"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest("POST", "/v1/pets", c.body)
			s.as(t).doRequest(r).want(c.status, c.want)
		})
	}
	s.wantQuery("SELECT count(*) FROM pets", "2")
}

// chunked returns the body of a request without Content-Length.
func chunked(parts ...string) io.Reader {
	var readers []io.Reader
	for _, part := range parts {
		readers = append(readers, strings.NewReader(part))
	}
	return io.MultiReader(readers...)
}

func TestInterruptedBody(t *testing.T) {
	s := parallelService(t)

	for _, received := range []string{"", `{"name":`, rex} {
		t.Run("after "+received, func(t *testing.T) {
			body := io.MultiReader(strings.NewReader(received), iotest.ErrReader(io.ErrUnexpectedEOF))
			r := httptest.NewRequest("POST", "/v1/pets", body)
			s.as(t).doRequest(r).want(400, "the request body could not be read to its end")
		})
	}
	s.get("/v1/pets").want(200, "[]")
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()

	cases := []struct {
		name      string
		meanwhile string // SQL, run before the repeat
		repeat    string
		stored    string // animals, at the end
	}{
		{name: "the same body", repeat: rex, stored: "1"},
		{
			name:   "the same animal in another notation",
			repeat: `{ "status":"available", "categoryId":7, "name":"\u0052ex" }`,
			stored: "1",
		},
		{
			name:      "after an edit",
			meanwhile: "UPDATE pets SET name = 'edited', status = 'sold'",
			repeat:    rex,
			stored:    "1",
		},
		{name: "after a deletion", meanwhile: "DELETE FROM pets", repeat: rex, stored: "0"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := parallelService(t)
			first := s.post(rex, "Idempotency-Key: k").want(201)
			s.exec(c.meanwhile)

			again := s.post(c.repeat, "Idempotency-Key: k").want(201)

			if again.body != first.body {
				t.Errorf("POST %s again = %s, want %s", c.repeat, again.body, first.body)
			}
			again.wantHeader("Location", first.header.Get("Location"))
			again.wantHeader("Idempotency-Replayed", "true")
			first.wantHeader("Idempotency-Replayed", "")
			s.wantQuery("SELECT count(*) FROM pets", c.stored)
		})
	}
}

func TestIdempotencyKeyAfterARestart(t *testing.T) {
	s := parallelService(t)
	first := s.post(rex, "Idempotency-Key: k").want(201)
	must(t, s.close())

	s = openService(t, s.file)
	again := s.post(rex, "Idempotency-Key: k").want(201, first.body)

	again.wantHeader("Idempotency-Replayed", "true")
	s.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestIdempotencyKeyOfAnotherAnimal(t *testing.T) {
	s := parallelService(t)
	first := s.post(rex, "Idempotency-Key: k").want(201)

	cases := []struct{ name, body string }{
		{name: "another name", body: `{"name":"rex","categoryId":7}`},
		{name: "another category", body: `{"name":"Rex","categoryId":8}`},
		{name: "another status", body: `{"name":"Rex","categoryId":7,"status":"sold"}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := s.as(t).post(c.body, "Idempotency-Key: k")

			a.want(422, `"idempotency_key_reused"`, "this Idempotency-Key was used for another animal")
			a.wantHeader("Location", "")
			a.wantHeader("Idempotency-Replayed", "")
		})
	}

	s.post(rex, "Idempotency-Key: k").want(201, first.body)
	s.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestIdempotencyKeysAreApart(t *testing.T) {
	s := parallelService(t)
	first := s.post(rex, "Idempotency-Key: k").want(201)

	cases := []struct {
		name    string
		headers []string
	}{
		{name: "no key"},
		{name: "no key again"},
		{name: "another key", headers: []string{"Idempotency-Key: k2"}},
		{name: "the key in another case", headers: []string{"Idempotency-Key: K"}},
		{
			name:    "the key of another caller",
			headers: []string{"Idempotency-Key: k", "Authorization: Bearer " + otherKey},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := s.as(t).post(rex, c.headers...).want(201)

			a.wantHeader("Idempotency-Replayed", "")
			if a.body == first.body {
				t.Errorf("POST with %q = %s, want an animal of its own", c.headers, a.body)
			}
		})
	}
	s.post(rex, "Idempotency-Key: k").want(201, first.body)
}

func TestIdempotencyKeyIsChecked(t *testing.T) {
	s := parallelService(t)

	const rule = "Idempotency-Key must be one value of 1 to 255 visible ASCII characters"
	longest := "!" + strings.Repeat("~", 254)
	cases := []struct {
		name   string
		values []string
		status int
		want   string
	}{
		{name: "longest", values: []string{longest}, status: 201},
		{name: "too long", values: []string{longest + "~"}, status: 400, want: rule},
		{name: "empty", values: []string{""}, status: 400, want: rule},
		{name: "a space", values: []string{"a b"}, status: 400, want: rule},
		{name: "a control character", values: []string{"\x7f"}, status: 400, want: rule},
		{name: "not ASCII", values: []string{"é"}, status: 400, want: rule},
		{name: "two headers", values: []string{"a", "a"}, status: 400, want: rule},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var headers []string
			for _, v := range c.values {
				headers = append(headers, "Idempotency-Key: "+v)
			}

			s.as(t).post(rex, headers...).want(c.status, c.want)
		})
	}
	s.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestInvalidCreateLeavesItsIdempotencyKeyUnused(t *testing.T) {
	s := parallelService(t)

	s.post(`{"name":1}`, "Idempotency-Key: k").want(400, "name must be")
	s.post(rex, "Idempotency-Key: k").want(201).wantHeader("Idempotency-Replayed", "")
	s.post(`{"name":1}`, "Idempotency-Key: k").want(400, "name must be") // and not 422
}

func TestConcurrentRepeatsAddOneAnimal(t *testing.T) {
	s := parallelService(t)
	var replies [20]reply
	var answered sync.WaitGroup

	for i := range replies {
		answered.Go(func() { replies[i] = s.post(rex, "Idempotency-Key: k") })
	}
	answered.Wait()

	first := 0
	for _, a := range replies {
		a.want(201, replies[0].body)
		if a.header.Get("Idempotency-Replayed") == "" {
			first++
		}
	}
	if first != 1 {
		t.Errorf("%d of %d responses are not replayed, want 1", first, len(replies))
	}
	s.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestIdempotencyKeyIsRememberedForADay(t *testing.T) {
	cases := []struct {
		name     string
		age      time.Duration
		replayed string // the header of a repeat
	}{
		{name: "remembered for 24 hours", age: 24 * time.Hour, replayed: "true"},
		{name: "forgotten a second later", age: 24*time.Hour + time.Second, replayed: ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				s.post(rex, "Idempotency-Key: k").want(201)
				s.ageIdempotencyKeys(c.age)

				s.post(rex, "Idempotency-Key: k").want(201).
					wantHeader("Idempotency-Replayed", c.replayed)
				s.post(rex, "Idempotency-Key: k").want(201).
					wantHeader("Idempotency-Replayed", "true")
			})
		})
	}
}

// TestIdempotencyKeysDoNotPileUp checks that each create that brings a key deletes two that have
// expired, and no others.
func TestIdempotencyKeysDoNotPileUp(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		for i := range 5 {
			s.post(rex, fmt.Sprint("Idempotency-Key: old-", i)).want(201)
		}
		s.ageIdempotencyKeys(25 * time.Hour)

		s.post(rex).want(201) // without a key
		s.wantQuery("SELECT count(*) FROM idempotency_keys", "5")
		for i, want := range []string{"4", "3", "3", "4"} {
			s.post(rex, fmt.Sprint("Idempotency-Key: new-", i)).want(201)
			s.wantQuery("SELECT count(*) FROM idempotency_keys", want)
		}
		s.wantQuery("SELECT count(*) FROM idempotency_keys WHERE key LIKE 'new-%'", "4")
	})
}

// ageIdempotencyKeys sets back the time at which the keys were used. They must just have been used,
// under a fake clock.
func (s *service) ageIdempotencyKeys(age time.Duration) {
	s.t.Helper()
	now := fmt.Sprint(time.Now().Unix())
	s.wantQuery("SELECT group_concat(DISTINCT created) FROM idempotency_keys", now)
	s.exec("UPDATE idempotency_keys SET created = ?", time.Now().Add(-age).Unix())
}

// TestWaitingCreatesShareOneCommit adds animals to a locked database, until it happened that one
// commit stored all that waited. Creations may come too late for that, but always get their
// results.
func TestWaitingCreatesShareOneCommit(t *testing.T) {
	s := parallelService(t)
	var commits atomic.Int64
	s.onCommit(func() { commits.Add(1) })

	rounds := 0
	eventually(t, "one commit stores all", func() bool {
		rounds++
		commits.Store(0)
		statuses := s.createWhileLocked(20, fmt.Sprint("round ", rounds))

		if statuses[201] != 10 || statuses[422] != 10 {
			t.Fatalf("10 pairs of creates with one Idempotency-Key = %v, want 10 each of 201 and 422", statuses)
		}
		return commits.Load() == 1
	})
	s.wantQuery("SELECT count(*) FROM pets", fmt.Sprint(10*rounds))
}

// createWhileLocked adds animals while the database is locked, two different ones with each
// Idempotency-Key, and unlocks it. It returns how often each status came.
func (s *service) createWhileLocked(count int, name string) (statuses map[int]int) {
	s.t.Helper()
	unlock := s.lock()
	replies := make([]reply, count)
	var begun, answered sync.WaitGroup
	begun.Add(count)
	for i := range replies {
		answered.Go(func() {
			body := encode(newPet{Name: fmt.Sprint(name, " ", i), CategoryID: 7, Status: "sold"})
			key := strings.ReplaceAll(name, " ", "-") + "-" + strconv.Itoa(i/2)
			begun.Done()
			replies[i] = s.post(string(body), "Idempotency-Key: "+key)
		})
	}
	begun.Wait()
	unlock()
	answered.Wait()

	statuses = map[int]int{}
	for _, a := range replies {
		statuses[a.status]++
	}
	return statuses
}

// The log.

func TestLogOfARequest(t *testing.T) {
	t.Parallel()

	const key = " key_sha256=62af8704" // the first bytes of the SHA-256 sum of testKey
	long := strings.Repeat("x", 1024)
	cases := []struct {
		name     string
		request  string
		headers  []string
		status   int
		has, not []string
	}{
		{
			name:    "a list, without its query",
			request: "GET /v1/pets?after=7",
			status:  200,
			has: []string{
				"level=INFO msg=request id=",
				" client=192.0.2.1:1234 method=GET path=/v1/pets status=200 bytes=3 duration=0s" + key + "\n",
			},
			not: []string{"after", "error"},
		},
		{name: "no body", request: "HEAD /v1/pets", status: 200, has: []string{" bytes=0 "}, not: []string{"error"}},
		{
			name:    "an X-Request-Id of the client",
			request: "GET /v1/pets",
			headers: []string{"X-Request-Id: mine"},
			status:  200,
			not:     []string{"mine"},
		},
		{
			name:    "a fault of the client",
			request: "GET /v1/pets?limit=0",
			status:  400,
			has:     []string{"level=INFO", key, ` error="limit must be an integer from 1 to 100"`},
		},
		{
			name:    "an invalid API key",
			request: "GET /v1/pets",
			headers: []string{"Authorization: Bearer guess"},
			status:  401,
			has:     []string{"level=INFO", ` error="a valid API key is required`},
			not:     []string{"guess", "key_sha256="},
		},
		{
			name:    "a line break in the path",
			request: "GET /v1/pets/x%0Ay",
			status:  404,
			has:     []string{` path="/v1/pets/x\ny" status=404`},
		},
		{
			name:    "a long method and path",
			request: long + "y /" + long + "y",
			status:  404,
			has:     []string{" method=" + long + " path=/" + long[1:] + " status=404 "},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			withFakeClock(t, func(t *testing.T, s *service) {
				log.Reset()

				method, target, _ := strings.Cut(c.request, " ")
				a := s.do(method, target, "", c.headers...).want(c.status)

				a.wantLog(log.String(), c.has, c.not)
			}, &log)
		})
	}
}

// TestCauseIsOnlyLogged checks that the log has the cause of a 500 or 503, and the response not.
func TestCauseIsOnlyLogged(t *testing.T) {
	cases := []struct {
		name   string
		target string
		status int
	}{
		{name: "of a list", target: "/v1/pets", status: 500},
		{name: "of a fetch", target: "/v1/pets/1", status: 500},
		{name: "of the health check", target: "/healthz", status: 503},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			withFakeClock(t, func(t *testing.T, s *service) {
				s.add("Rex", 7, "sold")
				s.onRead(func() error { return errors.New("the dog ate it") })
				log.Reset()

				a := s.get(c.target).want(c.status)

				a.wantLog(log.String(), []string{"level=ERROR", "the dog ate it"}, nil)
				if strings.Contains(a.body, "dog") {
					t.Errorf("%s = %s, want no word of the cause", a.request, a.body)
				}
			}, &log)
		})
	}
}

// wantLog checks that a log consists of one line, that of the request which a answers. It must
// contain the words of has, and none of not.
func (a reply) wantLog(log string, has, not []string) {
	a.t.Helper()
	if strings.Count(log, "\n") != 1 {
		a.t.Errorf("%s logged %s, want one line", a.request, log)
	}
	has = append(has, " id="+a.header.Get("X-Request-Id")+" ", fmt.Sprintf(" status=%d ", a.status))
	for _, words := range has {
		if !strings.Contains(log, words) {
			a.t.Errorf("%s logged %s, want %q in it", a.request, log, words)
		}
	}
	for _, words := range append(not, testKey) {
		if strings.Contains(log, words) {
			a.t.Errorf("%s logged %s, want no %q in it", a.request, log, words)
		}
	}
}

func TestDurationInTheLog(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("Rex", 7, "sold")
		s.onRead(func() error {
			time.Sleep(3 * time.Second)
			return nil
		})
		log.Reset()

		s.get("/v1/pets/1").want(200)

		if !strings.Contains(log.String(), " duration=3s ") {
			t.Errorf("a request that took 3 s logged %s", log.String())
		}
	}, &log)
}

func TestRequestIDsDiffer(t *testing.T) {
	s := parallelService(t)

	a, b := s.get("/v1/pets"), s.get("/v1/pets") // the second from the cache

	if a.header.Get("X-Request-Id") == b.header.Get("X-Request-Id") {
		t.Errorf("two requests have the X-Request-Id %s", a.header.Get("X-Request-Id"))
	}
}

// API keys.

func TestKeysInTheEnvironment(t *testing.T) {
	t.Parallel()
	wantKeys(t, config{apiKeys: " four, #five ,,one", apiKeysSet: true}, keyCheck{
		accepted: []string{"four", "#five", "one"},
		refused:  []string{"", ",", "five", "four, #five", " four, #five ,,one", testKey},
	})
}

func TestKeysInAFile(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		file string
		keys keyCheck
	}{
		{
			name: "one key without a line break",
			file: "one",
			keys: keyCheck{accepted: []string{"one"}, refused: []string{"", "on"}},
		},
		{
			name: "white space and blank lines",
			file: "\n  one \n\n\ttwo\t\n   \n",
			keys: keyCheck{accepted: []string{"one", "two"}, refused: []string{""}},
		},
		{
			name: "comments, which begin a line",
			file: "# old, older\none\n\t# oldest\ntwo#2\n#three",
			keys: keyCheck{
				accepted: []string{"one", "two#2"},
				refused:  []string{"old", "older", "# old", "# oldest", "two", "#three", "three"},
			},
		},
		{
			name: "line breaks of Windows",
			file: "one\r\n\r\ntwo\r\n",
			keys: keyCheck{accepted: []string{"one", "two"}, refused: []string{"", "one\r"}},
		},
		{
			name: "a byte order mark before a key",
			file: "\ufeffone\n",
			keys: keyCheck{accepted: []string{"one"}, refused: []string{"\ufeffone"}},
		},
		{
			name: "a byte order mark before a comment",
			file: "\ufeff# none\none\n",
			keys: keyCheck{accepted: []string{"one"}, refused: []string{"# none"}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			wantKeys(t, config{keysFile: writeFile(t, t.TempDir(), "keys", c.file)}, c.keys)
		})
	}
}

func TestKeysInTheEnvironmentAndAFile(t *testing.T) {
	t.Parallel()
	file := writeFile(t, t.TempDir(), "keys", "old\nboth\n")

	wantKeys(t, config{keysFile: file, apiKeys: "both,new", apiKeysSet: true}, keyCheck{
		accepted: []string{"old", "both", "new"},
		refused:  []string{"", "old,both"},
	})
}

func TestKeysInAFileAreEnough(t *testing.T) {
	t.Parallel()
	file := writeFile(t, t.TempDir(), "keys", "one\n")

	wantKeys(t, config{keysFile: file, apiKeys: " ,", apiKeysSet: true}, keyCheck{
		accepted: []string{"one"},
		refused:  []string{"", ","},
	})
}

// TestKeysOfAProcess checks that the real settings reach loadKeys.
func TestKeysOfAProcess(t *testing.T) {
	t.Parallel()
	file := writeFile(t, t.TempDir(), "keys", "filed-key\n")

	p := startCommand(t, command(t, execSelf, "-keys", file))

	p.get("/v1/pets").want(200) // with testKey, which is in API_KEYS
	p.get("/v1/pets", "Authorization: Bearer filed-key").want(200)
	p.get("/v1/pets", "Authorization: Bearer "+otherKey).want(401)
}

func TestServiceWithAKeyOnAnyAddress(t *testing.T) {
	t.Parallel()

	p := startCommand(t, command(t, execSelf, "-addr", "0.0.0.0:0"))

	p.get("/v1/pets").want(200)
	_, log := p.stop(syscall.SIGTERM)
	if strings.Contains(log, testKey) || strings.Contains(log, "api_key") {
		t.Errorf("the log contains an API key: %s", log)
	}
}

func TestServiceWithoutAKeyMakesOne(t *testing.T) {
	t.Parallel()

	p := startCommand(t, command(t, "unset API_KEYS; "+execSelf))

	key := p.madeKey()
	p.get("/v1/pets", "Authorization: Bearer "+key).want(200)
	p.get("/v1/pets", "Authorization: Bearer "+testKey).want(401)
	p.get("/v1/pets", "Authorization:").want(401)
	_, log := p.stop(syscall.SIGTERM)
	if strings.Count(log, key) != 1 || !strings.Contains(log, " keys=1 ") {
		t.Errorf("want the key once, and keys=1, in the log: %s", log)
	}
}

func TestEachStartMakesAnotherKey(t *testing.T) {
	t.Parallel()

	first := startCommand(t, command(t, "unset API_KEYS; "+execSelf)).madeKey()
	second := startCommand(t, command(t, "unset API_KEYS; "+execSelf)).madeKey()

	if first == second {
		t.Errorf("both starts made the key %s", first)
	}
}

// Settings.

func TestHelp(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"-h", "-help", "--help"} {
		t.Run(flag, func(t *testing.T) {
			dir := t.TempDir()

			o := runWith(t, dir, nil, flag)

			o.wantSuccess(t, dir)
			for _, setting := range []string{
				"Usage: animalstore", "-addr HOST:PORT", `(default "127.0.0.1:8080")`, "-db FILE",
				"-keys FILE", "$API_KEYS", "-tls-cert FILE", "-tls-key FILE", "-backup FILE", "-version",
			} {
				if !strings.Contains(o.stdout, setting) {
					t.Errorf("want %q in %s", setting, o)
				}
			}
		})
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()

	o := runWith(t, dir, nil, "-version")

	o.wantSuccess(t, dir)
	if o.stdout != "animalstore "+buildVersion()+"\n" {
		t.Errorf("want the version %s in %s", buildVersion(), o)
	}
}

func TestMistakesInTheCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{
			name: "a stray argument",
			args: []string{"serve"},
			want: `unexpected argument "serve"`,
		},
		{
			name: "a stray argument after a flag",
			args: []string{"-addr", "127.0.0.1:0", "two\nlines"},
			want: `unexpected argument "two\nlines"`,
		},
		{
			name: "an unknown flag",
			args: []string{"-port", "80"},
			want: "flag provided but not defined: -port",
		},
		{
			name: "an API key as a flag",
			args: []string{"-api-key", "secret"},
			want: "flag provided but not defined: -api-key",
		},
		{
			name: "a flag without its value",
			args: []string{"-addr"},
			want: "flag needs an argument: -addr",
		},
		{
			name: "a certificate without its key",
			args: []string{"-tls-cert", "x"},
			want: "-tls-cert and -tls-key go together: give both or neither",
		},
		{
			name: "the key of a certificate alone",
			args: []string{"-tls-key", "x"},
			want: "-tls-cert and -tls-key go together: give both or neither",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()

			o := runWith(t, dir, map[string]string{"API_KEYS": "secret"}, c.args...)

			o.wantError(t, 2, c.want, dir)
		})
	}
}

func TestEmptyFlags(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"-addr", "-db", "-keys", "-tls-cert", "-tls-key", "-backup"} {
		t.Run(flag, func(t *testing.T) {
			dir := t.TempDir()

			o := runWith(t, dir, map[string]string{"API_KEYS": "secret"}, flag, "")

			o.wantError(t, 2, flag+" must not be empty", dir)
		})
	}
}

func TestMistakesInTheKeysOfTheEnvironment(t *testing.T) {
	t.Parallel()
	const none, invalid = "contain no API key", "an API key must consist of visible ASCII characters"
	for _, c := range []struct {
		name    string
		apiKeys string
		want    string
	}{
		{name: "no text", apiKeys: "", want: none},
		{name: "blank items alone", apiKeys: " ,\t,", want: none},
		{name: "a space in a key", apiKeys: "one, my secret", want: "API_KEYS, item 2: " + invalid},
		{name: "a line break in a key", apiKeys: "my\nsecret", want: "API_KEYS, item 1: " + invalid},
		{name: "a control character", apiKeys: ",,secret\x7f", want: "API_KEYS, item 3: " + invalid},
		{name: "an accent", apiKeys: "ésecret", want: "API_KEYS, item 1: " + invalid},
		{name: "invalid UTF-8", apiKeys: "secret\xff", want: "API_KEYS, item 1: " + invalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()

			o := runWith(t, dir, map[string]string{"API_KEYS": c.apiKeys})

			o.wantError(t, 1, c.want, dir)
		})
	}
}

func TestMistakesInAKeyFile(t *testing.T) {
	t.Parallel()
	const none, invalid = "contain no API key", "an API key must consist of visible ASCII characters"
	for _, c := range []struct {
		name string
		file string
		want string
	}{
		{name: "an empty file", file: "", want: none},
		{name: "comments and blank lines alone", file: "# secret\n\n  \r\n", want: none},
		{name: "a space", file: "# none\r\none\r\nmy secret\r\n", want: `keys": line 3: ` + invalid},
		{name: "a comma", file: "one,secret", want: `keys": line 1: ` + invalid},
		{name: "a comment after a key", file: "secret # new\n", want: `keys": line 1: ` + invalid},
		{name: "an accent", file: "one\n\nésecret\n", want: `keys": line 3: ` + invalid},
		{name: "a later byte order mark", file: "one\n\ufeffsecret", want: `line 2: ` + invalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			file := writeFile(t, dir, "keys", c.file)

			o := runWith(t, dir, nil, "-keys", file)

			o.wantError(t, 1, c.want, dir)
		})
	}
}

// TestMistakesInOneOfTwoSourcesOfKeys gives a valid key in API_KEYS, too.
func TestMistakesInOneOfTwoSourcesOfKeys(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		file string // "" for none
		want string
	}{
		{name: "an invalid key", file: "my secret", want: `line 1: an API key must consist of`},
		{name: "no file", file: "", want: `no such file`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "keys")
			if c.file != "" {
				writeFile(t, dir, "keys", c.file)
			}

			o := runWith(t, dir, map[string]string{"API_KEYS": "secret"}, "-keys", file)

			o.wantError(t, 1, c.want, dir)
		})
	}
}

func TestUnreadableKeyFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, c := range []struct {
		name string
		file string
		want string
	}{
		{name: "a missing file", file: dir + "/none", want: `none": open ` + dir + "/none: no such file"},
		{name: "a folder", file: dir, want: `": read ` + dir + ": is a directory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := runWith(t, dir, nil, "-keys", c.file)

			o.wantError(t, 1, c.want, dir)
		})
	}
}

func TestMistakesInTheAddress(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()

	withKey := map[string]string{"API_KEYS": "secret"}
	for _, c := range []struct {
		name string
		addr string
		env  map[string]string
		want string
	}{
		{
			name: "an address in use",
			addr: taken.Addr().String(),
			env:  withKey,
			want: `-addr "` + taken.Addr().String() + `": listen tcp `,
		},
		{
			name: "no port",
			addr: "127.0.0.1",
			env:  withKey,
			want: "missing port in address",
		},
		{
			name: "all addresses without a key",
			addr: ":0",
			want: "set API_KEYS or -keys",
		},
		{
			name: "all IPv4 addresses without a key",
			addr: "0.0.0.0:0",
			want: "set API_KEYS or -keys",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()

			o := runWith(t, dir, c.env, "-addr", c.addr)

			o.wantError(t, 1, c.want, dir)
		})
	}
}

func TestMistakesInTheCertificate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key, _ := newCertificate(t, dir)
	text := writeFile(t, dir, "text", "some text")
	for _, c := range []struct {
		name string
		cert string
		key  string
		want string
	}{
		{name: "no files", cert: dir + "/none", key: dir + "/none", want: "no such file"},
		{name: "no key file", cert: cert, key: dir + "/none", want: "no such file"},
		{name: "no certificate in the file", cert: text, key: key, want: "failed to find any PEM data"},
		{name: "no key in the file", cert: cert, key: text, want: "failed to find any PEM data"},
		{name: "the files confused", cert: key, key: cert, want: "-tls-cert and -tls-key: tls: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := map[string]string{"API_KEYS": "secret"}

			o := runWith(t, dir, env, "-tls-cert", c.cert, "-tls-key", c.key)

			o.wantError(t, 1, c.want, dir)
		})
	}
}

// refused are states of the file animals.db in which the program refuses it.
var refused = []struct {
	name  string
	shell string // makes the state out of a database of this service
	sql   string // goes on with that
	want  string
}{
	{
		name:  "a text",
		shell: "echo some text >animals.db",
		want:  "file is not a database (26): it is damaged",
	},
	{
		name:  "a folder",
		shell: "rm animals.db; mkdir animals.db",
		want:  "unable to open database file (14): it must be a file in an existing folder",
	},
	{
		name:  "a database of another program",
		shell: "rm animals.db",
		sql:   "CREATE TABLE t (x)",
		want:  "not a database of this service: its application_id is 0",
	},
	{
		name:  "a database of another program, in WAL mode",
		shell: "rm animals.db",
		sql:   "PRAGMA journal_mode = WAL; CREATE TABLE t (x)",
		want:  "not a database of this service",
	},
	{
		name:  "another program's database without tables",
		shell: "rm animals.db",
		sql:   "PRAGMA application_id = 7",
		want:  "not a database of this service",
	},
	{
		name: "a database that has lost its application_id",
		sql:  "PRAGMA application_id = 0",
		want: "not a database of this service",
	},
	{
		name:  "the application_id alone",
		shell: "rm animals.db",
		sql:   "PRAGMA application_id = 1348826227",
		want:  "not a database of this service",
	},
	{
		name: "a database of a newer version",
		sql:  "PRAGMA user_version = 2",
		want: "a newer version of this service has written it",
	},
	{
		name:  "a database that was cut off",
		shell: "truncate -s 8192 animals.db",
		want:  "malformed (11): it is damaged: put a backup in its place",
	},
	{
		name:  "the write-ahead log without its database",
		shell: "mv animals.db animals.db-wal",
		want:  `animals.db-wal" is the write-ahead log of one`,
	},
	{
		name:  "an empty file beside a write-ahead log",
		shell: "mv animals.db animals.db-wal; : >animals.db",
		want:  `animals.db-wal" is the write-ahead log of one`,
	},
	{
		name:  "a file of one byte beside a write-ahead log",
		shell: "mv animals.db animals.db-wal; echo >animals.db",
		want:  `animals.db-wal" is the write-ahead log of one`,
	},
}

func TestRefusedDatabases(t *testing.T) {
	t.Parallel()
	for _, c := range refused {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := newDatabaseIn(t, c.shell, c.sql)

			env := map[string]string{"API_KEYS": "secret"}
			o := runWith(t, dir, env, "-db", dir+"/animals.db")

			o.wantError(t, 1, c.want, dir)
			o.wantError(t, 1, `-db "`+dir+`/animals.db": `, dir)
		})
	}
}

// TestReadOnlyDatabase marks the database as one of a format that SQLite only reads. For root, who
// runs tests in containers, no permissions make a file read-only.
func TestReadOnlyDatabase(t *testing.T) {
	t.Parallel()
	dir := newDatabaseIn(t, `printf '\3' | dd of=animals.db bs=1 seek=18 conv=notrunc`, "")

	env := map[string]string{"API_KEYS": "secret"}
	o := runWith(t, dir, env, "-db", dir+"/animals.db")

	o.wantError(t, 1, "attempt to write a readonly database (8): it must be a file", dir)
}

func TestDatabaseInAMissingFolder(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()

	env := map[string]string{"API_KEYS": "secret"}
	o := runWith(t, dir, env, "-db", dir+"/none/animals.db")

	o.wantError(t, 1, "unable to open database file (14): it must be a file in an existing folder", dir)
}

func TestBackupOfARefusedDatabase(t *testing.T) {
	t.Parallel()
	for _, c := range refused {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := newDatabaseIn(t, c.shell, c.sql)

			o := runWith(t, dir, nil, "-db", dir+"/animals.db", "-backup", dir+"/copy.db")

			o.wantError(t, 1, c.want, dir)
			o.wantError(t, 1, `-backup "`+dir+`/copy.db" of -db "`+dir+`/animals.db": `, dir)
		})
	}
}

func TestNothingToBackUp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		shell string // changes a database of this service, animals.db
		want  string
	}{
		{
			name:  "a missing database",
			shell: "rm animals.db",
			want:  "unable to open database file (14)",
		},
		{
			name:  "an empty file",
			shell: ": >animals.db",
			want:  "the database is empty",
		},
		{
			name:  "a damaged index",
			shell: "printf y | dd of=animals.db bs=1 seek=16383 conv=notrunc",
			want:  "the database is damaged",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := newDatabaseIn(t, c.shell, "")

			o := runWith(t, dir, nil, "-db", dir+"/animals.db", "-backup", dir+"/copy.db")

			o.wantError(t, 1, c.want, dir)
		})
	}
}

func TestRefusedNamesOfBackups(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		shell  string // changes the folder
		target string
		want   string
	}{
		{
			name:   "the database itself",
			shell:  "true",
			target: "animals.db",
			want:   `animals.db" exists already`,
		},
		{
			name:   "an existing file",
			shell:  "echo precious >copy.db",
			target: "copy.db",
			want:   `copy.db" exists already`,
		},
		{
			name:   "a link that leads nowhere",
			shell:  "ln -s nowhere copy.db",
			target: "copy.db",
			want:   `copy.db" exists already`,
		},
		{
			name:   "a file in a missing folder",
			shell:  "true",
			target: "none/copy.db",
			want:   "none/copy.db.",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := newDatabaseIn(t, c.shell, "")

			o := runWith(t, dir, nil, "-db", dir+"/animals.db", "-backup", dir+"/"+c.target)

			o.wantError(t, 1, c.want, dir)
		})
	}
}

// The database.

func TestPragmasOfTheWritingConnection(t *testing.T) {
	s := parallelService(t)

	for _, c := range []struct{ pragma, want string }{
		{pragma: "synchronous", want: "2"}, // FULL
		{pragma: "fullfsync", want: "1"},
		{pragma: "checkpoint_fullfsync", want: "1"},
		{pragma: "journal_mode", want: "wal"},
		{pragma: "journal_size_limit", want: "64000000"},
		{pragma: "application_id", want: "1348826227"}, // "Pets"
		{pragma: "user_version", want: strconv.Itoa(len(migrations))},
	} {
		t.Run(c.pragma, func(t *testing.T) {
			if got := s.pragma(0, c.pragma); got != c.want {
				t.Errorf("PRAGMA %s = %s, want %s", c.pragma, got, c.want)
			}
		})
	}
}

func TestSchemaRefusesEdits(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	db := s.connect()

	for _, edit := range []string{
		`UPDATE pets SET name = ''`,
		`UPDATE pets SET name = NULL`,
		`UPDATE pets SET name = x'00'`,
		`UPDATE pets SET category_id = 1.5`,
		`UPDATE pets SET category_id = NULL`,
		`UPDATE pets SET status = 'lost'`,
		`UPDATE pets SET status = NULL`,
		`UPDATE pets SET id = 0`,
		`INSERT INTO pets (id, name, category_id) VALUES (-1, 'x', 1)`,
	} {
		t.Run(edit, func(t *testing.T) {
			if _, err := db.Exec(edit); err == nil {
				t.Error("the edit is allowed")
			}
		})
	}
	s.get("/v1/pets").want(200, `[{"id":1,"name":"Rex","categoryId":7,"status":"sold"}]`)
}

// TestSchemaHasTheRulesOfTheHandlers compares the schema with the constants of handlers.go.
func TestSchemaHasTheRulesOfTheHandlers(t *testing.T) {
	s := parallelService(t)
	const insert = `INSERT INTO pets (name, category_id, status) VALUES (?, 1, ?)`
	longest := strings.Repeat("é", maxName)

	for _, status := range petStatuses {
		s.exec(insert, longest, status)
	}
	if _, err := s.connect().Exec(insert, longest+"é", petStatuses[0]); err == nil {
		t.Errorf("the schema allows a name of %d characters", maxName+1)
	}

	table := s.query("SELECT sql FROM sqlite_schema WHERE name = 'pets'")
	if got := strings.Count(table, "status ="); got != len(petStatuses) {
		t.Errorf("the schema has %d statuses, want %d: %s", got, len(petStatuses), table)
	}
	s.exec("INSERT INTO pets (name, category_id) VALUES ('x', 1)")
	s.wantQuery("SELECT status FROM pets WHERE name = 'x'", "available")
}

// TestQueriesReadFewPages counts the pages that SQLite looks at. A scan or a sort of this database
// looks at hundreds.
func TestQueriesReadFewPages(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, method, target string
		most                 int
	}{
		{name: "a page", method: "GET", target: "/v1/pets?after=2500&limit=50", most: 20},
		{name: "a page of a status", method: "GET", target: "/v1/pets?status=pending&after=2500", most: 20},
		{name: "an animal", method: "GET", target: "/v1/pets/2500", most: 20},
		{name: "a create", method: "POST", target: "/v1/pets", most: 100},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				s.addMany(5000, strings.Repeat("x", 200))
				s.exec("INSERT INTO idempotency_keys " +
					"SELECT zeroblob(32), id, 1, id, name, category_id, status FROM pets")
				before := s.pagesRead()

				s.do(c.method, c.target, rex, "Idempotency-Key: k")

				if n := s.pagesRead() - before; n == 0 || n > c.most {
					t.Errorf("%s %s reads %d pages, want 1 to %d", c.method, c.target, n, c.most)
				}
			})
		})
	}
}

// pagesRead returns how many pages all connections of the service have looked at so far. It needs
// the fake clock, to know when no connection is in use.
func (s *service) pagesRead() (n int) {
	synctest.Wait()
	for _, conn := range s.connections() {
		hits, _, _ := conn.(sqlite.DBStatus).Status(sqlite.DBStatusCacheHit, false)
		misses, _, _ := conn.(sqlite.DBStatus).Status(sqlite.DBStatusCacheMiss, false)
		n += hits + misses
	}
	return n
}

func TestNewDatabaseIsLogged(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		shell string // changes a database of this service, animals.db
		isNew bool
	}{
		{name: "no file", shell: "rm animals.db", isNew: true},
		{name: "an empty file", shell: ": >animals.db", isNew: true},
		{name: "a file of one byte", shell: "echo >animals.db", isNew: true},
		{name: "a database", shell: "true", isNew: false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := newDatabaseIn(t, c.shell, "") + "/animals.db"
			var log bytes.Buffer

			s := openService(t, file, &log)

			s.add("Tom", 3, "sold")
			line := `level=WARN msg="the database is new and empty" database=` + file
			if strings.Contains(log.String(), line) != c.isNew {
				t.Errorf("want a warning: %v; got %s", c.isNew, &log)
			}
		})
	}
}

func TestOddNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		":memory:", "file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", "ä\n", "a;b", `"'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()

			s := openService(t, filepath.Join(dir, name))

			s.add("Rex", 7, "sold")
			s.wantQuery("SELECT count(*) FROM pets", "1")
			must(t, s.close())
			wantFiles(t, dir, name)
		})
	}
}

func TestRelativeNameOfTheDatabase(t *testing.T) {
	t.Parallel()
	cmd := command(t, execSelf, "-db", ":memory:")
	cmd.Dir = t.TempDir()

	p := startCommand(t, cmd)

	p.post(rex).want(201)
	status, log := p.stop(syscall.SIGTERM)
	absolute := " database=" + filepath.Join(cmd.Dir, ":memory:") + " "
	if status != 0 || !strings.Contains(log, absolute) {
		t.Errorf("exit status %d, want 0, and %q in the log: %s", status, absolute, log)
	}
	wantFiles(t, cmd.Dir, ":memory:")
}

func TestLinkToADatabase(t *testing.T) {
	t.Parallel()
	dir, target := t.TempDir(), newDatabaseIn(t, "true", "")
	link := filepath.Join(dir, "link.db")
	must(t, os.Symlink(filepath.Join(target, "animals.db"), link))

	s := openService(t, link)

	s.get("/v1/pets").want(200, "Rex")
	s.add("Tom", 3, "sold")
	wantFiles(t, dir, "link.db")
	wantFiles(t, target, "animals.db", "animals.db-shm", "animals.db-wal")
}

// A database that cannot be written or read.

func TestFullDatabase(t *testing.T) {
	s := parallelService(t)
	large := string(encode(newPet{Name: strings.Repeat("x", 200), Status: "sold"}))
	s.pragma(0, "max_page_count = "+s.pragma(0, "page_count"))

	created := -1
	a := reply{status: 201}
	for ; a.status == 201; created++ {
		a = s.post(large)
	}

	a.want(503, "unavailable")
	s.get("/v1/pets?limit=1").want(200, "xxx")
	s.get("/healthz").want(200)
	s.wantQuery("SELECT count(*) FROM pets", strconv.Itoa(created))

	s.pragma(0, "max_page_count = 1000000")
	s.post(large).want(201)
}

func TestLockedDatabase(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	s.pragma(0, "busy_timeout = 50") // milliseconds, so that the test need not wait for 5 seconds

	unlock := s.lock()

	s.post(rex).want(503, "unavailable")
	s.get("/v1/pets?limit=2").want(200, "Rex")
	s.get("/healthz").want(200)

	unlock()
	s.wantQuery("SELECT count(*) FROM pets", "1")
	s.post(rex).want(201)
}

// TestCreateLooksForTheDatabase replaces the database, and puts it back before the watcher can look:
// the fake clock stands still.
func TestCreateLooksForTheDatabase(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("Rex", 7, "sold")
		must(t, os.Rename(s.file, s.file+".away"))
		must(t, os.WriteFile(s.file, nil, 0o600))

		s.post(rex).want(503, "unavailable")

		must(t, os.Rename(s.file+".away", s.file))
		s.wantQuery("SELECT count(*) FROM pets", "1")
		s.post(rex).want(201)
	})
}

func TestFailedCreateStoresNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name         string
		damage, mend string // SQL before and after a create that fails
		cause        string // in the log
	}{
		{
			name: "a trigger refuses",
			damage: `CREATE TRIGGER refuse BEFORE INSERT ON idempotency_keys
				BEGIN SELECT RAISE(ABORT, 'not today'); END`,
			mend:  `DROP TRIGGER refuse`,
			cause: "not today",
		},
		{
			name: "a trigger leaves the animal out",
			damage: `CREATE TRIGGER leave_out BEFORE INSERT ON pets
				BEGIN SELECT RAISE(IGNORE); END`,
			mend:  `DROP TRIGGER leave_out`,
			cause: "a trigger in the database left the animal out",
		},
		{
			name: "COMMIT fails",
			damage: `CREATE TABLE children (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
				CREATE TRIGGER orphan BEFORE INSERT ON pets
				BEGIN INSERT INTO children VALUES (0); END`,
			mend:  `DROP TRIGGER orphan`,
			cause: "FOREIGN KEY constraint failed",
		},
		{
			name:   "a table is missing",
			damage: `ALTER TABLE idempotency_keys RENAME TO hidden`,
			mend:   `ALTER TABLE hidden RENAME TO idempotency_keys`,
			cause:  "no such table",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var log strings.Builder
			s := newService(t, &log)
			s.pragma(0, "foreign_keys = ON")
			s.add("Tom", 8, "sold")
			s.exec(c.damage)

			a := s.post(rex, "Idempotency-Key: k").want(500, "internal")

			if strings.Contains(a.body, c.cause) || !strings.Contains(log.String(), c.cause) {
				t.Errorf("%q should be in the log alone: %s, log %s", c.cause, a.body, log.String())
			}
			s.wantQuery(allIDs, "1")

			s.exec(c.mend)
			a = s.post(rex, "Idempotency-Key: k").want(201)
			if a.header["Idempotency-Replayed"] != nil {
				t.Errorf("the repeat of a failed create is replayed: %s", a.body)
			}
			s.wantQuery("SELECT count(*) FROM pets", "2")
		})
	}
}

// TestAnimalThatIsLeftOutFailsAlone lets creates wait for a lock, so that they can share a transaction.
func TestAnimalThatIsLeftOutFailsAlone(t *testing.T) {
	s := parallelService(t)
	s.exec(`CREATE TRIGGER leave_out BEFORE INSERT ON pets WHEN new.name = 'left out'
		BEGIN SELECT RAISE(IGNORE); END`)
	unlock := s.lock()
	var begun, answered sync.WaitGroup
	for _, c := range []struct {
		name   string
		status int
	}{
		{name: "Rex", status: 201},
		{name: "left out", status: 500},
		{name: "Tom", status: 201},
	} {
		begun.Add(1)
		answered.Go(func() {
			begun.Done()
			s.post(`{"name":"` + c.name + `","categoryId":7}`).want(c.status)
		})
	}

	begun.Wait()
	unlock()
	answered.Wait()

	s.wantQuery("SELECT group_concat(name ORDER BY name) FROM pets", "Rex,Tom")
}

func TestDatabaseThatCannotBeRead(t *testing.T) {
	s := parallelService(t)
	s.add("Rex", 7, "sold")
	s.onRead(func() error { return errors.New("a secret") })

	for _, a := range []reply{
		s.get("/v1/pets").want(500, "internal"),
		s.get("/v1/pets/1").want(500, "internal"),
		s.get("/healthz").want(503, "unavailable"),
	} {
		if strings.Contains(a.body, "secret") {
			t.Errorf("%s = %s, want nothing of the cause", a.request, a.body)
		}
	}

	s.onRead(func() error { return nil })
	s.get("/v1/pets").want(200, "Rex")
	s.get("/healthz").want(200)
}

// limitFiles is a line of shell that runs the program with a limit for the size of its files, in
// KiB. A write beyond it fails, as on a failing disk.
func limitFiles(size int) string {
	return fmt.Sprintf(`trap "" XFSZ; ulimit -f %d; `, 2*size) + execSelf
}

func TestFailingDisk(t *testing.T) {
	t.Parallel()
	db := closedDatabase(t, 10000)
	p := startCommand(t, command(t, limitFiles(50), "-db", db.file)) // for the log

	created := -1
	a := reply{status: 201}
	for ; a.status == 201; created++ {
		a = p.post(rex)
	}

	a.want(500, "internal")
	p.awaitLog("level=ERROR .*disk I/O error")
	p.get("/v1/pets?limit=1").want(200, `"id":1`)
	p.stop(syscall.SIGKILL)

	start(t, db.file).get("/healthz").want(200)
	db.wantQuery("PRAGMA integrity_check", "ok")
	db.wantQuery("SELECT count(*) FROM pets", strconv.Itoa(10000+created))
}

func TestBackupOnAFailingDisk(t *testing.T) {
	t.Parallel()
	db := closedDatabase(t, 0)
	db.addMany(10000, strings.Repeat("x", 255)) // more than SQLite's cache: it writes a journal
	dir := t.TempDir()

	cmd := command(t, limitFiles(50), "-db", db.file, "-backup", filepath.Join(dir, "copy.db"))
	wantRefused(t, cmd, dir, "disk I/O error")
}

// TestPanicInTheStore expects that a panic there ends the program, which would otherwise go on
// without a connection, or with an open transaction.
func TestPanicInTheStore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, method, target string }{
		{name: "in a list", method: "GET", target: "/v1/pets"},
		{name: "in a fetch", method: "GET", target: "/v1/pets/1"},
		{name: "in a check of its health", method: "GET", target: "/healthz"},
		{name: "in a create", method: "POST", target: "/v1/pets"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			s.add("Rex", 7, "sold")
			must(t, s.close())
			p := start(t, s.file)
			s.onRead(nil) // in the process, there is no function to call, which is a panic
			s.exec("CREATE TRIGGER broken INSTEAD OF INSERT ON pets " +
				"BEGIN SELECT call('no function'); END")

			r := httptest.NewRequest(c.method, p.url+c.target, strings.NewReader(rex))
			if a, err := p.try(r); err == nil {
				t.Errorf("%s = %d %s, want no response", a.request, a.status, a.body)
			}

			status, log := p.awaitEnd()
			if status != 2 || !strings.Contains(log, "panic: ") || !strings.Contains(log, "store.go:") {
				t.Errorf("exit status %d, want 2; log, which should have the stack: %s", status, log)
			}
		})
	}
}

// adder adds animals, each with an Idempotency-Key, and keeps what was acknowledged.
type adder struct {
	t            *testing.T
	sent         atomic.Int64 // animals
	acknowledged sync.Map     // Idempotency-Key to the body of the 201
}

// add adds animal i, or repeats that. It returns an error if there is no response.
func (ad *adder) add(p *process, i int64) error {
	key := fmt.Sprint("animal-", i)
	body := fmt.Sprintf(`{"name":%q,"categoryId":1}`, key)
	r := httptest.NewRequest("POST", p.url+"/v1/pets", strings.NewReader(body))
	a, err := p.try(r, "Idempotency-Key: "+key)
	if err != nil {
		return err
	}

	a.want(201)
	if before, again := ad.acknowledged.LoadOrStore(key, a.body); again && before != a.body {
		ad.t.Errorf("%s was acknowledged as %s, and then as %s", key, before, a.body)
	}
	return nil
}

// addUntilKilled adds new animals from many clients, and kills the program.
func (ad *adder) addUntilKilled(p *process, first func()) {
	before := ad.sent.Load()
	logRead := make(chan struct{})
	go func() { // a log that nobody reads stalls the service
		defer close(logRead)
		for p.lines.Scan() {
		}
	}()
	first()
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			for ad.add(p, ad.sent.Add(1)-1) == nil {
			}
		})
	}

	eventually(ad.t, "some animals are added", func() bool { return ad.sent.Load() > before+60 })
	p.cmd.Process.Kill()
	clients.Wait()
	<-logRead
}

// TestKilledProcessLosesNothing kills the program several times while clients add animals, and
// repeats all creates each time.
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "animals.db")
	ad := &adder{t: t}

	for range 6 {
		p := start(t, file)
		again := ad.sent.Load()
		ad.addUntilKilled(p, func() {
			for i := range again {
				must(t, ad.add(p, i))
			}
		})
	}

	s := openService(t, file)
	s.wantQuery("PRAGMA integrity_check", "ok")
	s.wantQuery("SELECT count(*) - count(DISTINCT name) FROM pets", "0")
	ad.acknowledged.Range(func(_, body any) bool {
		p := decode[pet](reply{t: t, body: body.(string)})
		if a := s.get(fmt.Sprint("/v1/pets/", p.ID)); a.body != body {
			t.Errorf("%s = %s, which was acknowledged as %s", a.request, a.body, body)
		}
		return true
	})
}

// Migrations.

func TestStartWithNothingToMigrateWritesNothing(t *testing.T) {
	t.Parallel()
	db := closedDatabase(t, 3)
	before := snapshot(t, filepath.Dir(db.file))

	p := start(t, db.file)
	p.get("/v1/pets").want(200, "Rex")
	p.stop(syscall.SIGTERM)

	if after := snapshot(t, filepath.Dir(db.file)); after != before {
		t.Errorf("the files were\n%s and are\n%s", before, after)
	}
}

// The files of the database.

// addAll adds animals with these names.
func (p *process) addAll(names ...string) {
	p.t.Helper()
	for _, name := range names {
		p.add(name, 7, "sold")
	}
}

// TestBackupOfAKilledService makes a backup while all animals are in the log.
func TestBackupOfAKilledService(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	db := database{t, filepath.Join(dir, "animals.db")}
	copied := database{t, filepath.Join(dir, "copy.db")}
	p := start(t, db.file)
	p.addAll("Rex", "Tom", "Kim")
	p.stop(syscall.SIGKILL)

	out, err := command(t, execSelf, "-db", db.file, "-backup", copied.file).CombinedOutput()

	if err != nil {
		t.Errorf("-backup: %v, output %q", err, out)
	}
	copied.wantQuery(allIDs, "1,2,3")
	db.wantQuery(allIDs, "1,2,3")
}

func TestBackupThatIsInterrupted(t *testing.T) {
	t.Parallel()
	db := closedDatabase(t, 3)
	dir := t.TempDir()
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()

	var stdout, stderr strings.Builder
	args := []string{"-db", db.file, "-backup", filepath.Join(dir, "copy.db")}
	status := run(interrupted, args, lookup(nil), &stdout, &stderr)

	if status != 1 || stdout.String() != "" || !strings.Contains(stderr.String(), "context canceled") {
		t.Errorf("status %d, output %q, error %q, want 1, context canceled",
			status, stdout.String(), stderr.String())
	}
	if left := snapshot(t, dir); left != "" {
		t.Errorf("the backup has left %s", left)
	}
}

func TestBackupToAWrongTarget(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, commands, target, words string }{
		{
			name:     "a file",
			commands: "echo old >copy.db",
			target:   "copy.db",
			words:    `copy.db" exists already; name a new file`,
		},
		{
			name:     "an empty file",
			commands: ": >copy.db",
			target:   "copy.db",
			words:    `copy.db" exists already; name a new file`,
		},
		{
			name:     "a folder",
			commands: "mkdir copy.db",
			target:   "copy.db",
			words:    `copy.db" exists already; name a new file`,
		},
		{
			name:     "a link that leads nowhere",
			commands: "ln -s nowhere copy.db",
			target:   "copy.db",
			words:    `copy.db" exists already; name a new file`,
		},
		{
			name:   "the database itself",
			target: "animals.db",
			words:  `animals.db" exists already; name a new file`,
		},
		{
			name:   "a folder that is missing",
			target: "missing/copy.db",
			words:  "no such file or directory",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := closedDatabase(t, 3)
			dir := filepath.Dir(db.file)
			shell(t, dir, c.commands)

			cmd := command(t, execSelf, "-db", db.file, "-backup", filepath.Join(dir, c.target))
			wantRefused(t, cmd, dir, c.words)
		})
	}
}

// restore restores the file backup.db, which is beside the database of p, as README.md says: it
// makes a verified copy, stops the service, moves the old files aside and puts the copy in place.
func restore(p *process, db database) {
	p.t.Helper()
	dir := filepath.Dir(db.file)
	args := []string{"-db", filepath.Join(dir, "backup.db"), "-backup", filepath.Join(dir, "new.db")}
	if out, err := command(p.t, execSelf, args...).CombinedOutput(); err != nil {
		p.t.Fatalf("-backup: %v, output %q", err, out)
	}
	p.stop(syscall.SIGTERM)
	shell(p.t, dir, "mkdir old; for f in animals.db*; do [ ! -e $f ] || mv $f old; done")
	shell(p.t, dir, "mv new.db animals.db")
}

func TestRestore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, commands string // in the folder of the files, while the service runs
		old            string // the ids in the old database, "" if it is damaged or lost
	}{
		{
			name: "wrong animals",
			old:  "1,2,3,4,5",
		},
		{
			name:     "a damaged database",
			commands: "dd if=/dev/zero of=animals.db bs=4096 seek=1 count=3 conv=notrunc",
		},
		{
			name:     "a database that is not one",
			commands: "echo some text >animals.db",
		},
		{
			name:     "a lost database",
			commands: "rm animals.db",
		},
		{
			name:     "a loss of all files",
			commands: "rm animals.db*",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			db := database{t, filepath.Join(dir, "animals.db")}
			p := start(t, db.file)
			p.addAll("Rex", "Tom", "Kim")
			must(t, backup(t.Context(), db.file, filepath.Join(dir, "backup.db")))
			p.addAll("Ada", "Max")
			shell(t, dir, c.commands)

			restore(p, db)

			p = start(t, db.file)
			p.get("/v1/pets").want(200, "Rex", "Tom", "Kim")
			p.addAll("Zoe")
			db.wantQuery("PRAGMA integrity_check", "ok")
			db.wantQuery("SELECT group_concat(name ORDER BY id) FROM pets", "Rex,Tom,Kim,Zoe")
			if c.old != "" {
				database{t, filepath.Join(dir, "old", "animals.db")}.wantQuery(allIDs, c.old)
			}
		})
	}
}

// wrongFiles are what an operator could take for a backup.
var wrongFiles = []struct {
	name     string
	edit     string // SQL that makes a wrong file of a backup
	commands string // shell commands that do so
	words    string
}{
	{
		name:     "missing",
		commands: "rm backup.db",
		words:    "it must be a file in an existing folder",
	},
	{
		name:     "a folder",
		commands: "rm backup.db; mkdir backup.db",
		words:    "it must be a file in an existing folder",
	},
	{
		name:     "empty",
		commands: ": >backup.db",
		words:    "the database is empty",
	},
	{
		name:     "one byte",
		commands: "echo >backup.db",
		words:    "the database is empty",
	},
	{
		name:     "text",
		commands: "echo some text >backup.db",
		words:    "it is damaged: put a backup in its place",
	},
	{
		name:     "a log without its database",
		commands: "mv backup.db backup.db-wal",
		words:    `backup.db-wal" is the write-ahead log of one`,
	},
	{
		name:     "the first half",
		commands: "head -c 8192 backup.db >half; mv half backup.db",
		words:    "it is damaged: put a backup in its place",
	},
	{
		name:     "a damaged index",
		commands: "printf y | dd of=backup.db bs=1 seek=20479 conv=notrunc",
		words:    "the database is damaged: row 1 missing from index pets_by_status",
	},
	{
		name: "an animal that breaks the rules",
		edit: `PRAGMA ignore_check_constraints = ON;
			UPDATE pets SET status = 'lost' WHERE id = 2`,
		words: "the database is damaged: CHECK constraint failed in pets",
	},
	{
		name:  "a database of another program",
		edit:  "PRAGMA application_id = 0",
		words: "not a database of this service",
	},
	{
		name:  "a database of a newer version",
		edit:  "PRAGMA user_version = 2",
		words: "a newer version of this service has written it",
	},
}

// TestWrongFileIsNotRestored takes the first step of a restore with files that are no backups. The
// service goes on as if nothing had happened.
func TestWrongFileIsNotRestored(t *testing.T) {
	t.Parallel()
	for _, c := range wrongFiles {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			db := database{t, filepath.Join(dir, "animals.db")}
			wrong := database{t, filepath.Join(dir, "backup.db")}
			p := start(t, db.file)
			p.addAll("Rex", "Tom", "Kim")
			must(t, backup(t.Context(), db.file, wrong.file))
			if c.edit != "" {
				wrong.exec(c.edit)
			}
			shell(t, dir, c.commands)

			cmd := command(t, execSelf, "-db", wrong.file, "-backup", filepath.Join(dir, "new.db"))
			wantRefused(t, cmd, dir, c.words)

			p.addAll("Ada")
			db.wantQuery(allIDs, "1,2,3,4")
		})
	}
}

// Connections.

func TestBrokenListenerEndsTheService(t *testing.T) {
	s := parallelService(t)
	cause := errors.New("no more connections")

	err := s.serve(t.Context(), brokenListener{cause})

	if !errors.Is(err, cause) {
		t.Errorf("serve returned %v, want %v", err, cause)
	}
}

func TestConnectionIsClosed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		sent  string
		later string // is sent every second
		want  time.Duration
	}{
		{
			name: "if nothing is sent",
			want: 5 * time.Second,
		},
		{
			name: "if a part of the headers is sent",
			sent: "GET /v1/pets HT",
			want: 5 * time.Second,
		},
		{
			name:  "if the headers come slowly",
			sent:  "GET /v1/pets HTTP/1.1\r\n",
			later: "X: x\r\n",
			want:  5 * time.Second,
		},
		{
			name: "if no request follows a response",
			sent: rawList,
			want: 75 * time.Second,
		},
		{
			name: "if a part of the next request follows a response",
			sent: rawList + "GET /v1/pets HT",
			want: 5 * time.Second,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()
				start := time.Now()

				conn := ln.dial(c.sent)
				if c.later != "" {
					go sendEvery(time.Second, conn, c.later)
				}
				io.Copy(io.Discard, conn)

				if took := time.Since(start); took != c.want {
					t.Errorf("the connection was closed after %v, want %v", took, c.want)
				}
			})
		})
	}
}

func TestResponseIsCutOffIfItIsNotRead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		wait  time.Duration
		whole bool
	}{
		{name: "for 19 seconds", wait: 19 * time.Second, whole: true},
		{name: "for 21 seconds", wait: 21 * time.Second, whole: false},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()
				conn := ln.dial(rawRequest("GET /openapi.json", "Connection: close"))

				time.Sleep(c.wait)
				response, _ := io.ReadAll(conn)

				if whole := bytes.HasSuffix(response, openAPI); whole != c.whole {
					t.Errorf("the response of %d bytes is whole: %v, want %v",
						len(response), whole, c.whole)
				}
			})
		})
	}
}

func TestBodyMustArriveIn10Seconds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		later string // is sent every second
	}{
		{name: "the rest never comes"},
		{name: "the rest comes slowly", later: " "},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()
				start := time.Now()

				request := rawRequest("POST /v1/pets", rawKey, "Content-Length: 29")
				conn := ln.dial(request + `{"name":`)
				if c.later != "" {
					go sendEvery(time.Second, conn, c.later)
				}
				a := s.receive(conn, "POST", "/v1/pets").want(408, "within 10 seconds")

				if took := time.Since(start); took != 10*time.Second || !a.closes {
					t.Errorf("the response came after %v, Connection: close %v; want 10s, true",
						took, a.closes)
				}
				io.Copy(io.Discard, conn) // hangs unless the service closes the connection
				s.wantQuery("SELECT count(*) FROM pets", "0")
			})
		})
	}
}

// TestRefusalDoesNotNeedTheBody sends a part of the body, and no more. net/http waits for the rest
// before it sends the response, but no longer than for any request.
func TestRefusalDoesNotNeedTheBody(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		headers []string
		want    int
	}{
		{
			name:    "no API key",
			headers: []string{"Content-Length: 29"},
			want:    401,
		},
		{
			name:    "no API key, Connection: close",
			headers: []string{"Content-Length: 29", "Connection: close"},
			want:    401,
		},
		{
			name:    "no API key, a very long body",
			headers: []string{"Content-Length: 1000000000"},
			want:    401,
		},
		{
			name:    "a wrong Content-Type",
			headers: []string{"Content-Length: 29", rawKey, "Content-Type: text/plain"},
			want:    415,
		},
		{
			name:    "an invalid Idempotency-Key",
			headers: []string{"Content-Length: 29", rawKey, "Idempotency-Key: a b"},
			want:    400,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()
				start := time.Now()

				conn := ln.dial(rawRequest("POST /v1/pets", c.headers...) + `{"name":`)
				s.receive(conn, "POST", "/v1/pets").want(c.want)

				if took := time.Since(start); took > 10*time.Second {
					t.Errorf("the response came after %v, want at most 10s", took)
				}
				io.Copy(io.Discard, conn) // hangs unless the service closes the connection
			})
		})
	}
}

// TestEarlyResponseArrives sends the whole body over a real network before it reads the response,
// which the service sends without the body. If the service closed the connection with a part of
// the body unread, the client could get a reset instead of the response.
func TestEarlyResponseArrives(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		request string
		headers []string
		body    int // bytes
		want    int
	}{
		{name: "no API key", request: "POST /v1/pets", body: 200_000, want: 401},
		{name: "a GET", request: "GET /v1/pets", headers: []string{rawKey}, body: 200_000, want: 200},
		{name: "no path", request: "POST /v1", headers: []string{rawKey}, body: 200_000, want: 404},
		{
			name:    "a wrong Content-Type",
			request: "POST /v1/pets",
			headers: []string{rawKey, "Content-Type: text/plain"},
			body:    200_000,
			want:    415,
		},
		{name: "too large", request: "POST /v1/pets", headers: []string{rawKey}, body: 100_000, want: 413},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := parallelService(t)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			must(t, err)
			stop := s.serveOn(ln)
			defer stop()
			method, target, _ := strings.Cut(c.request, " ")
			headers := append(c.headers, fmt.Sprintf("Content-Length: %d", c.body))
			whole := rawRequest(c.request, headers...) + strings.Repeat("x", c.body)

			for range 25 {
				conn, err := net.Dial("tcp", ln.Addr().String())
				must(t, err)
				_, err = io.WriteString(conn, whole)
				must(t, err)

				s.receive(conn, method, target).want(c.want)
				conn.Close()
			}
		})
	}
}

func TestLimitOfHeaders(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		size int // bytes
		want string
	}{
		{name: "15 KiB", size: 15 << 10, want: "HTTP/1.1 200 OK"},
		{name: "17 KiB", size: 17 << 10, want: "HTTP/1.1 431 Request Header Fields Too Large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()

				conn := ln.dial(rawRequest("GET /healthz", "X: "+strings.Repeat("x", c.size)))
				defer conn.Close()

				line, _ := bufio.NewReader(conn).ReadString('\n')
				if line != c.want+"\r\n" {
					t.Errorf("GET /healthz with %d bytes of headers = %q, want %s", c.size, line, c.want)
				}
			})
		})
	}
}

// TestOptionsOfTheServer sends the one request that net/http would answer by itself.
func TestOptionsOfTheServer(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		defer stop()

		without := ln.dial(rawRequest("OPTIONS *"))
		with := ln.dial(rawRequest("OPTIONS *", rawKey))

		s.receive(without, "OPTIONS", "*").want(401)
		s.receive(with, "OPTIONS", "*").want(404)
	})
}

// TLS.

func TestTLS(t *testing.T) {
	t.Parallel()
	p, trusting := startWithTLS(t)

	p.get("/v1/pets").want(200, "[]")
	p.post(rex).want(201)

	if !strings.HasPrefix(p.url, "https://") {
		t.Errorf("the log names the URL %s, want https://", p.url)
	}
	r := httptest.NewRequest("GET", p.url+"/healthz", nil)
	r.RequestURI = ""
	resp, err := trusting.RoundTrip(r) // which would use HTTP/2, too
	must(t, err)
	resp.Body.Close()
	if resp.Proto != "HTTP/1.1" {
		t.Errorf("GET /healthz was answered over %s, want HTTP/1.1", resp.Proto)
	}
}

func TestOldestVersionOfTLS(t *testing.T) {
	t.Parallel()
	p, trusting := startWithTLS(t)
	for _, c := range []struct {
		name    string
		version uint16
		ok      bool
	}{
		{name: "TLS 1.1", version: tls.VersionTLS11, ok: false},
		{name: "TLS 1.2", version: tls.VersionTLS12, ok: true},
		{name: "TLS 1.3", version: tls.VersionTLS13, ok: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			settings := trusting.TLSClientConfig.Clone()
			settings.MinVersion, settings.MaxVersion = c.version, c.version

			conn, err := tls.Dial("tcp", strings.TrimPrefix(p.url, "https://"), settings)

			if (err == nil) != c.ok {
				t.Errorf("the handshake = %v, want it to succeed: %v", err, c.ok)
			}
			if err == nil {
				conn.Close()
			}
		})
	}
}

// TestLogOfAHandshake sends what net/http would quote at length in the log: a hello that offers a
// hundred unknown versions of TLS.
func TestLogOfAHandshake(t *testing.T) {
	t.Parallel()
	p, _ := startWithTLS(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "https://"))
	must(t, err)
	defer conn.Close()

	hello := "\x16\x03\x01\x00\xfc\x01\x00\x00\xf8\x03\x03" + strings.Repeat("r", 32) + // random
		"\x00\x00\x02\x13\x01\x01\x00" + // one cipher suite, no compression
		"\x00\xcd\x00\x2b\x00\xc9\xc8" + strings.Repeat("\x7a\x7a", 100) // the versions
	_, err = io.WriteString(conn, hello)
	must(t, err)

	message := p.awaitLog(`level=INFO msg="(http: TLS handshake error.*unsupported versions.*7a7a.*)"$`)[1]
	if len(message) > 1024 {
		t.Errorf("the log has a message of %d bytes, want at most 1024: %s", len(message), message)
	}
}

// Stops.

const (
	// A stop takes this long if no request is in progress. So long it accepts new ones.
	shortStop = 250 * time.Millisecond

	// A stop takes this long at most.
	longStop = 5250 * time.Millisecond
)

func TestStopClosesIdleConnections(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		conn := ln.dial(rawList)
		a := s.receive(conn, "GET", "/v1/pets").want(200)
		if a.closes {
			t.Errorf("%s has Connection: close before the stop", a.request)
		}

		took := <-inBackground(stop)

		wantStop(t, took, shortStop, shortStop, &log)
		io.Copy(io.Discard, conn) // hangs unless the service closes the connection
	}, &log)
}

func TestStopAnswersARequestOnAnIdleConnection(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		conn := ln.dial(rawList)
		s.receive(conn, "GET", "/v1/pets")

		stopped := inBackground(stop)
		time.Sleep(200 * time.Millisecond)
		io.WriteString(conn, rawList)
		a := s.receive(conn, "GET", "/v1/pets").want(200)

		if !a.closes {
			t.Errorf("%s has no Connection: close", a.request)
		}
		wantStop(t, <-stopped, shortStop, shortStop, &log)
	}, &log)
}

func TestStopAnswersARequestOnANewConnection(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()

		stopped := inBackground(stop)
		time.Sleep(200 * time.Millisecond)
		a := s.receive(ln.dial(rawList), "GET", "/v1/pets").want(200)

		if !a.closes {
			t.Errorf("%s has no Connection: close", a.request)
		}
		wantStop(t, <-stopped, shortStop, shortStop, &log)
	}, &log)
}

// TestStopWithASilentConnection pins only the limit: net/http takes a connection that has sent
// nothing for one that is about to.
func TestStopWithASilentConnection(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		conn := ln.dial("")

		took := <-inBackground(stop)

		if took < shortStop || took > longStop {
			t.Errorf("the stop took %v, want %v to %v", took, shortStop, longStop)
		}
		io.Copy(io.Discard, conn) // hangs unless the service closes the connection
	})
}

func TestStopWaitsForABody(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		conn := ln.dial(rawRequest("POST /v1/pets", rawKey, "Content-Length: 29"))

		stopped := inBackground(stop)
		time.Sleep(4 * time.Second)
		io.WriteString(conn, rex)
		a := s.receive(conn, "POST", "/v1/pets").want(201, "Rex")

		if !a.closes {
			t.Errorf("%s has no Connection: close", a.request)
		}
		wantStop(t, <-stopped, 4*time.Second, 5*time.Second, &log)
	}, &log)
}

func TestStopCutsOffARequestWhoseBodyNeverComes(t *testing.T) {
	var log bytes.Buffer
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		conn := ln.dial(rawRequest("POST /v1/pets", rawKey, "Content-Length: 29"))

		took := <-inBackground(stop)

		wantStop(t, took, longStop, longStop, &log)
		if response, _ := io.ReadAll(conn); len(response) > 0 {
			t.Errorf("the client got %q, want nothing", response)
		}
		s.wantQuery("SELECT count(*) FROM pets", "0")
	}, &log)
}

// TestStopWithASlowBodyOfAStranger sends a byte at a time, without an API key.
func TestStopWithASlowBodyOfAStranger(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		conn := ln.dial(rawRequest("POST /v1/pets", "Content-Length: 1000000"))
		go sendEvery(100*time.Millisecond, conn, "x")

		stopped := inBackground(stop)
		a := s.receive(conn, "POST", "/v1/pets").want(401)

		if took := <-stopped; took < shortStop || took > longStop || !a.closes {
			t.Errorf("the stop took %v, Connection: close %v; want %v to %v, true",
				took, a.closes, shortStop, longStop)
		}
	})
}

func TestStopRefusesLateConnections(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		// A request in progress makes the stop go on.
		ln.dial(rawRequest("POST /v1/pets", rawKey, "Content-Length: 29"))
		start := time.Now()

		stopped := inBackground(stop)
		<-ln.closed.Done()

		if took := time.Since(start); took != shortStop {
			t.Errorf("the service accepted connections for %v, want %v", took, shortStop)
		}
		<-stopped
	})
}

func TestSignals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		shell string
		first []syscall.Signal // which must not stop the program
		stop  syscall.Signal
	}{
		{name: "SIGTERM", shell: execSelf, stop: syscall.SIGTERM},
		{name: "SIGINT", shell: execSelf, stop: syscall.SIGINT},
		{
			name:  "SIGHUP under nohup",
			shell: `trap "" HUP; ` + execSelf,
			first: []syscall.Signal{syscall.SIGHUP},
			stop:  syscall.SIGTERM,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := startCommand(t, command(t, c.shell, "-db", dir+"/animals.db"))
			p.post(rex).want(201)

			for _, sig := range append(c.first, c.stop) {
				p.cmd.Process.Signal(sig)
			}
			p.awaitLog(fmt.Sprintf(`msg=stopping cause="%v signal received"$`, c.stop))
			p.cmd.Process.Signal(syscall.SIGINT) // changes nothing, like the next one
			status, log := p.stop(syscall.SIGTERM)

			if status != 0 || strings.Count(log, "msg=stop") != 2 ||
				!strings.HasSuffix(log, " msg=stopped\n") {
				t.Errorf("exit status %d, want 0, stopping and stopped in the log: %s", status, log)
			}
			wantFiles(t, dir, "animals.db")
		})
	}
}

func TestSIGHUPKillsTheProgram(t *testing.T) {
	t.Parallel()
	p := start(t, filepath.Join(t.TempDir(), "animals.db"))

	status, log := p.stop(syscall.SIGHUP)

	const bySignal = -1
	if status != bySignal || strings.Contains(log, "msg=stop") {
		t.Errorf("exit status %d, want %d, without a stop in the log: %s", status, bySignal, log)
	}
}

// The documents.

func TestReadmeNamesTheFlags(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	must(t, err)

	var help strings.Builder
	run(t.Context(), []string{"-h"}, lookup(nil), &help, io.Discard)

	rows := findAll("(?m)^[|] (`-.*?) [|] ", string(readme)) // of the table of settings
	got := findAll("`(-[a-z-]+)", strings.Join(rows, " "))
	want := append(findAll(`(?m)^  (-[a-z-]+)`, help.String()), "-h")
	wantSame(t, "the table of settings in README.md", got, want)
}

func TestReadmeAgreesWithTheCode(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	must(t, err)

	_, sunset := deprecationDates()
	patterns := []string{
		fmt.Sprintf("1 to %d, default %d", maxLimit, defaultLimit),
		fmt.Sprintf("1 to %d Unicode code points", maxName),
		fmt.Sprintf("1 to %d visible ASCII characters", maxIdempotencyKey),
		fmt.Sprintf("within %.0f hours", idempotencyKeyLifetime.Hours()),
		fmt.Sprintf("removed after %s", sunset),
		fmt.Sprintf("`body_too_large`.* at most %d KiB", maxBody>>10),
		fmt.Sprintf("%d KiB of headers and %d KiB of body", maxHeader>>10, maxBody>>10),
		fmt.Sprintf("%.0f seconds for the headers", readHeaderTimeout.Seconds()),
		fmt.Sprintf("%.0f for the request", readTimeout.Seconds()),
		fmt.Sprintf("%.0f to read the response", writeTimeout.Seconds()),
		fmt.Sprintf("connections close after %.0f", idleTimeout.Seconds()),
		fmt.Sprintf("in progress at most %.0f seconds", shutdownTime.Seconds()),
	}
	for status, code := range errorCodes {
		patterns = append(patterns, fmt.Sprintf("(?m)^[|] [^|]*%d `%s`", status, code))
	}

	for _, pattern := range patterns {
		if !regexp.MustCompile(pattern).Match(readme) {
			t.Errorf("README.md does not match %s", pattern)
		}
	}
}

// TestDocumentHasTheResponses compares the responses in openapi.json with a list of them and their
// headers. A ? marks an optional header.
func TestDocumentHasTheResponses(t *testing.T) {
	t.Parallel()

	var got []string
	for line, response := range responses() {
		line += ":"
		for _, name := range slices.Sorted(maps.Keys(members(response, "headers"))) {
			header := at(response, "headers", name)
			got = append(got, name+" "+toJSON(at(header, "schema")))
			line += " " + name
			if at(header, "required") != true {
				line += "?"
			}
		}
		got = append(got, line)
	}

	want := []string{
		"GET /healthz 200: X-Request-Id",
		"GET /healthz 503: Retry-After X-Request-Id",

		"GET /v1/pets 200: Link? X-Request-Id",
		"GET /v1/pets 400: X-Request-Id",
		"GET /v1/pets 401: WWW-Authenticate X-Request-Id",
		"GET /v1/pets 500: X-Request-Id",
		"GET /v1/pets 503: Retry-After X-Request-Id",

		"POST /v1/pets 201: Idempotency-Replayed? Location X-Request-Id",
		"POST /v1/pets 400: X-Request-Id",
		"POST /v1/pets 401: WWW-Authenticate X-Request-Id",
		"POST /v1/pets 408: X-Request-Id",
		"POST /v1/pets 413: X-Request-Id",
		"POST /v1/pets 415: X-Request-Id",
		"POST /v1/pets 422: X-Request-Id",
		"POST /v1/pets 500: X-Request-Id",
		"POST /v1/pets 503: Retry-After X-Request-Id",

		"GET /v1/pets/{petId} 200: Deprecation Link Sunset X-Request-Id",
		"GET /v1/pets/{petId} 401: Deprecation Link Sunset WWW-Authenticate X-Request-Id",
		"GET /v1/pets/{petId} 404: Deprecation Link Sunset X-Request-Id",
		"GET /v1/pets/{petId} 500: Deprecation Link Sunset X-Request-Id",
		"GET /v1/pets/{petId} 503: Deprecation Link Retry-After Sunset X-Request-Id",

		`X-Request-Id {"pattern":"^[A-Z2-7]{26}$","type":"string"}`,
		`Link {"pattern":"^</v1/pets[?][!-;=?-~]+>; rel=\"next\"$","type":"string"}`,
		`Location {"pattern":"^/v1/pets/[1-9][0-9]*$","type":"string"}`,
		`Idempotency-Replayed {"enum":["true"],"type":"string"}`,
		`WWW-Authenticate {"enum":["Bearer realm=\"animalstore\"",` +
			`"Bearer realm=\"animalstore\", error=\"invalid_token\""],"type":"string"}`,
		`Retry-After {"minimum":1,"type":"integer"}`,
	}
	for name, values := range deprecatedHeader {
		want = append(want, fmt.Sprintf(`%s {"enum":%s,"type":"string"}`, name, toJSON(values)))
	}
	wantSame(t, "the responses and their headers in openapi.json", got, want)
}

// TestDocumentHasTheRequests compares openapi.json with the code, apart from responses, examples
// and prose. Here, a $ref is written as the name of what it refers to.
func TestDocumentHasTheRequests(t *testing.T) {
	t.Parallel()
	namePattern := at(document, "components", "schemas", "NewPet", "properties", "name", "pattern")

	want, err := parseJSON(fmt.Sprintf(`{
		"openapi": "3.0.3",
		"info": {"title": "Animal Store", "version": "1.0.0"},
		"servers": [{"url": "/"}],
		"tags": [{"name": "pets"}, {"name": "health"}],
		"security": [{"bearerAuth": []}],
		"paths": {
			"/healthz": {"get": {"operationId": "getHealth", "tags": ["health"], "security": []}},
			"/v1/pets": {
				"get": {"operationId": "listPets", "tags": ["pets"], "parameters": [
					{"in": "query", "name": "limit",
						"schema": {"type": "integer", "minimum": 1, "maximum": %d, "default": %d}},
					{"in": "query", "name": "status", "schema": "PetStatus"},
					{"in": "query", "name": "after",
						"schema": {"type": "integer", "format": "int64", "minimum": 0}}]},
				"post": {"operationId": "createPet", "tags": ["pets"], "parameters": [
					{"in": "header", "name": "Idempotency-Key", "schema":
						{"type": "string", "minLength": 1, "maxLength": %d, "pattern": "^[!-~]+$"}
					}],
					"requestBody": {"required": true,
						"content": {"application/json": {"schema": "NewPet"}}}}},
			"/v1/pets/{petId}": {
				"get": {"operationId": "getPet", "tags": ["pets"], "parameters": [
					{"in": "path", "name": "petId", "required": true,
						"schema": {"type": "integer", "format": "int64"}}],
					"deprecated": true}}},
		"components": {
			"securitySchemes":
				{"bearerAuth": {"type": "http", "scheme": "bearer", "bearerFormat": "API key"}},
			"schemas": {
				"PetStatus": {"type": "string", "enum": %s},
				"NewPet": {"type": "object", "required": ["name", "categoryId"],
					"additionalProperties": false, "properties": {
						"name": {"type": "string", "minLength": 1, "maxLength": %d, "pattern": %s},
						"categoryId": {"type": "integer", "format": "int64"},
						"status": {"allOf": ["PetStatus"]}}},
				"Pet": {"type": "object", "required": ["id", "name", "categoryId", "status"],
					"properties": {
						"id": {"type": "integer", "format": "int64", "minimum": 1},
						"name": {"type": "string"},
						"categoryId": {"type": "integer", "format": "int64"},
						"status": "PetStatus"}},
				"Pets": {"type": "array", "maxItems": %d, "items": "Pet"},
				"Health": {"type": "object", "required": ["status"],
					"properties": {"status": {"type": "string", "enum": ["ok"]}}},
				"Error": {"type": "object", "required": ["code", "message", "status"],
					"properties": {"code": {"type": "string"}, "message": {"type": "string"},
						"status": {"type": "integer", "minimum": 400, "maximum": 599}}}}}}`,
		maxLimit, defaultLimit, maxIdempotencyKey,
		toJSON(petStatuses), maxName, toJSON(namePattern), maxLimit))
	must(t, err)
	wantSame(t, "openapi.json", flatten("", document), flatten("", want))
}

// flatten returns a line for each value in a part of openapi.json, apart from responses, examples
// and prose.
func flatten(place string, part any) (lines []string) {
	lines = []string{place}
	switch part := part.(type) {
	case map[string]any:
		if ref, ok := part["$ref"].(string); ok {
			return flatten(place, path.Base(ref))
		}
		for name, member := range part {
			switch name {
			case "description", "summary", "x-deprecated-reason":
			case "example", "examples", "headers", "responses":
			default:
				lines = append(lines, flatten(place+" "+name, member)...)
			}
		}
	case []any:
		for i, item := range part {
			lines = append(lines, flatten(fmt.Sprint(place, " ", i), item)...)
		}
	default:
		lines[0] += fmt.Sprint(" = ", part)
	}
	return lines
}

// TestDocumentHasTheNumbers tests the numbers in the prose of openapi.json: all that it says with
// numbers is in one of these phrases.
func TestDocumentHasTheNumbers(t *testing.T) {
	t.Parallel()
	deprecation, sunset := deprecationDates()
	ten := map[int]string{10: "ten"}[maxFaults]
	phrases := []string{
		"UTF-8", "`/v1`", "/v1/pets", "after=N-1&limit=1", "64-bit", `\u006eame`, "U+0000",
		"zeros or `-0`", "`7.0`, `1e2` and `-0`", "Ids start at 1",
		"(RFC 8288)", "(RFC 6750", "(RFC 9745)", "(RFC 8594)", "(RFC 5829)",

		"unknown path gets 404", "wrong method 405", "both get 401", "400, 417, 431, 501 or 505",
		"502 and 504", "after 408, 5xx or no response within 15 seconds", "whose 201 was sent",
		"answered with 400", "201 means", "503 means", "After a 500", "response is 422",
		"Only a 201", "answered with 404", "answers within 8 seconds",

		fmt.Sprintf("up to %.0f of which it waits for another program", busyTimeout.Seconds()),
		fmt.Sprintf("within the %.0f seconds that a request has", readTimeout.Seconds()),
		fmt.Sprintf("for %.0f hours", idempotencyKeyLifetime.Hours()),
		"since " + deprecation,
		"scheduled for " + sunset,
		fmt.Sprintf("%d bytes", maxBody),
		fmt.Sprintf("1 to %d Unicode code points", maxName),
		fmt.Sprintf("up to %d Unicode code points", maxName),
		fmt.Sprintf("up to %s faults", ten),
		fmt.Sprintf("up to %s members or parameters", ten),
	}
	for status, code := range errorCodes {
		phrases = append(phrases, fmt.Sprintf("`%s` %d", code, status))
	}

	const member = `"(?:description|summary|x-deprecated-reason)": ("(?:\\.|[^"\\])*")`
	prose := ""
	for _, text := range findAll(member, string(openAPI)) {
		prose += unquote([]byte(text)) + "\n"
	}
	for _, phrase := range phrases {
		if !strings.Contains(prose, phrase) {
			t.Errorf("no description in openapi.json has %q", phrase)
		}
		prose = strings.ReplaceAll(prose, phrase, "")
	}
	for _, rest := range findAll(`(.*(?:\d|up to ).*)`, prose) {
		t.Errorf("openapi.json has a number that the test does not expect: %s", rest)
	}
}

// deprecationDates returns the dates in the headers of the deprecated operation.
func deprecationDates() (deprecation, sunset string) {
	const layout = "2 January 2006"
	seconds, _ := strconv.ParseInt(deprecatedHeader.Get("Deprecation")[1:], 10, 64)
	removal, _ := http.ParseTime(deprecatedHeader.Get("Sunset"))
	return time.Unix(seconds, 0).UTC().Format(layout), removal.Format(layout)
}

// TestDocumentHasRealExamples compares the examples of responses in openapi.json with responses of
// the service.
func TestDocumentHasRealExamples(t *testing.T) {
	s := parallelService(t)
	post := at(document, "paths", "/v1/pets", "post", "requestBody", "content", "application/json")
	bella := toJSON(at(post, "examples", "required", "value"))
	milo := toJSON(at(post, "examples", "status", "value"))
	getPet, _ := at(document, "paths", "/v1/pets/{petId}", "get", "parameters").([]any)
	late := httptest.NewRequest("POST", "/v1/pets", iotest.ErrReader(os.ErrDeadlineExceeded))

	replies := []reply{
		s.get("/healthz"),
		s.get("/v1/pets"),
		s.get("/v1/pets?colour=red&limit=0"),
		s.get("/v1/pets/1", "Authorization:"),
		s.get("/v1/pets/1"),
		s.post(`{"categoryId":"3"}`),
		s.post(bella, "Content-Type: text/plain"),
		s.post(strings.Repeat(" ", maxBody+1)),
		s.doRequest(late),
		s.post(bella, "Idempotency-Key: k"),
		s.post(bella, "Idempotency-Key: k"),
		s.post(milo, "Idempotency-Key: k"),
	}
	for _, parameter := range getPet {
		replies = append(replies, s.get(fmt.Sprint("/v1/pets/", at(parameter, "example"))))
	}
	s.post(milo).want(201)
	s.post(rex).want(201)
	replies = append(replies, s.get("/v1/pets?limit=2"))
	s.exec("DROP TABLE pets")
	replies = append(replies, s.get("/v1/pets/2"), s.get("/healthz"))

	var want []string
	for _, a := range replies {
		body, err := parseJSON(a.body)
		must(t, err)
		want = append(want, fmt.Sprint(a.status, " ", toJSON(body)))
		for _, name := range a.ownHeaders() {
			want = append(want, name+": "+a.header.Get(name))
		}
	}

	var got []string
	for name, response := range responses() {
		for _, e := range examples(response) {
			switch e.header {
			case "":
				got = append(got, name[len(name)-3:]+" "+toJSON(e.value)) // from the status on
			case "X-Request-Id": // is random
			default:
				got = append(got, fmt.Sprint(http.CanonicalHeaderKey(e.header), ": ", e.value))
			}
		}
	}
	wantSame(t, "the examples of responses in openapi.json", got, want)
}

func TestDocumentHasExamplesThatFitTheirSchemas(t *testing.T) {
	t.Parallel()

	for name, response := range responses() {
		for _, e := range examples(response) {
			for _, fault := range schemaFaults("the example "+e.header, e.schema, e.value) {
				t.Errorf("%s in openapi.json: %s", name, fault)
			}
		}
	}
}

// example is an example of a header, or, if that is "", of the body of a response.
type example struct {
	header        string
	schema, value any
}

// examples returns the examples of a response in openapi.json. The value of a missing one is nil.
func examples(response any) (all []example) {
	for name, header := range members(response, "headers") {
		all = append(all, example{name, at(header, "schema"), at(header, "example")})
	}

	content := members(response, "content", "application/json")
	several := members(content, "examples")
	for _, e := range several {
		all = append(all, example{"", content["schema"], at(e, "value")})
	}
	if len(several) == 0 {
		all = append(all, example{"", content["schema"], content["example"]})
	}
	return all
}

// TestDocumentHasThePatternOfNames compares the pattern of names in openapi.json with the code.
func TestDocumentHasThePatternOfNames(t *testing.T) {
	t.Parallel()
	name := at(document, "components", "schemas", "NewPet", "properties", "name")
	pattern := regexp.MustCompile(fmt.Sprint(at(name, "pattern")))

	for c := range rune(0x10000) {
		for _, name := range []string{string(c), "x" + string(c), string(c) + " "} {
			_, valid := parseName([]byte(toJSON(name)))
			if pattern.MatchString(name) != valid {
				t.Fatalf("the pattern of names in openapi.json is wrong for %q", name)
			}
		}
	}
}

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
	var all []pet
	for i := range 30 {
		all = append(all, s.add("Rex", 7, []string{"available", "pending", "sold"}[i%3]))
	}

	f.Fuzz(func(t *testing.T, query string) {
		r := httptest.NewRequest("GET", "/v1/pets", nil)
		r.URL.RawQuery = query

		a := s.as(t).doRequest(r)

		if a.status == 400 {
			return
		}
		want, more := expectedPage(all, query)
		if got := decode[[]pet](a.want(200)); !slices.Equal(got, want) {
			t.Errorf("%q = %v, want %v", query, got, want)
		}
		if link := a.header.Get("Link"); (link != "") != more {
			t.Errorf("%q has Link %q, want one: %v", query, link, more)
		}
	})
}

// expectedPage returns the page of all animals that a valid query selects, and whether more follow.
func expectedPage(all []pet, query string) (page []pet, more bool) {
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
		rex, "{}", "[]", `{"name":"\ud83d","categoryId":1e2}`, `{"name":"x","name":"y"}`,
		"{\"name\":\"\xff\"}", `{"name":"x","categoryId":-0}`, `{"Name":"x","categoryId":1}`,
	} {
		f.Add(body)
	}
	s := newService(f)

	f.Fuzz(func(t *testing.T, body string) {
		c := s.as(t)
		a := c.post(body)

		if a.status == 400 || a.status == 413 && len(body) > 64<<10 {
			return
		}
		a.want(201)
		c.wantAsSent(body, a)
	})
}

// Benchmarks.

// BenchmarkCachedPage lists the same animals again and again.
func BenchmarkCachedPage(b *testing.B) {
	s := newService(b)
	s.addMany(1000, "Rex")

	for b.Loop() {
		if status := s.statusOf("GET", "/v1/pets", ""); status != 200 {
			b.Fatalf("GET /v1/pets = %d, want 200", status)
		}
	}
}

// BenchmarkPages lists other animals each time, more than the cache can hold.
func BenchmarkPages(b *testing.B) {
	const animals = 100_000
	s := newService(b)
	s.addMany(animals, "Rex")

	for after := 0; b.Loop(); after = (after + 1) % animals {
		target := fmt.Sprint("/v1/pets?after=", after)
		if status := s.statusOf("GET", target, ""); status != 200 {
			b.Fatalf("GET %s = %d, want 200", target, status)
		}
	}
}

// BenchmarkCreates adds animals for many clients at once, as group commit needs: -cpu 2 for 64.
func BenchmarkCreates(b *testing.B) {
	s := newService(b)
	b.SetParallelism(32) // goroutines for each processor: they wait for the disk

	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if status := s.statusOf("POST", "/v1/pets", rex); status != 201 {
				b.Errorf("POST /v1/pets = %d, want 201", status)
			}
		}
	})
}

// statusRule is the message about a status.
const statusRule = "status must be one of available, pending, sold"

// Helpers.

type faults []string

func (f *faults) check(ok bool, format string, args ...any) {
	if !ok {
		f.add(format, args...)
	}
}
func (f *faults) add(format string, args ...any) { *f = append(*f, fmt.Sprintf(format, args...)) }

// testKey and otherKey are the API keys that a service under test accepts.
const (
	testKey  = "test-key"
	otherKey = "other-key"
)

// rex is an animal to add.
const rex = `{"name":"Rex","categoryId":7}`

// client sends requests, with testKey unless a test says otherwise, and checks every response
// against openapi.json.
type client struct {
	t    testing.TB
	url  string // of the service, "" if it is in this process
	send func(*http.Request) (*http.Response, error)
}

// reply is a response that has been read, and the request that it answers.
type reply struct {
	t       testing.TB
	request string // for messages
	status  int
	header  http.Header
	body    string
	closes  bool // the response has Connection: close
}

// do sends a request. A header is written as "Name: value"; "Authorization:" sends no API key.
func (c *client) do(method, target, body string, headers ...string) reply {
	c.t.Helper()
	return c.doRequest(httptest.NewRequest(method, c.url+target, strings.NewReader(body)), headers...)
}

// get sends a GET request.
func (c *client) get(target string, headers ...string) reply {
	c.t.Helper()
	return c.do("GET", target, "", headers...)
}

// post sends POST /v1/pets.
func (c *client) post(body string, headers ...string) reply {
	c.t.Helper()
	return c.do("POST", "/v1/pets", body, headers...)
}

// doRequest sends a request that the test has made. It fails the test if there is no response.
func (c *client) doRequest(r *http.Request, headers ...string) reply {
	c.t.Helper()
	a, err := c.try(r, headers...)
	if err != nil {
		c.t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	return a
}

// try is doRequest, but returns an error if there is no response.
func (c *client) try(r *http.Request, headers ...string) (reply, error) {
	c.t.Helper()
	setHeaders(r, headers)
	r.RequestURI = "" // or http.Client refuses a request of httptest.NewRequest
	resp, err := c.send(r)
	if err != nil {
		return reply{}, err
	}
	return readReply(c.t, r, resp)
}

// setHeaders adds headers to a request, and testKey unless there is an Authorization among them.
func setHeaders(r *http.Request, headers []string) {
	withKey := true
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ":")
		value = strings.TrimPrefix(value, " ")
		if name == "Authorization" {
			withKey = false
			if value == "" {
				continue
			}
		}
		r.Header.Add(name, value)
	}
	if withKey {
		r.Header.Set("Authorization", "Bearer "+testKey)
	}
}

// readReply reads a response, and checks it against openapi.json.
func readReply(t testing.TB, r *http.Request, resp *http.Response) (reply, error) {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return reply{}, err
	}

	a := reply{
		t:       t,
		request: fmt.Sprintf("%.200s %.500s", r.Method, r.URL),
		status:  resp.StatusCode,
		header:  resp.Header,
		body:    string(body),
		closes:  resp.Close,
	}
	for _, fault := range contractFaults(r, a) {
		t.Errorf("%s = %d: %s", a.request, a.status, fault)
	}
	return a, nil
}

// want checks the status of a response, and that its body contains all the words.
func (a reply) want(status int, words ...string) reply {
	a.t.Helper()
	if a.status != status {
		a.t.Errorf("%s = %d %s, want %d", a.request, a.status, a.body, status)
	}
	for _, w := range words {
		if !strings.Contains(a.body, w) {
			a.t.Errorf("%s = %d %s, want %q in it", a.request, a.status, a.body, w)
		}
	}
	return a
}

// decode decodes the body of a response.
func decode[T any](a reply) (v T) {
	a.t.Helper()
	if err := json.Unmarshal([]byte(a.body), &v); err != nil {
		a.t.Fatalf("%s = %s: %v", a.request, a.body, err)
	}
	return v
}

// add adds an animal and returns it.
func (c *client) add(name string, category int64, status string) pet {
	c.t.Helper()
	body := encode(newPet{Name: name, CategoryID: category, Status: status})
	return decode[pet](c.post(string(body)).want(201))
}

// service is the whole service on a database of its own, in this process.
type service struct {
	t testing.TB
	client
	database
	*server
	close func() error // closes the store; the end of the test does that, too
}

// newService opens a service on a new database. It logs to the test, and to logs.
func newService(t testing.TB, logs ...io.Writer) *service {
	t.Helper()
	return openService(t, filepath.Join(t.TempDir(), "animals.db"), logs...)
}

// openService opens a service on the database in a file.
func openService(t testing.TB, file string, logs ...io.Writer) *service {
	t.Helper()
	if _, ok := t.(*testing.T); ok { // for benchmarks and fuzz tests it would be too much
		logs = append(logs, t.Output())
	}
	logger := slog.New(slog.NewTextHandler(io.MultiWriter(logs...), nil))

	k, err := loadKeys(config{apiKeys: testKey + "," + otherKey, apiKeysSet: true})
	must(t, err)
	st, err := openStore(file, logger)
	must(t, err)

	s := &service{
		t:        t,
		database: database{t, file},
		server:   newAPI(st, k, logger),
		close:    sync.OnceValue(st.close),
	}
	s.client = client{t: t, send: s.respond}
	t.Cleanup(func() { must(t, s.close()) })
	return s
}

// respond lets the handler of the service answer a request, without a network.
func (s *service) respond(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	r.RequestURI = r.URL.RequestURI()
	s.ServeHTTP(w, r)
	return w.Result(), nil
}

// parallelService opens a service on a new database, for a test that runs in parallel with others.
func parallelService(t *testing.T) *service {
	t.Helper()
	t.Parallel()
	limitTime(t)
	return newService(t)
}

// withFakeClock runs a test on a service under a fake clock, in parallel with other tests.
func withFakeClock(t *testing.T, test func(t *testing.T, s *service), logs ...io.Writer) {
	t.Parallel()
	limitTime(t)
	synctest.Test(t, func(t *testing.T) {
		s := newService(t, logs...)
		synctest.Wait() // until the watcher has looked for the first time
		test(t, s)
	})
}

// limitTime ends all tests with a panic that names t if it takes longer than 30 seconds by the real
// clock: a fake one stands still while a goroutine waits for a lock.
func limitTime(t *testing.T) {
	limit := time.AfterFunc(30*time.Second, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { limit.Stop() })
}

// database is a database file, as other programs use it.
type database struct {
	t    testing.TB
	file string
}

// connect opens the database as another program would.
func (d database) connect() *sql.DB {
	d.t.Helper()
	location := url.URL{Scheme: "file", Path: d.file, RawQuery: "_pragma=busy_timeout(10000)"}
	db, err := sql.Open("sqlite", location.String())
	must(d.t, err)
	db.SetMaxOpenConns(1)
	d.t.Cleanup(func() { db.Close() })
	return db
}

// exec runs SQL statements.
func (d database) exec(statements string, args ...any) {
	d.t.Helper()
	db := d.connect()
	defer db.Close()
	if _, err := db.Exec(statements, args...); err != nil {
		d.t.Fatalf("%s: %v", statements, err)
	}
}

// query returns the value that a query returns, as text.
func (d database) query(query string) (value string) {
	d.t.Helper()
	db := d.connect()
	defer db.Close()
	if err := db.QueryRow(query).Scan(&value); err != nil {
		d.t.Fatalf("%s: %v", query, err)
	}
	return value
}

// wantQuery checks the value that a query returns.
func (d database) wantQuery(query, want string) {
	d.t.Helper()
	if got := d.query(query); got != want {
		d.t.Errorf("%s = %s, want %s", query, got, want)
	}
}

// addMany adds animals with a name: every 400th is pending, the others are sold.
func (d database) addMany(count int, name string) {
	d.t.Helper()
	d.exec(`WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
		INSERT INTO pets (name, category_id, status)
		SELECT ?, 1, iif(i % 400 = 0, 'pending', 'sold') FROM n`, count, name)
}

// lock takes the write lock, until unlock is called.
func (d database) lock() (unlock func()) {
	d.t.Helper()
	db := d.connect()
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(d.t, err)
	return func() { must(d.t, db.Close()) }
}

// connections holds the open connections of the last service on each database file. The first is
// the one that writes.
var connections = struct {
	sync.Mutex
	to map[string][]sqlite.ExecQuerierContext
}{to: map[string][]sqlite.ExecQuerierContext{}}

// callbacks maps a database file to the func() error that the SQL expression call(file) runs.
var callbacks sync.Map

// watchSQLite makes the driver fill connections, and run callbacks.
func watchSQLite() {
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		location, err := url.Parse(dsn)
		if err != nil {
			return err
		}
		connections.Lock()
		defer connections.Unlock()

		file := location.Path
		switch location.Query().Get("mode") {
		case "rwc":
			connections.to[file] = []sqlite.ExecQuerierContext{conn}
		case "ro", "rw":
			connections.to[file] = append(connections.to[file], conn)
		}
		return nil
	})

	call := func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
		f, _ := callbacks.Load(args[0])
		return nil, f.(func() error)()
	}
	sqlite.MustRegisterScalarFunction("call", 1, call)
}

// connections returns the open connections of the service. The first is the one that writes.
func (s *service) connections() []sqlite.ExecQuerierContext {
	connections.Lock()
	defer connections.Unlock()
	return slices.Clone(connections.to[s.file])
}

// pragma runs a PRAGMA on a connection of the service, and returns its result, if there is one.
func (s *service) pragma(connection int, text string) string {
	s.t.Helper()
	conn := s.connections()[connection]
	rows, err := conn.QueryContext(context.Background(), "PRAGMA "+text, nil)
	must(s.t, err)
	defer rows.Close()

	value := make([]driver.Value, max(1, len(rows.Columns())))
	rows.Next(value) // returns io.EOF if there is no result
	return fmt.Sprint(value[0])
}

// onRead makes the service call f whenever it reads an animal. The first call replaces the table by
// a view, of the table animals.
func (s *service) onRead(f func() error) {
	s.t.Helper()
	_, again := callbacks.Swap(s.file, f)
	if !again {
		s.exec("ALTER TABLE pets RENAME TO animals; CREATE VIEW pets AS SELECT id, " +
			"coalesce(call('" + s.file + "'), name) AS name, category_id, status FROM animals")
	}
}

// onCommit makes the service call f whenever it commits.
func (s *service) onCommit(f func()) {
	s.connections()[0].(sqlite.HookRegisterer).RegisterCommitHook(func() int32 {
		f()
		return 0
	})
}

// pipes is a net.Listener for connections in memory, which work under a fake clock.
type pipes struct {
	conns  chan net.Conn
	closed context.Context
	cancel context.CancelFunc // ends closed
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
	l.cancel()
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

// receive reads the response to a request that was sent on conn.
func (s *service) receive(conn net.Conn, method, target string) reply {
	s.t.Helper()
	r := httptest.NewRequest(method, target, nil)
	setHeaders(r, nil)
	resp, err := http.ReadResponse(bufio.NewReader(conn), r)
	must(s.t, err)
	a, err := readReply(s.t, r, resp)
	must(s.t, err)
	return a
}

// serveOn serves connections from ln until stop is called. stop returns when the service has
// stopped.
func (s *service) serveOn(ln net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error)
	go func() { ended <- s.serve(ctx, ln) }()
	return func() {
		s.t.Helper()
		cancel()
		must(s.t, <-ended)
	}
}

// serveInMemory serves connections in memory, under a fake clock, until stop is called.
func (s *service) serveInMemory() (ln *pipes, stop func()) {
	ln = &pipes{conns: make(chan net.Conn)}
	ln.closed, ln.cancel = context.WithCancel(context.Background())
	s.t.Cleanup(func() { time.Sleep(time.Minute) }) // until all goroutines of net/http have ended
	return ln, s.serveOn(ln)
}

// process is the program, running as a process.
type process struct {
	client
	cmd    *exec.Cmd
	stderr *os.File // the end of the pipe from which the test reads the log
	lines  *bufio.Scanner
	log    strings.Builder // all that was read of it
}

// execSelf is the line of shell that becomes the program.
const execSelf = `exec "$0" "$@"`

// command returns a command that runs the program on a free port and a new database, unless args
// say otherwise. shell is a line of shell that ends in execSelf.
func command(t testing.TB, shell string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)

	all := []string{"-c", shell, os.Args[0],
		"-addr", "127.0.0.1:0", "-db", filepath.Join(t.TempDir(), "animals.db")}
	cmd := exec.CommandContext(ctx, "sh", append(all, args...)...)
	cmd.Env = append(os.Environ(), "ANIMALSTORE_PROCESS=1", "API_KEYS="+testKey)
	_, err := cmd.StdinPipe() // its end tells the process that the test is over: see TestMain
	must(t, err)
	return cmd
}

// start starts the program on a database, and waits until it serves.
func start(t testing.TB, db string) *process {
	t.Helper()
	return startCommand(t, command(t, execSelf, "-db", db))
}

// startCommand starts the program, and waits until it serves.
func startCommand(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	cmd.Stderr = w
	must(t, cmd.Start())
	w.Close()

	p := &process{cmd: cmd, stderr: r, lines: bufio.NewScanner(r)}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		r.Close()
	})
	p.client = client{t: t, send: http.DefaultClient.Do}
	p.url = p.awaitLog(`msg=started url=(\S+)`)[1]
	return p
}

// awaitLog reads the log up to a line that matches pattern, and returns the submatches.
func (p *process) awaitLog(pattern string) []string {
	p.t.Helper()
	for p.lines.Scan() {
		fmt.Fprintln(&p.log, p.lines.Text())
		if match := regexp.MustCompile(pattern).FindStringSubmatch(p.lines.Text()); match != nil {
			return match
		}
	}
	p.t.Fatalf("the log has no line with %s: %s", pattern, p.log.String())
	return nil
}

// awaitEnd waits until the process has ended, and returns its exit status and its whole log.
func (p *process) awaitEnd() (status int, log string) {
	p.t.Helper()
	for p.lines.Scan() {
		fmt.Fprintln(&p.log, p.lines.Text())
	}
	p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode(), p.log.String()
}

// stop stops the process with a signal, and returns its exit status and its whole log.
func (p *process) stop(sig syscall.Signal) (status int, log string) {
	p.t.Helper()
	p.cmd.Process.Signal(sig)
	return p.awaitEnd()
}

// shell runs a line of shell in a folder.
func shell(t testing.TB, dir, line string, args ...string) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-e", "-c", line}, args...)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v %s", line, err, out)
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

// lookup returns a replacement of os.LookupEnv for an environment.
func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		value, ok := env[name]
		return value, ok
	}
}

// writeFile creates a file with text in a folder, and returns its path.
func writeFile(t testing.TB, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name)
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
		data, _ := os.ReadFile(filepath.Join(dir, e.Name())) // fails for a folder
		text += fmt.Sprintf("%s %v %x\n", e.Name(), info.ModTime(), sha256.Sum256(data))
	}
	return text
}

// as returns the client for a subtest, to which failures then belong.
func (c client) as(t testing.TB) *client {
	c.t = t
	return &c
}

// wantHeader checks the value of a header, "" for none.
func (a reply) wantHeader(name, want string) {
	a.t.Helper()
	if got := strings.Join(a.header.Values(name), ", "); got != want {
		a.t.Errorf("%s = %d with %s %q, want %q", a.request, a.status, name, got, want)
	}
}

// nextPage returns the target of the next page, or "" if a is the last one.
func (a reply) nextPage() string {
	link, _ := strings.CutSuffix(a.header.Get("Link"), `>; rel="next"`)
	return strings.TrimPrefix(link, "<")
}

// statusOf lets the handler answer a request, and returns the status. Unlike do, it checks nothing,
// and so takes little time and memory.
func (s *service) statusOf(method, target, body string) int {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+testKey)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Code
}

// keyCheck is what a service with certain API keys must accept and refuse.
type keyCheck struct {
	accepted []string
	refused  []string
}

// wantKeys checks which keys a service with the settings c accepts.
func wantKeys(t *testing.T, c config, check keyCheck) {
	t.Helper()
	k, err := loadKeys(c)
	must(t, err)
	logger := slog.New(slog.NewTextHandler(t.Output(), nil))
	st, err := openStore(filepath.Join(t.TempDir(), "animals.db"), logger)
	must(t, err)
	t.Cleanup(func() { must(t, st.close()) })
	s := &service{server: newAPI(st, k, logger)}
	s.client = client{t: t, send: s.respond}

	for _, key := range check.accepted {
		if a := s.get("/v1/pets", "Authorization: Bearer "+key); a.status != 200 {
			t.Errorf("with the key %q: %s = %d, want 200", key, a.request, a.status)
		}
	}
	for _, key := range check.refused {
		if a := s.get("/v1/pets", "Authorization: Bearer "+key); a.status != 401 {
			t.Errorf("with the key %q: %s = %d, want 401", key, a.request, a.status)
		}
	}
}

// madeKey returns the API key that the process has made and logged.
func (p *process) madeKey() string {
	p.t.Helper()
	line := regexp.MustCompile(` api_key=([A-Z2-7]{26})\n`).FindStringSubmatch(p.log.String())
	if line == nil {
		p.t.Fatalf("the log has no new API key: %s", p.log.String())
	}
	return line[1]
}

// outcome is what a run of the program in this process has done.
type outcome struct {
	args           []string
	status         int
	stdout, stderr string
	before         string // snapshot of the folder before the run
}

// runWith runs the program on a free port until it ends, with settings that must not start the
// service. Unless args say otherwise, its database is a new one in dir.
func runWith(t *testing.T, dir string, env map[string]string, args ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // in case the service starts
	defer cancel()
	var stdout, stderr bytes.Buffer
	before := snapshot(t, dir)

	all := append([]string{"-addr", "127.0.0.1:0", "-db", filepath.Join(dir, "new.db")}, args...)
	status := run(ctx, all, lookup(env), &stdout, &stderr)
	return outcome{
		args:   args,
		status: status,
		stdout: stdout.String(),
		stderr: stderr.String(),
		before: before,
	}
}

// String describes o in messages.
func (o outcome) String() string {
	return fmt.Sprintf("animalstore %q = %d, standard output %q, standard error %q",
		o.args, o.status, o.stdout, o.stderr)
}

// wantError checks that the program ended with this status and one line on standard error that
// contains words, but no API key, and that it changed no file in dir.
func (o outcome) wantError(t *testing.T, status int, words, dir string) {
	t.Helper()
	oneLine := strings.Count(o.stderr, "\n") == 1 && strings.HasSuffix(o.stderr, "\n")
	if o.status != status || o.stdout != "" || !oneLine ||
		!strings.HasPrefix(o.stderr, "animalstore: ") || !strings.Contains(o.stderr, words) {
		t.Errorf("%s; want %d and one line with %q", o, status, words)
	}
	if strings.Contains(o.stderr, "secret") {
		t.Errorf("%s; want no API key", o)
	}
	o.wantNoChange(t, dir)
}

// wantSuccess checks that the program ended with status 0, without errors, and that it changed no
// file in dir.
func (o outcome) wantSuccess(t *testing.T, dir string) {
	t.Helper()
	if o.status != 0 || o.stderr != "" {
		t.Errorf("%s; want 0, and nothing on standard error", o)
	}
	o.wantNoChange(t, dir)
}

// wantNoChange checks that the program has not changed a file in dir.
func (o outcome) wantNoChange(t *testing.T, dir string) {
	t.Helper()
	if after := snapshot(t, dir); after != o.before {
		t.Errorf("%s changed the files from\n%s to\n%s", o, o.before, after)
	}
}

// newDatabaseIn creates a folder with animals.db, a database of this service with the animal Rex.
// It runs a line of shell in the folder, and then SQL on animals.db.
func newDatabaseIn(t *testing.T, line, sql string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s := openService(t, filepath.Join(dir, "animals.db"))
	s.add("Rex", 7, "available")
	must(t, s.close())

	shell(t, dir, line)
	if sql != "" {
		s.exec(sql)
	}
	return dir
}

// wantFiles checks the names of all files in dir.
func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("the files are %q, want %q", got, want)
	}
}

// brokenListener is a net.Listener that accepts no connection.
type brokenListener struct{ cause error }

func (l brokenListener) Accept() (net.Conn, error) { return nil, l.cause }
func (l brokenListener) Close() error              { return nil }
func (l brokenListener) Addr() net.Addr            { return &net.TCPAddr{} }

// rawKey is the header with testKey, as it is sent.
const rawKey = "Authorization: Bearer " + testKey

// rawList is GET /v1/pets, as it is sent.
var rawList = rawRequest("GET /v1/pets", rawKey)

// rawRequest returns a request without its body, as it is sent.
func rawRequest(methodAndTarget string, headers ...string) string {
	lines := append([]string{methodAndTarget + " HTTP/1.1", "Host: x"}, headers...)
	return strings.Join(lines, "\r\n") + "\r\n\r\n"
}

// sendEvery sends text again and again, until the connection is closed.
func sendEvery(pause time.Duration, conn net.Conn, text string) {
	for err := error(nil); err == nil; _, err = io.WriteString(conn, text) {
		time.Sleep(pause)
	}
}

// inBackground calls f in a goroutine. The channel receives how long that took.
func inBackground(f func()) (took chan time.Duration) {
	took = make(chan time.Duration, 1)
	go func() {
		start := time.Now()
		f()
		took <- time.Since(start)
	}()
	return took
}

// wantStop checks how long a stop took, and that the log says whether it cut off connections.
func wantStop(t *testing.T, took, least, most time.Duration, log *bytes.Buffer) {
	t.Helper()
	synctest.Wait() // until all handlers have logged
	if took < least || took > most {
		t.Errorf("the stop took %v, want %v to %v", took, least, most)
	}
	cut := strings.Contains(log.String(), `level=WARN msg="connections were cut off"`)
	if cut != (least == longStop) {
		t.Errorf("the log says that connections were cut off: %v; %s", cut, log.String())
	}
}

// newCertificate writes a certificate and its key to files in dir, and returns a transport that
// trusts it, and would use HTTP/2.
func newCertificate(t *testing.T, dir string) (certFile, keyFile string, trusting *http.Transport) {
	t.Helper()
	ts := httptest.NewTLSServer(nil) // has a certificate for 127.0.0.1
	defer ts.Close()
	key, err := x509.MarshalPKCS8PrivateKey(ts.TLS.Certificates[0].PrivateKey)
	must(t, err)
	writePEM := func(name, kind string, content []byte) string {
		block := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content})
		return writeFile(t, dir, name, string(block))
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

// startWithTLS starts the program with a certificate that the transport trusts. The requests of
// the process use that transport.
func startWithTLS(t *testing.T) (p *process, trusting *http.Transport) {
	t.Helper()
	cert, key, trusting := newCertificate(t, t.TempDir())
	p = startCommand(t, command(t, execSelf, "-tls-cert", cert, "-tls-key", key))
	p.send = trusting.RoundTrip
	return p, trusting
}

// allIDs is a query for the ids of all animals.
const allIDs = "SELECT group_concat(id ORDER BY id) FROM pets"

// closedDatabase returns a new database with animals, which no process has open.
func closedDatabase(t testing.TB, count int) database {
	t.Helper()
	s := newService(t)
	s.addMany(count, "Rex")
	must(t, s.close())
	return s.database
}

// wantRefused runs the program, and checks that it ends with status 1 and one line of output that
// contains words, and changes nothing in a folder.
func wantRefused(t testing.TB, cmd *exec.Cmd, dir, words string) {
	t.Helper()
	before := snapshot(t, dir)

	out, _ := cmd.CombinedOutput()

	status, lines := cmd.ProcessState.ExitCode(), strings.Count(string(out), "\n")
	if status != 1 || lines != 1 || !strings.Contains(string(out), words) {
		t.Errorf("%q: status %d, output %s; want 1, one line with %q",
			cmd.Args[4:], status, out, words)
	}
	if after := snapshot(t, dir); after != before {
		t.Errorf("%q: the files were\n%s and are\n%s", cmd.Args[4:], before, after)
	}
}

// The check of every response against openapi.json.

// document is openapi.json, as parseJSON returns it.
var document, _ = parseJSON(string(openAPI))

// parseJSON parses JSON. A number becomes a json.Number, which has all its digits.
func parseJSON(text string) (v any, err error) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	err = dec.Decode(&v)
	return v, err
}

// toJSON returns v as JSON.
func toJSON(v any) string {
	return strings.TrimSpace(string(encode(v)))
}

// at returns the value at path in a part of openapi.json, or nil. It follows references.
func at(part any, path ...string) any {
	object, _ := part.(map[string]any)
	if ref, ok := object["$ref"].(string); ok {
		target := at(document, strings.Split(ref, "/")[1:]...)
		return at(target, path...)
	}
	if len(path) == 0 {
		return part
	}
	return at(object[path[0]], path[1:]...)
}

// members returns the object at path in a part of openapi.json, or nil.
func members(part any, path ...string) map[string]any {
	object, _ := at(part, path...).(map[string]any)
	return object
}

// responses returns the responses in openapi.json, by names such as GET /v1/pets 200.
func responses() map[string]any {
	all := map[string]any{}
	for path := range members(document, "paths") {
		for method, operation := range members(document, "paths", path) {
			for status, response := range members(operation, "responses") {
				all[strings.ToUpper(method)+" "+path+" "+status] = response
			}
		}
	}
	return all
}

// schemaFaults returns how a value, as parseJSON returns it, breaks a schema in openapi.json. Each
// keyword of a schema is a rule of its own; these are the ones that the schemas of responses have.
// A member that a schema does not name is a fault, too.
func schemaFaults(place string, schema, value any) (f faults) {
	text, isText := value.(string)
	n, isInt := parseInt(fmt.Sprint(value))
	isInt = isInt && !isText
	list, isList := value.([]any)
	object, isObject := value.(map[string]any)
	types := map[any]bool{"string": isText, "integer": isInt, "array": isList, "object": isObject}

	f.check(at(schema, "type") != nil, "openapi.json has no type for %s", place)
	for keyword, rule := range members(schema) {
		limit, _ := parseInt(fmt.Sprint(rule))
		ok := true
		switch keyword {
		case "type":
			ok = types[rule]
		case "enum":
			ok = slices.Contains(rule.([]any), value)
		case "pattern":
			ok = regexp.MustCompile(rule.(string)).MatchString(text)
		case "minimum":
			ok = n >= limit
		case "maximum":
			ok = n <= limit
		case "maxItems":
			ok = len(list) <= int(limit)
		case "required":
			for _, name := range rule.([]any) {
				ok = ok && object[name.(string)] != nil
			}
		case "items":
			for i, item := range list {
				f = append(f, schemaFaults(fmt.Sprint(place, " ", i), rule, item)...)
			}
		case "properties":
			for name, member := range object {
				f = append(f, schemaFaults(place+" "+name, at(rule, name), member)...)
			}
		case "description", "format": // are not rules
		default:
			f.add("schemaFaults does not know %s", keyword)
		}
		f.check(ok, "%s is %v, but in openapi.json, %s is %v", place, value, keyword, rule)
	}
	return f
}

// commonHeaders are the headers of every response, with patterns of their values.
var commonHeaders = map[string]string{
	"Cache-Control":          "^no-store$",
	"Content-Length":         "^[1-9][0-9]*$",
	"Content-Type":           "^application/json$",
	"X-Content-Type-Options": "^nosniff$",
	"X-Request-Id":           "^[A-Z2-7]{26}$",
}

// ownHeaders returns the names of the headers of a response that not all responses have.
func (a reply) ownHeaders() []string {
	return slices.DeleteFunc(slices.Collect(maps.Keys(a.header)), func(name string) bool {
		return commonHeaders[name] != "" || name == "Date" || name == "Connection"
	})
}

// contractFaults returns how a response breaks the rules for all responses, or differs from
// openapi.json.
func contractFaults(r *http.Request, a reply) (f faults) {
	for name, pattern := range commonHeaders {
		values := a.header[name]
		ok := len(values) == 1 && regexp.MustCompile(pattern).MatchString(values[0])
		f.check(ok, "%s is %q", name, values)
	}
	for name, status := range map[string]int{
		"Www-Authenticate": 401, "Allow": 405, "Retry-After": 503,
	} {
		values := a.header[name]
		f.check((len(values) == 1) == (a.status == status), "%s is %q", name, values)
	}

	if r.Method == "HEAD" {
		f.check(a.body == "", "the body is %q", a.body)
		return append(f, documentFaults(r, a)...)
	}
	length := a.header.Get("Content-Length")
	f.check(json.Valid([]byte(a.body)), "the body is not JSON: %q", a.body)
	f.check(length == strconv.Itoa(len(a.body)), "Content-Length of %q is %s", a.body, length)
	f.check(!strings.Contains(a.body, testKey), "the body has the API key: %s", a.body)
	if a.status >= 400 {
		f = append(f, errorFaults(a)...)
	}
	return append(f, documentFaults(r, a)...)
}

// errorFaults returns how the body of an error differs from openapi.json, errorCodes and Allow.
func errorFaults(a reply) (f faults) {
	body, _ := parseJSON(a.body)
	got := fmt.Sprint(at(body, "status"), " ", at(body, "code"))
	want := fmt.Sprint(a.status, " ", errorCodes[a.status])
	f.check(got == want, "the error is %s, want %s", got, want)

	allowed := strings.HasSuffix(fmt.Sprint(at(body, "message")), " only "+a.header.Get("Allow"))
	f.check(allowed == (a.status == 405), "Allow is %q, the body %s", a.header["Allow"], a.body)

	schema := at(document, "components", "schemas", "Error")
	return append(f, schemaFaults("the error", schema, body)...)
}

// documentFaults returns how a response differs from openapi.json.
func documentFaults(r *http.Request, a reply) (f faults) {
	path := regexp.MustCompile(`^/v1/pets/[^/]+$`).ReplaceAllString(r.URL.Path, "/v1/pets/{petId}")
	method := strings.ToLower(strings.Replace(r.Method, "HEAD", "GET", 1))
	operation := members(document, "paths", path, method)
	if operation == nil || r.URL.RawPath != "" { // which is set for an unusual encoding, as of %2F
		itself := path == "/openapi.json" && a.status == 200
		ok := itself || slices.Contains([]int{401, 404, 405, 500}, a.status)
		f.check(ok, "openapi.json does not have the operation")
		return f
	}

	secured := operation["security"] == nil
	f.check(r.Header.Get("Authorization") != "" || (a.status == 401) == secured,
		"openapi.json says that an API key is required: %t", secured)
	response := members(operation, "responses", strconv.Itoa(a.status))
	f.check(response != nil, "openapi.json does not have the status")

	documented := map[string]bool{}
	for name, header := range members(response, "headers") {
		documented[http.CanonicalHeaderKey(name)] = true
		values := a.header.Values(name)
		required := at(header, "required") == true
		f.check(len(values) == 1 || len(values) == 0 && !required, "%s is %q", name, values)
		for _, value := range values {
			f = append(f, headerFaults(name, at(header, "schema"), value)...)
		}
	}
	for _, name := range a.ownHeaders() {
		f.check(documented[name], "openapi.json does not have the header %s", name)
	}
	if r.Method != "HEAD" {
		body, _ := parseJSON(a.body)
		schema := at(response, "content", "application/json", "schema")
		f = append(f, schemaFaults("the body", schema, body)...)
	}
	return f
}

// headerFaults returns how the value of a header breaks a schema.
func headerFaults(name string, schema any, value string) faults {
	if at(schema, "type") == "integer" {
		return schemaFaults(name, schema, json.Number(value))
	}
	return schemaFaults(name, schema, value)
}

// findAll returns what the group of a pattern matches, in all matches in a text.
func findAll(pattern, text string) (all []string) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		all = append(all, match[1])
	}
	return all
}

// wantSame checks that two lists have the same items, in any order, and repeated or not.
func wantSame(t *testing.T, what string, got, want []string) {
	t.Helper()
	for _, item := range got {
		if !slices.Contains(want, item) {
			t.Errorf("%s: unexpected: %s", what, item)
		}
	}
	for _, item := range want {
		if !slices.Contains(got, item) {
			t.Errorf("%s: missing: %s", what, item)
		}
	}
}
