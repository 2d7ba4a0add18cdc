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

// The tests send requests to the whole service, on a real database file: to its handler in this
// process (newService), under a fake clock (withFakeClock), or to a process (start). Each response
// is checked against openapi.json (reply.check). The helpers stand at the end of this file.

// TestMain runs the tests, or, in a process that a test has started, the program itself.
func TestMain(m *testing.M) {
	hookSQLite()
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

// Paths, methods and API keys.

func TestPathsAndMethods(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")

	cases := []struct {
		paths   []string
		methods []string
		status  int
		allow   string // the Allow header
		open    bool   // no API key is needed
	}{
		{paths: []string{"/healthz", "/openapi.json"}, methods: []string{"GET", "HEAD"}, status: 200, open: true},
		{paths: []string{"/v1/pets", "/v1/pets/1"}, methods: []string{"GET", "HEAD"}, status: 200},
		{paths: []string{"/v1/pets/2", "/v1/pets/x"}, methods: []string{"GET", "HEAD"}, status: 404},
		{
			paths:   []string{"/healthz", "/openapi.json", "/v1/pets/1", "/v1/pets/2", "/v1/pets/x"},
			methods: []string{"POST", "PUT", "DELETE", "OPTIONS", "CONNECT"},
			status:  405,
			allow:   "GET, HEAD",
		},
		{
			paths:   []string{"/v1/pets"},
			methods: []string{"PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"},
			status:  405,
			allow:   "GET, HEAD, POST",
		},
		{
			paths: []string{
				"/", "/v1", "/pets", "/V1/pets", "/v1/pets/", "/v1/pets/1/", "/v1/pets/1/name",
				"//v1/pets", "/v1//pets", "/v1/./pets", "/v1/../v1/pets", "/v1%2Fpets", "/v1/pets/%2F",
				"/v1/store/orders", "/metrics", "/debug/pprof/", "/healthz/",
			},
			methods: []string{"GET", "POST", "CONNECT"},
			status:  404,
		},
	}
	for _, c := range cases {
		for _, path := range c.paths {
			for _, method := range c.methods {
				t.Run(method+" "+path, func(t *testing.T) {
					a := s.as(t).do(method, path, rex).want(c.status)
					a.wantHeader("Allow", c.allow)

					if c.open {
						s.as(t).do(method, path, rex, "Authorization:").want(c.status)
					} else {
						s.as(t).do(method, path, rex, "Authorization:").want(401).wantHeader("Allow", "")
					}
				})
			}
		}
	}
	s.db.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestAPIKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")
	s.get("/v1/pets").want(200) // and now it is in the cache

	const (
		valid   = "Authorization: Bearer " + testKey
		missing = `Bearer realm="animalstore"`
		invalid = `Bearer realm="animalstore", error="invalid_token"`
	)
	cases := []struct {
		name      string
		headers   []string
		status    int
		challenge string
	}{
		{name: "a key", headers: []string{valid}, status: 200},
		{name: "another key", headers: []string{"Authorization: Bearer " + otherKey}, status: 200},
		{name: "scheme in another case", headers: []string{"Authorization: bEARER " + testKey}, status: 200},
		{name: "no header", headers: []string{"Authorization:"}, status: 401, challenge: missing},
		{name: "another scheme", headers: []string{"Authorization: Basic " + testKey}, status: 401, challenge: missing},
		{name: "no scheme", headers: []string{"Authorization: " + testKey}, status: 401, challenge: missing},
		{name: "no token", headers: []string{"Authorization: Bearer  "}, status: 401, challenge: missing},
		{name: "two headers", headers: []string{valid, valid}, status: 401, challenge: missing},
		{name: "unknown key", headers: []string{"Authorization: Bearer guess"}, status: 401, challenge: invalid},
		{name: "two keys", headers: []string{valid + "," + otherKey}, status: 401, challenge: invalid},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := s.as(t).get("/v1/pets", c.headers...).want(c.status)

			a.wantHeader("WWW-Authenticate", c.challenge)
			if c.status == 401 {
				a.want(401, "Authorization: Bearer API_KEY", "GET /openapi.json").wantNot("Rex")
			}
		})
	}
}

// TestOrderOfFaults sends requests with several faults. Each row lacks the fault of the row above.
func TestOrderOfFaults(t *testing.T) {
	t.Parallel()
	s := newService(t)

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
			body := &countingReader{Reader: strings.NewReader(strings.Repeat("x", maxBody+1))}

			r := httptest.NewRequest(method, target, body)
			s.as(t).doRequest(r, c.headers...).want(c.status, c.want)

			if c.status != 413 && body.reads > 0 {
				t.Errorf("%s read the body %d times, want 0", c.request, body.reads)
			}
		})
	}
}

// countingReader counts the calls of Read.
type countingReader struct {
	io.Reader
	reads int
}

func (c *countingReader) Read(p []byte) (int, error) {
	c.reads++
	return c.Reader.Read(p)
}

func TestHeadIsGetWithoutABody(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")
	s.add("Tom", 8, "sold")

	for _, target := range []string{
		"/v1/pets?limit=1", "/v1/pets?limit=0", "/v1/pets/1", "/v1/pets/3", "/healthz", "/openapi.json", "/x",
	} {
		t.Run(target, func(t *testing.T) {
			get := s.as(t).get(target)
			head := s.as(t).do("HEAD", target, "")

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

func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	log := newLog(t)
	h := func(*request) (response, error) { panic("a mistake in the code") }
	srv := newServer(map[string]handler{"/panic": h, "/": unknownPath}, slog.New(slog.NewTextHandler(log, nil)))
	c := &client{t: t, send: sendTo(srv)}

	a := c.get("/panic").want(500, `"internal error"`).wantNot("mistake")
	c.get("/").want(404)

	line, _, _ := strings.Cut(log.String(), "\n")
	for _, want := range []string{
		"level=ERROR", "status=500", `error="panic: a mistake in the code`,
		"TestPanicInAHandler", // in the stack
		a.header.Get("X-Request-Id"),
	} {
		if !strings.Contains(line, want) {
			t.Errorf("GET /panic logged %s, want %q in it", line, want)
		}
	}
}

// Lists and fetches.

func TestListPets(t *testing.T) {
	t.Parallel()
	s := newService(t)
	var all, sold []Pet
	for i := range 45 {
		p := s.add(fmt.Sprint("animal ", i), int64(-i), petStatuses[i%3])
		all = append(all, p)
		if p.Status == "sold" {
			sold = append(sold, p)
		}
	}

	cases := []struct {
		name  string
		query string
		want  []Pet
		link  string // the query of the next page, "" for none
	}{
		{name: "twenty by default", query: "", want: all[:20], link: "?after=20"},
		{name: "the largest limit", query: "?limit=100", want: all},
		{name: "exactly the limit", query: "?limit=45", want: all},
		{name: "one more than the limit", query: "?limit=44", want: all[:44], link: "?after=44&limit=44"},
		{name: "from the middle", query: "?after=7&limit=2", want: all[7:9], link: "?after=9&limit=2"},
		{name: "the last page", query: "?after=44", want: all[44:]},
		{name: "after the last animal", query: "?after=45", want: []Pet{}},
		{name: "after the last int64", query: "?after=9223372036854775807", want: []Pet{}},
		{name: "one status", query: "?status=sold", want: sold},
		{name: "one status, exactly the limit", query: "?status=sold&limit=15", want: sold},
		{
			name:  "one status, the first page",
			query: "?limit=14&status=sold",
			want:  sold[:14],
			link:  "?after=42&limit=14&status=sold",
		},
		{name: "one status, the last page", query: "?after=42&limit=14&status=sold", want: sold[14:]},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			link := ""
			if c.link != "" {
				link = "</v1/pets" + c.link + `>; rel="next"`
			}
			for range 2 { // the second time from the cache
				a := s.as(t).get("/v1/pets" + c.query).want(200)

				a.wantHeader("Link", link)
				if got := decode[[]Pet](a); got == nil || !slices.Equal(got, c.want) {
					t.Errorf("%s = %v, want %v", a.request, got, c.want)
				}
			}
		})
	}
}

func TestInvalidListParameters(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "sold")

	const (
		limitRule = "limit must be an integer from 1 to 100"
		afterRule = "after must be the last id of a page, an integer from 0 to 9223372036854775807"
	)
	cases := []struct{ name, query, want string }{
		{name: "limit below the minimum", query: "limit=0", want: limitRule},
		{name: "limit above the maximum", query: "limit=101", want: limitRule},
		{name: "limit beyond int64", query: "limit=9223372036854775808", want: limitRule},
		{name: "limit with a plus sign", query: "limit=%2B5", want: limitRule},
		{name: "limit with a leading zero", query: "limit=05", want: limitRule},
		{name: "empty limit", query: "limit=", want: limitRule},
		{name: "status in another case", query: "status=Sold", want: statusRule},
		{name: "empty status", query: "status=", want: statusRule},
		{name: "negative after", query: "after=-1", want: afterRule},
		{name: "after with a leading zero", query: "after=007", want: afterRule},
		{name: "repeated parameter", query: "limit=5&limit=5", want: `\"limit\" must not be repeated`},
		{name: "unknown parameter", query: "colour=red", want: `unknown parameter \"colour\"`},
		{name: "parameter in another case", query: "Limit=5", want: `unknown parameter \"Limit\"`},
		{name: "semicolon", query: "limit=5;after=1", want: "the query string is malformed"},
		{name: "broken escape", query: "status=%zz", want: "the query string is malformed"},
		{
			name:  "several faults",
			query: "limit=0&status=x&foo=1",
			want:  `unknown parameter \"foo\"; ` + limitRule + "; " + statusRule,
		},
		{
			name:  "name of a parameter that is too long to quote",
			query: strings.Repeat("x", 5000),
			want:  `unknown parameter \"` + strings.Repeat("x", 64) + `\"`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).get("/v1/pets?"+c.query).want(400, `"message":"`+c.want+`"`)
		})
	}
}

func TestManyFaultsAreCounted(t *testing.T) {
	t.Parallel()
	s := newService(t)

	s.get("/v1/pets?a&b&c&d&e&f&g&h&i&j").want(400, `unknown parameter \"j\""`)
	s.get("/v1/pets?a&b&c&d&e&f&g&h&i&j&k").want(400, `unknown parameter \"j\"; and 1 more"`)
}

// TestWalk follows the Links, while animals are added and deleted.
func TestWalk(t *testing.T) {
	t.Parallel()
	for _, target := range []string{"/v1/pets?limit=4", "/v1/pets?limit=4&status=sold"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			var want []int64
			for i := range 30 {
				p := s.add("Rex", 7, petStatuses[i%3])
				if p.Status == "sold" || !strings.Contains(target, "sold") {
					want = append(want, p.ID)
				}
			}

			var got []int64
			for next := target; next != ""; {
				a := s.get(next).want(200)
				for _, p := range decode[[]Pet](a) {
					got = append(got, p.ID)
				}
				next, _ = strings.CutSuffix(strings.TrimPrefix(a.header.Get("Link"), "<"), `>; rel="next"`)

				s.add("late", 7, "sold")
				s.db.exec("DELETE FROM pets WHERE id = ?", got[0]) // pages by number would shift
			}

			late := len(got) - len(want)
			if late < 1 || !slices.Equal(got[:len(want)], want) {
				t.Errorf("a walk from %s = ids %v, want %v and late ones", target, got, want)
			}
			if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
				t.Errorf("a walk from %s = ids %v, want each once", target, got)
			}
		})
	}
}

func TestGetPet(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.add("Rex", 7, "pending")
	s.db.exec("INSERT INTO pets (id, name, category_id) VALUES (3, 'Tom', 8), (9223372036854775807, 'Max', 9)")

	cases := []struct {
		id     string
		status int
		want   string
	}{
		{id: "1", status: 200, want: `{"id":1,"name":"Rex","categoryId":7,"status":"pending"}`},
		{id: "3", status: 200, want: `{"id":3,"name":"Tom","categoryId":8,"status":"available"}`},
		{id: "9223372036854775807", status: 200, want: "Max"},
		{id: "2", status: 404}, // and not the next animal
		{id: "0", status: 404},
		{id: "-1", status: 404},
		{id: "9223372036854775808", status: 404},
		{id: "01", status: 404},
		{id: "+1", status: 404},
		{id: "-0", status: 404},
		{id: "1.0", status: 404},
		{id: "%201", status: 404},
		{id: "Rex", status: 404},
	}
	for _, c := range cases {
		t.Run(c.id, func(t *testing.T) {
			for range 2 { // the second time from the cache
				a := s.as(t).get("/v1/pets/"+c.id).want(c.status, c.want)
				a.wantDeprecated()
			}
		})
	}
	s.do("HEAD", "/v1/pets/1", "").wantDeprecated()
	s.get("/v1/pets/1", "Authorization:").want(401).wantDeprecated()
}

// wantDeprecated checks the headers of the deprecated operation.
func (a reply) wantDeprecated() {
	a.t.Helper()
	a.wantHeader("Deprecation", "@1795132800") // 20 November 2026
	a.wantHeader("Sunset", "Thu, 05 Dec 2030 00:00:00 GMT")
	a.wantHeader("Link", `</v1/pets>; rel="successor-version"`)
}

func TestIgnoredPartsOfRequests(t *testing.T) {
	t.Parallel()
	s := newService(t)
	headers := []string{"Accept: text/html", "Content-Type: text/plain", "If-None-Match: *", "Range: bytes=0-3"}

	s.do("POST", "/v1/pets?limit=x&a;b&%zz", rex).want(201)
	s.get("/v1/pets/1?limit=x&a;b&%zz").want(200, "Rex")
	s.do("GET", "/v1/pets", "a body", headers...).want(200, "Rex")
}

// What a list shows when the database changes.

// TestCreatesShowAtOnce lists animals all the time while they are added. A list that begins after a
// 201 must have the animal, whatever other requests have put into the cache meanwhile.
func TestCreatesShowAtOnce(t *testing.T) {
	t.Parallel()
	s := newService(t)
	var stopped atomic.Bool
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for !stopped.Load() {
				s.get("/v1/pets?limit=100").want(200)
			}
		})
	}

	for range 50 {
		p := s.add("Rex", 7, "sold")
		s.get("/v1/pets?limit=100").want(200, fmt.Sprintf(`"id":%d,`, p.ID))
		s.get("/v1/pets?status=sold&limit=100").want(200, fmt.Sprintf(`"id":%d,`, p.ID))
	}
	stopped.Store(true)
	readers.Wait()
}

func TestEditsShowWithinASecond(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("old", 7, "sold")
		time.Sleep(time.Minute + time.Millisecond) // a quiet spell that ends after a look
		targets := []string{"/v1/pets", "/v1/pets?status=sold", "/v1/pets/1"}
		for _, target := range targets {
			s.get(target).want(200, "old") // and now it is in the cache
		}

		s.db.exec("UPDATE pets SET name = 'new'")
		time.Sleep(time.Second)

		for _, target := range targets {
			s.get(target).want(200, "new")
		}
	})
}

// TestEditDuringARead lets another program edit an animal while a list is reading it.
func TestEditDuringARead(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.add("old", 7, "sold")
		reading, goOn := make(chan struct{}), make(chan struct{})
		var held atomic.Bool
		s.db.onRead(func() error {
			if held.CompareAndSwap(false, true) {
				close(reading)
				<-goOn
			}
			return nil
		})
		time.Sleep(time.Second) // until the service has noticed what onRead changed

		var first reply
		var answered sync.WaitGroup
		answered.Go(func() { first = s.get("/v1/pets") })
		<-reading
		s.db.exec("UPDATE hidden SET name = 'new'")
		time.Sleep(time.Second) // until the service has noticed it
		s.get("/v1/pets").want(200, "new")
		close(goOn)
		answered.Wait()

		first.want(200, "old")
		s.get("/v1/pets").want(200, "new")
	})
}

// TestRepeatedReadsAreCached counts the animals that the service reads. A page takes one more than
// it shows.
func TestRepeatedReadsAreCached(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		s.db.addMany(50)
		read := 0
		s.db.onRead(func() error { read++; return nil })
		time.Sleep(time.Second) // until the service has noticed what onRead changed

		for range 10 {
			s.get("/v1/pets?limit=5").want(200, `"id":5,`).wantNot(`"id":6,`)
		}

		if read != 6 {
			t.Errorf("10 requests for a page of 5 read %d animals, want 6", read)
		}
	})
}

// TestCacheIsBounded keeps many responses, of which the cache must forget most.
func TestCacheIsBounded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		responses int
		size      int // of a response, in bytes
		most      int // responses that may be kept
	}{
		{name: "large responses", responses: 50, size: 1 << 20, most: 9},
		{name: "small responses", responses: 100_000, size: 3, most: 30_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			var kept int
			var responses cache
			for i := range c.responses {
				responses.put(strconv.Itoa(i), 1, response{body: make([]byte, c.size)})
			}
			for i := range c.responses {
				if _, found := responses.get(strconv.Itoa(i), 1); found {
					kept++
				}
			}

			if kept == 0 || kept > c.most {
				t.Errorf("%d of %d responses are kept, want 1 to %d", kept, c.responses, c.most)
			}
		})
	}
}

// TestFailedReadsFreeTheirConnections fails more reads than there are connections. One that is not
// given back would be missing later.
func TestFailedReadsFreeTheirConnections(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.db.addMany(3)

	cases := []struct {
		name    string
		target  string
		animals int // that can be read before the error
		status  int
	}{
		{name: "a list, at its first animal", target: "/v1/pets?limit=8", status: 500},
		{name: "a list, at its second animal", target: "/v1/pets?limit=9", animals: 1, status: 500},
		{name: "a list of one status", target: "/v1/pets?status=sold", status: 500},
		{name: "a fetch", target: "/v1/pets/1", status: 500},
		{name: "a health check", target: "/healthz", status: 503},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.log.reset()
			for range 20 {
				read := 0
				s.db.onRead(func() error {
					if read++; read > c.animals {
						return errors.New("the dog ate it")
					}
					return nil
				})
				s.as(t).get(c.target).want(c.status).wantNot("dog")
			}

			s.log.want("level=ERROR", "the dog ate it")
			s.db.onRead(func() error { return nil })
			s.as(t).get(c.target).want(200)
		})
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
		t.Run(body, func(t *testing.T) {
			a := s.as(t).post(body).want(201)

			a.wantSent(body)
			a.wantHeader("Location", fmt.Sprint("/v1/pets/", i+1))
			a.wantHeader("Idempotency-Replayed", "")
			s.as(t).get(a.header.Get("Location")).want(200, a.body)
		})
	}
	s.get("/v1/pets/1").want(200, `{"id":1,"name":"Rex","categoryId":7,"status":"available"}`+"\n")
	s.get("/v1/pets/3").want(200, `"<&>"`) // and not escaped for HTML

	s.db.exec("DELETE FROM pets")
	next := fmt.Sprintf(`"id":%d,`, len(validBodies)+1)
	s.post(rex).want(201, next) // no id is used again
}

// wantSent checks that the response to a create has the animal that body describes.
func (a reply) wantSent(body string) {
	a.t.Helper()
	sent, _ := parseJSON(body).(map[string]any)
	if sent["status"] == nil {
		sent["status"] = "available"
	}
	got, _ := parseJSON(a.body).(map[string]any)
	delete(got, "id")
	if !maps.Equal(got, sent) {
		a.t.Errorf("POST %q = %s, want the animal that was sent", body, a.body)
	}
}

func TestInvalidBodies(t *testing.T) {
	t.Parallel()
	s := newService(t)

	const objectRule = "the body must be one JSON object"
	cases := []struct{ name, body, want string }{
		{name: "nothing", body: "", want: objectRule},
		{name: "null", body: "null", want: objectRule},
		{name: "half an object", body: `{"name":"x","categoryId":1 `, want: objectRule},
		{name: "a trailing comma", body: `{"name":"x","categoryId":1,}`, want: objectRule},
		{name: "two objects", body: rex + "{}", want: objectRule},
		{name: "invalid UTF-8", body: "{\"name\":\"\xff\",\"categoryId\":1}", want: "the body must be UTF-8"},

		{name: "no members", body: `{}`, want: `"name is required; categoryId is required"`},
		{name: "null as name", body: `{"name":null,"categoryId":1}`, want: nameRule},
		{name: "a number as name", body: `{"name":1,"categoryId":1}`, want: nameRule},
		{name: "white space as name", body: `{"name":" \u00a0\u2003\u3000\u0085","categoryId":1}`, want: nameRule},
		{name: "U+0000 in the name", body: `{"name":"a\u0000b","categoryId":1}`, want: nameRule},
		{name: "U+FFFD in the name", body: `{"name":"a\uFFFDb","categoryId":1}`, want: nameRule},
		{name: "half a surrogate pair", body: `{"name":"\uD83D","categoryId":1}`, want: nameRule},
		{
			name: "a name of 256 characters",
			body: `{"name":"` + strings.Repeat("é", 256) + `","categoryId":1}`,
			want: nameRule,
		},

		{name: "null as categoryId", body: `{"name":"x","categoryId":null}`, want: categoryRule},
		{name: "a string as categoryId", body: `{"name":"x","categoryId":"1"}`, want: categoryRule},
		{name: "a fraction as categoryId", body: `{"name":"x","categoryId":1.0}`, want: categoryRule},
		{name: "minus zero as categoryId", body: `{"name":"x","categoryId":-0}`, want: categoryRule},
		{name: "more than int64", body: `{"name":"x","categoryId":9223372036854775808}`, want: categoryRule},

		{name: "null as status", body: `{"name":"x","categoryId":1,"status":null}`, want: statusRule},
		{name: "a status in another case", body: `{"name":"x","categoryId":1,"status":"Sold"}`, want: statusRule},

		{name: "an unknown member", body: `{"name":"x","categoryId":1,"id":5}`, want: `"unknown member \"id\""`},
		{
			name: "a member in another case",
			body: `{"Name":"x","categoryId":1}`,
			want: `unknown member \"Name\"; name is required`,
		},
		{
			name: "a repeated member",
			body: `{"name":"x","n\u0061me":"y","categoryId":1}`,
			want: `"\"name\" must not be repeated"`,
		},
		{
			name: "several faults",
			body: `{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`,
			want: `"` + statusRule + "; " + nameRule + `; unknown member \"x\"; ` + categoryRule + `"`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s.as(t).post(c.body).want(400, c.want)
		})
	}
	s.get("/v1/pets").want(200, "[]")
}

func TestContentType(t *testing.T) {
	t.Parallel()
	s := newService(t)

	const quoted = `Content-Type must be application/json, not \"`
	long := "application/json" + strings.Repeat("x", 99)
	cases := []struct {
		name   string
		values []string
		status int
		want   string
	}{
		{name: "none", status: 201},
		{name: "JSON", values: []string{"application/json"}, status: 201},
		{name: "JSON in another case", values: []string{"Application/JSON"}, status: 201},
		{name: "JSON in another charset", values: []string{`application/json;charset="utf-16"`}, status: 201},
		{name: "text", values: []string{"text/plain"}, status: 415, want: quoted + `text/plain\"`},
		{name: "an empty header", values: []string{""}, status: 415, want: quoted},
		{name: "half a parameter", values: []string{"application/json; x"}, status: 415, want: quoted},
		{name: "very long", values: []string{long}, status: 415, want: quoted + long[:64] + `\""`},
		{name: "two headers", values: []string{"application/json", "application/json"}, status: 415, want: quoted},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var headers []string
			for _, v := range c.values {
				headers = append(headers, "Content-Type: "+v)
			}

			s.as(t).post(rex, headers...).want(c.status, c.want)
		})
	}
	s.db.wantQuery("SELECT count(*) FROM pets", "4")
}

func TestSizeOfABody(t *testing.T) {
	t.Parallel()
	s := newService(t)
	largest := rex + strings.Repeat(" ", 64<<10-len(rex))

	s.post(largest).want(201)
	s.post(largest + " ").want(413)

	chunked := io.MultiReader(strings.NewReader(largest), strings.NewReader(" "))
	s.doRequest(httptest.NewRequest("POST", "/v1/pets", chunked)).want(413)
}

func TestInterruptedBody(t *testing.T) {
	t.Parallel()
	s := newService(t)

	for _, received := range []string{"", `{"name":`, rex} {
		t.Run("after "+received, func(t *testing.T) {
			body := io.MultiReader(strings.NewReader(received), iotest.ErrReader(io.ErrUnexpectedEOF))
			r := httptest.NewRequest("POST", "/v1/pets", body)
			s.as(t).doRequest(r).want(400, "the request body could not be read to its end")
		})
	}
	s.get("/v1/pets").want(200, "[]")
}

// TestClientThatIsGone sends requests whose context has ended, as net/http does for a client that
// has closed its connection.
func TestClientThatIsGone(t *testing.T) {
	t.Parallel()
	s := newService(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	create := httptest.NewRequestWithContext(gone, "POST", "/v1/pets", strings.NewReader(rex))
	s.doRequest(create).want(201)
	s.doRequest(httptest.NewRequestWithContext(gone, "GET", "/v1/pets", nil)).want(200, "Rex")
}

// TestWaitingCreatesShareCommits adds animals to a locked database, two different ones with each
// Idempotency-Key, and one that a trigger leaves out. Each must get its own result.
func TestWaitingCreatesShareCommits(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.db.exec(`CREATE TRIGGER leave_out BEFORE INSERT ON pets WHEN new.category_id = 13
		BEGIN SELECT RAISE(IGNORE); END`)
	before := s.db.walSize()
	unlock := s.db.lock()

	const pairs = 40
	var begun, answered sync.WaitGroup
	var statuses [600]atomic.Int64
	create := func(body, key string) {
		begun.Add(1)
		answered.Go(func() {
			begun.Done()
			statuses[s.post(body, "Idempotency-Key: "+key).status].Add(1)
		})
	}
	for i := range pairs {
		create(rex, fmt.Sprint("pair-", i))
		create(`{"name":"Tom","categoryId":8}`, fmt.Sprint("pair-", i))
	}
	create(`{"name":"Zoe","categoryId":13}`, "left-out")
	begun.Wait()
	unlock()
	answered.Wait()

	created, refused, failed := statuses[201].Load(), statuses[422].Load(), statuses[400].Load()
	if created != pairs || refused != pairs || failed != 1 {
		t.Errorf("%d pairs = %d times 201, %d times 422, %d times 400; want 40, 40, 1",
			pairs, created, refused, failed)
	}
	s.db.wantQuery("SELECT count(*) FROM pets", strconv.Itoa(pairs))

	const ownCommits = pairs * 5 * 4096 // bytes: a commit for each animal would write 5 pages
	if grown := s.db.walSize() - before; grown > ownCommits/2 {
		t.Errorf("the write-ahead log has grown by %d bytes, want at most %d", grown, ownCommits/2)
	}
}

// walSize returns the size of the write-ahead log in bytes.
func (d database) walSize() int64 {
	d.t.Helper()
	return fileSize(d.file + "-wal")
}

// Idempotency.

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
			t.Parallel()
			s := newService(t)
			first := s.post(rex, "Idempotency-Key: k").want(201)
			s.db.exec(c.meanwhile)
			must(t, s.close())

			s = openService(t, s.db.file) // the keys survive a restart
			again := s.post(c.repeat, "Idempotency-Key: k").want(201, first.body)

			again.wantHeader("Location", first.header.Get("Location"))
			again.wantHeader("Idempotency-Replayed", "true")
			first.wantHeader("Idempotency-Replayed", "")
			s.db.wantQuery("SELECT count(*) FROM pets", c.stored)
		})
	}
}

func TestIdempotencyKeyOfAnotherAnimal(t *testing.T) {
	t.Parallel()
	s := newService(t)
	first := s.post(rex, "Idempotency-Key: k").want(201)

	for _, body := range []string{
		`{"name":"rex","categoryId":7}`,
		`{"name":"Rex","categoryId":8}`,
		`{"name":"Rex","categoryId":7,"status":"sold"}`,
	} {
		t.Run(body, func(t *testing.T) {
			a := s.as(t).post(body, "Idempotency-Key: k").want(422)
			a.wantHeader("Location", "")
			a.wantHeader("Idempotency-Replayed", "")
		})
	}
	s.post(`{"name":1}`, "Idempotency-Key: k").want(400) // and not 422
	s.post(rex, "Idempotency-Key: k").want(201, first.body)
	s.db.wantQuery("SELECT count(*) FROM pets", "1")
}

func TestIdempotencyKeysAreApart(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.post(`{"name":1}`, "Idempotency-Key: k").want(400) // uses up no key
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
			a := s.as(t).post(rex, c.headers...).want(201).wantNot(first.body)
			a.wantHeader("Idempotency-Replayed", "")
		})
	}
	s.post(rex, "Idempotency-Key: k").want(201, first.body).wantHeader("Idempotency-Replayed", "true")
}

func TestIdempotencyKeyIsChecked(t *testing.T) {
	t.Parallel()
	s := newService(t)

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
	s.db.wantQuery("SELECT count(*) FROM pets", "1")
}

// TestIdempotencyKeysExpire checks that a key is remembered for 24 hours, and that each create with a
// key deletes two that have expired.
func TestIdempotencyKeysExpire(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		for _, key := range []string{"a", "b", "c", "d", "e"} {
			s.post(rex, "Idempotency-Key: "+key).want(201)
		}
		s.db.exec("UPDATE idempotency_keys SET created = created - 24 * 3600")
		s.post(rex, "Idempotency-Key: a").want(201).wantHeader("Idempotency-Replayed", "true")

		s.db.exec("UPDATE idempotency_keys SET created = created - 1")
		s.post(rex).want(201) // without a key
		s.db.wantQuery("SELECT count(*) FROM idempotency_keys", "5")
		s.post(rex, "Idempotency-Key: a").want(201).wantHeader("Idempotency-Replayed", "")
		s.db.wantQuery("SELECT count(*) FROM idempotency_keys", "3") // a, and two that have expired
		s.post(rex, "Idempotency-Key: new").want(201)
		s.db.wantQuery("SELECT group_concat(key ORDER BY key) FROM idempotency_keys", "a,new")
		s.post(rex, "Idempotency-Key: a").want(201).wantHeader("Idempotency-Replayed", "true")
	})
}

// The log.

func TestLogOfARequest(t *testing.T) {
	const fingerprint = " key_sha256=62af8704" // printf %s test-key | sha256sum
	long := strings.Repeat("x", 1024)
	cases := []struct {
		name    string
		request string
		headers []string
		want    []string
		not     []string
	}{
		{
			name:    "a list",
			request: "GET /v1/pets?after=7",
			headers: []string{"X-Request-Id: mine"},
			want: []string{
				"level=INFO msg=request id=",
				" client=192.0.2.1:1234 method=GET path=/v1/pets status=200 bytes=3 duration=0s" +
					fingerprint + "\n",
			},
			not: []string{"after", "mine"},
		},
		{
			name:    "a fault of the client",
			request: "GET /v1/pets?limit=0",
			want:    []string{"level=INFO", fingerprint, ` error="limit must be an integer from 1 to 100"`},
		},
		{
			name:    "an invalid API key",
			request: "GET /v1/pets",
			headers: []string{"Authorization: Bearer guess"},
			want:    []string{"level=INFO", " status=401 ", ` error="a valid API key is required`},
			not:     []string{"key_sha256"},
		},
		{
			name:    "a long method and path",
			request: long + "y /" + long + "y",
			want:    []string{" method=" + long + " path=/" + long[1:] + " status=404 "},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				s.log.reset()

				method, target, _ := strings.Cut(c.request, " ")
				a := s.do(method, target, "", c.headers...)

				s.log.want(append(c.want, " id="+a.header.Get("X-Request-Id")+" ")...)
				s.log.wantNot(append(c.not, testKey, "guess")...)
				if strings.Count(s.log.String(), "\n") != 1 {
					t.Errorf("%s logged %s, want one line", a.request, s.log)
				}
			})
		})
	}
}

// TestLogOfNetHTTP expects that the lines of net/http, which a stranger can make very long, are cut.
func TestLogOfNetHTTP(t *testing.T) {
	t.Parallel()
	log := newLog(t)
	w := httpLog{slog.New(slog.NewTextHandler(log, nil))}

	io.WriteString(w, strings.Repeat("x", 64<<10)+"\n")

	log.want("level=INFO msg=" + strings.Repeat("x", 1024) + "\n")
}

// TestLogThatNobodyReads closes the other end of the pipe to which the program logs.
func TestLogThatNobodyReads(t *testing.T) {
	t.Parallel()
	cmd := command(t, execSelf)
	r, w, err := os.Pipe()
	must(t, err)
	cmd.Stderr = w
	must(t, cmd.Start())
	w.Close()

	lines := bufio.NewScanner(r)
	started := startedLine.FindStringSubmatch
	for lines.Scan() && started(lines.Text()) == nil {
	}
	location := started(lines.Text())
	if location == nil {
		t.Fatal("the program has not started")
	}
	r.Close()
	c := &client{t: t, url: location[1], send: http.DefaultClient.Do}
	c.post(rex).want(201)
	c.get("/v1/pets").want(200, "Rex")

	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("a stop of the program: %v, want status 0", err)
	}
}

// Settings.

func TestKeys(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name     string
		apiKeys  string
		file     string // "" for none
		accepted []string
		refused  []string
	}{
		{
			name:     "in the environment",
			apiKeys:  " four, #five ,,one\n",
			accepted: []string{"four", "#five", "one"},
			refused:  []string{"", ",", "five", "four, #five"},
		},
		{
			name:     "in a file, with comments and white space",
			file:     "# old, older\n  one \n\n\ttwo\t\n\t# oldest\nthree#3",
			accepted: []string{"one", "two", "three#3"},
			refused:  []string{"", "old", "# oldest", "oldest", "three"},
		},
		{
			name:     "in a file, with the line breaks and the byte order mark of Windows",
			file:     "\ufeff# none\r\none\r\n\r\ntwo\r\n",
			accepted: []string{"one", "two"},
			refused:  []string{"", "none", "# none"},
		},
		{
			name:     "in both",
			apiKeys:  "both,new",
			file:     "old\nboth\n",
			accepted: []string{"old", "both", "new"},
			refused:  []string{"", "old,both"},
		},
		{name: "in a file alone", apiKeys: " ,", file: "one", accepted: []string{"one"}, refused: []string{"", ","}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := ""
			if c.file != "" {
				file = writeFile(t, "keys", c.file)
			}
			k, err := loadKeys(c.apiKeys, c.apiKeys != "", file)
			must(t, err)
			s := openServiceWith(t, k, filepath.Join(t.TempDir(), "animals.db"))

			for _, key := range c.accepted {
				s.get("/v1/pets", "Authorization: Bearer "+key).want(200)
			}
			for _, key := range c.refused {
				s.get("/v1/pets", "Authorization: Bearer "+key).want(401)
			}
		})
	}
}

// TestSettingsOfAProcess checks that the real settings reach the service.
func TestSettingsOfAProcess(t *testing.T) {
	t.Parallel()
	keysFile := writeFile(t, "keys", "filed-key\n")
	cmd := command(t, execSelf, "-addr", "0.0.0.0:0", "-db", ":memory:", "-keys", keysFile)
	cmd.Dir = t.TempDir()

	p := startCommand(t, cmd)

	p.get("/v1/pets").want(200) // with testKey, which is in API_KEYS
	p.get("/v1/pets", "Authorization: Bearer filed-key").want(200)
	p.get("/v1/pets", "Authorization: Bearer "+otherKey).want(401)
	file := filepath.Join(cmd.Dir, ":memory:")
	p.log.want(
		`level=WARN msg="the database is new and empty" database=`+file+"\n",
		" database="+file+" keys=2 version=",
	)
	p.log.wantNot(testKey, "filed-key", "api_key")
	p.stop(syscall.SIGTERM)
	wantFiles(t, cmd.Dir, ":memory:")
}

func TestServiceWithoutAKeyMakesOne(t *testing.T) {
	t.Parallel()
	made := map[string]bool{}
	for range 2 {
		p := startCommand(t, command(t, "unset API_KEYS; "+execSelf))

		key := p.log.await(` api_key=([A-Z2-7]{26})\n`)[1]
		made[key] = true
		p.get("/v1/pets", "Authorization: Bearer "+key).want(200)
		p.get("/v1/pets", "Authorization:").want(401)
		p.stop(syscall.SIGTERM)
		if strings.Count(p.log.String(), key) != 1 {
			t.Errorf("the log has the key %s more than once: %s", key, p.log)
		}
	}
	if len(made) != 2 {
		t.Error("two starts made the same key")
	}
}

func TestHelpAndVersion(t *testing.T) {
	t.Parallel()

	_, help, _ := runProgram(t, "", "-h")
	for _, want := range []string{
		"Usage: animalstore", "-addr HOST:PORT", `(default "127.0.0.1:8080")`, "-db FILE", "-keys FILE",
		"$API_KEYS", "-tls-cert FILE", "-tls-key FILE", "-backup FILE", "-version",
	} {
		if !strings.Contains(help, want) {
			t.Errorf("animalstore -h printed %s, want %q in it", help, want)
		}
	}

	status, version, stderr := runProgram(t, "", "-version")
	if want := "animalstore " + buildVersion() + "\n"; status != 0 || version != want || stderr != "" {
		t.Errorf("animalstore -version = %d, %s, %s, want 0 and %s", status, version, stderr, want)
	}
}

func TestMistakesInTheCommandLine(t *testing.T) {
	t.Parallel()
	const pair = "-tls-cert and -tls-key go together"
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{name: "a stray argument", args: []string{"a\nb"}, want: `unexpected argument "a\nb"`},
		{name: "an unknown flag", args: []string{"-api-key", "secret"}, want: "not defined: -api-key"},
		{name: "a flag without its value", args: []string{"-addr"}, want: "needs an argument: -addr"},
		{name: "an empty address", args: []string{"-addr", ""}, want: "-addr must not be empty"},
		{name: "an empty database", args: []string{"-db", ""}, want: "-db must not be empty"},
		{name: "a certificate without its key", args: []string{"-tls-cert", "x"}, want: pair},
		{name: "the key of a certificate alone", args: []string{"-tls-key", "x"}, want: pair},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			args := append([]string{"-db", dir + "/animals.db"}, c.args...)
			wantRefused(t, dir, 2, c.want, "API_KEYS=secret", args...)
		})
	}
}

func TestMistakesInTheKeys(t *testing.T) {
	t.Parallel()
	const (
		none    = "API_KEYS and -keys contain no API key"
		invalid = "an API key must consist of visible ASCII characters"
	)
	for _, c := range []struct {
		name string
		env  string
		file string // "" for no -keys
		want string
	}{
		{name: "empty API_KEYS", env: "API_KEYS=", want: none},
		{name: "a space in a key", env: "API_KEYS=one, my secret", want: "API_KEYS, item 2: " + invalid},
		{name: "an accent in a key", env: "API_KEYS=,,ésecret", want: "API_KEYS, item 3: " + invalid},
		{name: "comments alone in the file", file: writeFile(t, "keys", "# secret\n\n  \r\n"), want: none},
		{
			name: "a comma in the file",
			env:  "API_KEYS=secret",
			file: writeFile(t, "keys", "# none\r\none\r\ntwo,secret\r\n"),
			want: `keys": line 3: ` + invalid,
		},
		{name: "no file", env: "API_KEYS=secret", file: t.TempDir() + "/none", want: "no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			args := []string{"-db", dir + "/animals.db"}
			if c.file != "" {
				args = append(args, "-keys", c.file)
			}
			wantRefused(t, dir, 1, c.want, c.env, args...)
		})
	}
}

func TestMistakesInOtherSettings(t *testing.T) {
	t.Parallel()
	cert, key, _ := newCertificate(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()

	for _, c := range []struct {
		name string
		args []string
		env  string
		want string
	}{
		{name: "all addresses without a key", args: []string{"-addr", ":0"}, want: "set API_KEYS or -keys"},
		{
			name: "an address in use",
			args: []string{"-addr", taken.Addr().String()},
			env:  "API_KEYS=secret",
			want: `-addr "` + taken.Addr().String() + `": listen tcp `,
		},
		{
			name: "a certificate and its key confused",
			args: []string{"-tls-cert", key, "-tls-key", cert},
			env:  "API_KEYS=secret",
			want: "-tls-cert and -tls-key: tls: ",
		},
		{
			name: "a database in a missing folder",
			args: []string{"-db", t.TempDir() + "/none/animals.db"},
			env:  "API_KEYS=secret",
			want: "unable to open database file (14): it must be a file in an existing folder",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			args := append([]string{"-db", dir + "/animals.db"}, c.args...)
			wantRefused(t, dir, 1, c.want, c.env, args...)
		})
	}
}

// The database file.

func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		":memory:", "file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", "ä\n", "a;b", `"'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()

			s := openService(t, filepath.Join(dir, name))

			s.add("Rex", 7, "sold")
			must(t, s.close())
			wantFiles(t, dir, name)
			s.db.wantQuery("SELECT count(*) FROM pets", "1")
		})
	}
}

// TestNewDatabaseIsLogged expects a warning only if there was no database.
func TestNewDatabaseIsLogged(t *testing.T) {
	t.Parallel()
	const warning = `level=WARN msg="the database is new and empty"`
	for _, content := range []string{"", "x"} {
		s := openService(t, writeFile(t, "animals.db", content))
		s.log.want(warning)
		s.add("Rex", 7, "sold")
	}

	s := openService(t, newDatabase(t, 1).file)
	s.log.wantNot(warning)
}

// orphanedWAL is a part of the error about a write-ahead log without a database.
const orphanedWAL = `animals.db-wal" is the write-ahead log of one`

// refusedDatabases are states of animals.db in which it is not a database of this service.
var refusedDatabases = []struct {
	name  string
	shell string // changes animals.db, a database of this service
	sql   string // goes on with that
	want  string
}{
	{name: "a text", shell: "echo some text >animals.db", want: "file is not a database (26): it is damaged"},
	{
		name:  "a folder",
		shell: "rm animals.db; mkdir animals.db",
		want:  "unable to open database file (14): it must be a file",
	},
	{
		name:  "a database that was cut off",
		shell: "truncate -s 8192 animals.db",
		want:  "malformed (11): it is damaged: put a backup in its place",
	},
	{
		name:  "a database of another program",
		shell: "rm animals.db",
		sql:   "PRAGMA journal_mode = WAL; CREATE TABLE t (x)",
		want:  "not a database of this service: its application_id is 0",
	},
	{
		name: "a database that has lost its application_id",
		sql:  "PRAGMA application_id = 0",
		want: "not a database of this service",
	},
	{
		name: "a database of a newer version",
		sql:  fmt.Sprintf("PRAGMA user_version = %d", len(migrations)+1),
		want: "a newer version of this service has written it",
	},
	{name: "a write-ahead log without its database", shell: "mv animals.db animals.db-wal", want: orphanedWAL},
	{
		name:  "an empty file beside a write-ahead log",
		shell: "mv animals.db animals.db-wal; : >animals.db",
		want:  orphanedWAL,
	},
	{
		name:  "a file of one byte beside a write-ahead log",
		shell: "mv animals.db animals.db-wal; echo >animals.db",
		want:  orphanedWAL,
	},
}

// TestRefusedDatabases expects that a file which is not a database of this service is refused, and
// stays as it is: by a start, and as the source of a backup.
func TestRefusedDatabases(t *testing.T) {
	t.Parallel()
	for _, c := range refusedDatabases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, 1)
			dir := filepath.Dir(db.file)
			shell(t, dir, c.shell)
			if c.sql != "" {
				db.exec(c.sql)
			}

			wantRefused(t, dir, 1, `-db "`+db.file+`": `, "API_KEYS=secret", "-db", db.file)
			wantRefused(t, dir, 1, c.want, "API_KEYS=secret", "-db", db.file)
			wantRefused(t, dir, 1, c.want, "", "-db", db.file, "-backup", dir+"/copy.db")
		})
	}
}

// TestReadOnlyDatabase marks the database as one of a format that SQLite only reads. For root, who
// runs tests in containers, no permissions make a file read-only.
func TestReadOnlyDatabase(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, 1)
	shell(t, filepath.Dir(db.file), `printf '\3' | dd of=animals.db bs=1 seek=18 conv=notrunc`)

	wantRefused(t, filepath.Dir(db.file), 1, "attempt to write a readonly database (8): it must be a file",
		"API_KEYS=secret", "-db", db.file)
}

func TestPragmas(t *testing.T) {
	t.Parallel()
	db := openPool(newDatabase(t, 1).file, "rwc", 1)
	defer db.Close()

	for _, c := range []struct{ pragma, want string }{
		{pragma: "synchronous", want: "2"}, // FULL
		{pragma: "fullfsync", want: "1"},
		{pragma: "checkpoint_fullfsync", want: "1"},
		{pragma: "busy_timeout", want: "5000"},
		{pragma: "journal_mode", want: "wal"},
		{pragma: "journal_size_limit", want: "64000000"},
		{pragma: "application_id", want: "1348826227"}, // "Pets"
	} {
		t.Run(c.pragma, func(t *testing.T) {
			var got string
			must(t, db.QueryRow("PRAGMA "+c.pragma).Scan(&got))
			if got != c.want {
				t.Errorf("PRAGMA %s = %s, want %s", c.pragma, got, c.want)
			}
		})
	}
}

// TestSchema checks that the schema has the rules of the handlers, for edits by other programs.
func TestSchema(t *testing.T) {
	t.Parallel()
	s := newService(t)
	db := s.db.connect()
	longest := strings.Repeat("é", maxName)

	for _, status := range petStatuses {
		s.db.exec("INSERT INTO pets (name, category_id, status) VALUES (?, 1, ?)", longest, status)
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
		t.Run(edit[:min(len(edit), 40)], func(t *testing.T) {
			if _, err := db.Exec(edit); err == nil {
				t.Errorf("%.60s is allowed", edit)
			}
		})
	}
	s.get("/v1/pets").want(200, `[{"id":1,`, `"status":"sold"}]`)
}

// Migrations.

// countRuns is a migration that cannot run twice, and that counts how often it has changed an
// animal.
const countRuns = `ALTER TABLE pets ADD COLUMN age INTEGER;
	UPDATE pets SET category_id = category_id + 1`

func TestMigration(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, 3)
	newer := append(slices.Clone(migrations), countRuns)

	// Several processes may start at once, and each has its own connection.
	var migrated sync.WaitGroup
	for range 4 {
		migrated.Go(func() {
			pool := openPool(db.file, "rwc", 1)
			defer pool.Close()
			isNew, err := migrate(pool, newer)
			if isNew || err != nil {
				t.Errorf("migrate = %v, %v, want false and no error", isNew, err)
			}
		})
	}
	migrated.Wait()

	db.wantQuery("PRAGMA user_version", strconv.Itoa(len(newer)))
	db.wantQuery("SELECT group_concat(category_id) FROM pets", "8,8,8")
	wantRefused(t, filepath.Dir(db.file), 1, "a newer version of this service has written it",
		"API_KEYS=secret", "-db", db.file)
}

func TestMigrationThatFails(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, 3)
	pool := openPool(db.file, "rwc", 1)
	defer pool.Close()

	_, err := migrate(pool, append(slices.Clone(migrations), countRuns, "DROP TABLE dogs"))

	if err == nil || !strings.Contains(err.Error(), "no such table: dogs") {
		t.Errorf("migrate = %v, want no such table", err)
	}
	db.wantQuery("PRAGMA user_version", strconv.Itoa(len(migrations)))
	openService(t, db.file).get("/v1/pets").want(200, `"id":3,"name":"Rex","categoryId":7`)
}

// A database that cannot be written or read.

func TestFullDatabase(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, 1)
	db.onConnect("PRAGMA max_page_count = 20")
	s := openService(t, db.file)
	large := string(encode(NewPet{Name: strings.Repeat("x", 200), Status: "sold"}))

	created := 0
	for ; s.post(large, "Idempotency-Key: k"+strconv.Itoa(created)).status == 201; created++ {
	}

	s.post(large).want(503)
	s.get("/v1/pets?limit=1").want(200, "Rex")
	s.get("/healthz").want(200)
	must(t, s.close())
	db.wantQuery("SELECT count(*) FROM pets", strconv.Itoa(1+created))

	db.onConnect("")
	s = openService(t, db.file)
	a := s.post(large, "Idempotency-Key: k"+strconv.Itoa(created)).want(201)
	a.wantHeader("Idempotency-Replayed", "") // the key of a failed create is not used up
}

func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, 1)
	db.onConnect("PRAGMA busy_timeout = 50") // milliseconds, not to wait for 5 seconds
	s := openService(t, db.file)

	unlock := db.lock()

	s.post(rex).want(503)
	s.log.want("level=ERROR", "database is locked")
	s.get("/v1/pets?limit=2").want(200, "Rex")
	s.get("/healthz").want(200)

	unlock()
	db.wantQuery("SELECT count(*) FROM pets", "1")
	s.post(rex).want(201)
}

func TestFailedCreateStoresNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name         string
		damage, mend string // SQL before and after a create that fails
		status       int
		cause        string // in the log
	}{
		{
			name: "a trigger refuses",
			damage: `CREATE TRIGGER refuse BEFORE INSERT ON idempotency_keys
				BEGIN SELECT RAISE(ABORT, 'not today'); END`,
			mend: `DROP TRIGGER refuse`, status: 400,
			cause: "not today",
		},
		{
			name: "a trigger leaves the animal out",
			damage: `CREATE TRIGGER leave_out BEFORE INSERT ON pets
				BEGIN SELECT RAISE(IGNORE); END`,
			mend: `DROP TRIGGER leave_out`, status: 400,
			cause: "a trigger left it out",
		},
		{
			name: "COMMIT fails",
			damage: `CREATE TABLE children (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
				CREATE TRIGGER orphan BEFORE INSERT ON pets
				BEGIN INSERT INTO children VALUES (0); END`,
			mend: `DROP TRIGGER orphan`, status: 500,
			cause: "FOREIGN KEY constraint failed",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, 1)
			db.onConnect("PRAGMA foreign_keys = ON")
			s := openService(t, db.file)
			db.exec(c.damage)

			s.post(rex, "Idempotency-Key: k").want(c.status).wantNot(c.cause)

			s.log.want(c.cause)
			db.wantQuery("SELECT count(*) FROM pets", "1")
			db.exec(c.mend)
			s.post(rex, "Idempotency-Key: k").want(201).wantHeader("Idempotency-Replayed", "")
			db.wantQuery("SELECT count(*) FROM pets", "2")
		})
	}
}

// TestFullDisk fills a small disk, kills the program and starts it again. The write-ahead log then
// has more than fits into the database.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := exec.Command("mount", "-t", "tmpfs", "-o", "size=2m", "none", dir).Run(); err != nil {
		t.Skip("needs the right to mount a file system: ", err)
	}
	t.Cleanup(func() { must(t, exec.Command("umount", dir).Run()) })
	db := database{t, filepath.Join(dir, "animals.db")}
	p := start(t, db.file)
	db.addMany(10_000)
	shell(t, dir, "dd if=/dev/zero of=other || true")

	for range 2 { // before and after a kill
		p.post(rex).want(503)
		p.log.await("level=ERROR .*database or disk is full")
		p.get("/v1/pets?after=9999").want(200, `"id":10000,`)
		p.get("/healthz").want(200)
		p.stop(syscall.SIGKILL)
		p = start(t, db.file)
	}
	if err := backup(t.Context(), db.file, dir+"/copy.db"); err == nil {
		t.Error("a backup to a full disk succeeds")
	}
	wantFiles(t, dir, "animals.db", "animals.db-shm", "animals.db-wal", "other")

	shell(t, dir, "rm other")
	p.post(rex).want(201)
	db.wantQuery("PRAGMA integrity_check", "ok")
	p.stop(syscall.SIGKILL)
}

// TestPanicInTheStore expects that a panic there ends the program, which would otherwise go on
// without a connection, or with an open transaction.
func TestPanicInTheStore(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "GET /v1/pets/1", "GET /healthz", "POST /v1/pets"} {
		t.Run(request, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, 1)
			p := start(t, db.file)
			db.onRead(nil) // in the process, there is no function to call, which is a panic
			db.exec("CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN SELECT callback('none'); END")

			method, target, _ := strings.Cut(request, " ")
			a, err := p.try(httptest.NewRequest(method, p.url+target, strings.NewReader(rex)))

			status := p.end()
			if err == nil || status != 1 {
				t.Errorf("%s = %d, exit status %d, want no response, 1", request, a.status, status)
			}
			p.log.want("panic in the store", "store.go:")
		})
	}
}

// Kills, slips, backups.

// TestKilledProcessLosesNothing kills the program several times while clients add animals, each with
// an Idempotency-Key. Repeats must get the first response, and nothing is added twice.
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	db := database{t, filepath.Join(t.TempDir(), "animals.db")}
	var sent atomic.Int64
	var acknowledged sync.Map // Idempotency-Key to the body of the 201

	create := func(p *process, i int64) error {
		key := fmt.Sprint("animal-", i)
		body := fmt.Sprintf(`{"name":%q,"categoryId":1}`, key)
		a, err := p.try(httptest.NewRequest("POST", p.url+"/v1/pets", strings.NewReader(body)),
			"Idempotency-Key: "+key)
		if err != nil {
			return err
		}
		a.want(201)
		if before, again := acknowledged.LoadOrStore(key, a.body); again && before != a.body {
			t.Errorf("%s was acknowledged as %s, and then as %s", key, before, a.body)
		}
		return nil
	}

	for range 6 {
		p := start(t, db.file)
		for i := range sent.Load() {
			must(t, create(p, i))
		}

		before := sent.Load()
		var clients sync.WaitGroup
		for range 16 {
			clients.Go(func() {
				for create(p, sent.Add(1)-1) == nil {
				}
			})
		}
		eventually(t, "some animals are added", func() bool { return sent.Load() > before+60 })
		p.stop(syscall.SIGKILL)
		clients.Wait()
	}

	s := openService(t, db.file)
	db.wantQuery("PRAGMA integrity_check", "ok")
	db.wantQuery("SELECT count(*) - count(DISTINCT name) FROM pets", "0")
	acknowledged.Range(func(_, body any) bool {
		var p Pet
		must(t, json.Unmarshal([]byte(body.(string)), &p))
		s.get(fmt.Sprint("/v1/pets/", p.ID)).want(200, body.(string))
		return true
	})
}

// TestCheckpointAtAStart expects that a start copies what a killed process has left in the write-ahead
// log, and so makes it durable.
func TestCheckpointAtAStart(t *testing.T) {
	t.Parallel()
	db := database{t, filepath.Join(t.TempDir(), "animals.db")}
	p := start(t, db.file)
	p.add("Rex", 7, "sold")
	p.stop(syscall.SIGKILL)
	start(t, db.file).stop(syscall.SIGKILL)

	must(t, os.Remove(db.file+"-wal"))

	db.wantQuery("SELECT name FROM pets", "Rex")
}

// slips are mistakes with the files of a running service, which has five animals. There is a backup
// with the first three, the file "backup".
var slips = []struct {
	name     string
	slip     string // shell commands
	accepted bool   // creates go on
	mended   string // shell commands after which creates go on
	end      syscall.Signal
	status   int    // exit status, -1 if the process is killed
	orphan   string // shell commands without which the next start is refused
	ids      string // in the end
	away     string // ids in the file "away", "" if there is none
}{
	{
		name:   "the database is moved and put back",
		slip:   "mv animals.db away",
		mended: "mv away animals.db",
		end:    syscall.SIGTERM,
		ids:    "1,2,3,4,5,6",
	},
	{
		name:   "the database is moved",
		slip:   "mv animals.db away",
		end:    syscall.SIGTERM,
		status: 1,
		ids:    "none",
		away:   "1,2,3,4,5",
	},
	{
		name:   "the database is replaced",
		slip:   "mv animals.db away; cp backup animals.db",
		end:    syscall.SIGTERM,
		status: 1,
		ids:    "1,2,3",
		away:   "1,2,3,4,5",
	},
	{
		name:   "the database is deleted",
		slip:   "rm animals.db",
		end:    syscall.SIGTERM,
		status: 1,
		ids:    "none",
	},
	{
		name:     "the write-ahead log is deleted",
		slip:     "rm animals.db-wal",
		accepted: true,
		end:      syscall.SIGTERM,
		ids:      "1,2,3,4,5,6",
	},
	{
		name:   "the database is moved, and the service killed",
		slip:   "mv animals.db away",
		end:    syscall.SIGKILL,
		status: -1,
		orphan: "mv away animals.db",
		ids:    "1,2,3,4,5",
	},
}

func TestSlips(t *testing.T) {
	t.Parallel()
	for _, c := range slips {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			db := database{t, dir + "/animals.db"}
			p := start(t, db.file)
			for i := range 5 {
				if i == 3 {
					must(t, backup(t.Context(), db.file, dir+"/backup"))
				}
				p.add("Rex", 7, "sold")
			}

			shell(t, dir, c.slip)
			if !c.accepted {
				p.post(rex).want(503)
				p.get("/healthz").want(503)
				p.log.await("level=ERROR .*the database is not in its place")
				var lists sync.WaitGroup
				for i := range 50 {
					lists.Go(func() { p.get(fmt.Sprint("/v1/pets?limit=", 5+i)).want(200, `"id":5,`) })
				}
				lists.Wait()
				shell(t, dir, c.mended)
			}
			if c.accepted || c.mended != "" {
				p.post(rex).want(201)
				p.get("/healthz").want(200)
			}
			if status := p.stop(c.end); status != c.status {
				t.Errorf("exit status %d, want %d; log %s", status, c.status, p.log)
			}
			if c.status == 1 {
				p.log.want("animalstore: the database is not in its place")
			}

			if c.orphan != "" {
				wantRefused(t, dir, 1, orphanedWAL, "API_KEYS=secret", "-db", db.file)
				shell(t, dir, c.orphan)
			}
			start(t, db.file).get("/v1/pets").want(200)
			const ids = "SELECT coalesce(group_concat(id ORDER BY id), 'none') FROM pets"
			db.wantQuery(ids, c.ids)
			db.wantQuery("PRAGMA integrity_check", "ok")
			if c.away != "" {
				database{t, dir + "/away"}.wantQuery(ids, c.away)
			}
		})
	}
}

func TestBackupUnderLoad(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.db.addMany(100)
	file := filepath.Join(t.TempDir(), "copy.db")
	var stopped atomic.Bool
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for !stopped.Load() {
				s.add("meanwhile", 1, "available")
			}
		})
	}

	out, err := command(t, execSelf, "-db", s.db.file, "-backup", file).CombinedOutput()
	stopped.Store(true)
	clients.Wait()

	if err != nil || len(out) > 0 {
		t.Fatalf("-backup: %v, output %q, want none", err, out)
	}
	wantFiles(t, filepath.Dir(file), "copy.db")
	info, err := os.Stat(file)
	must(t, err)
	if info.Mode() != 0o600 {
		t.Errorf("the mode of the backup is %v, want -rw-------", info.Mode())
	}
	copied := openService(t, file)
	copied.get("/v1/pets?after=99&limit=1").want(200, `"id":100,"name":"Rex"`)
	copied.db.wantQuery("SELECT max(id) - count(*) FROM pets", "0") // it is of one moment
}

func TestBackupThatIsInterrupted(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, 3)
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()

	err := backup(interrupted, db.file, db.file+".copy")

	if !errors.Is(err, context.Canceled) {
		t.Errorf("backup = %v, want %v", err, context.Canceled)
	}
	wantFiles(t, filepath.Dir(db.file), "animals.db")
}

func TestRefusedBackups(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		shell  string // changes animals.db, a database of this service, or its folder
		sql    string // changes animals.db
		target string
		want   string
	}{
		{name: "to an existing file", shell: "echo x >copy.db", target: "copy.db", want: `copy.db" exists already`},
		{
			name:   "to a link that leads nowhere",
			shell:  "ln -s nowhere copy.db",
			target: "copy.db",
			want:   `copy.db" exists already`,
		},
		{name: "to the database itself", target: "animals.db", want: `animals.db" exists already`},
		{name: "to a missing folder", target: "none/copy.db", want: "no such file or directory"},
		{
			name:   "of a missing database",
			shell:  "rm animals.db",
			target: "copy.db",
			want:   "unable to open database file (14)",
		},
		{name: "of an empty file", shell: ": >animals.db", target: "copy.db", want: "the database is empty"},
		{
			name:   "of a damaged index",
			shell:  "printf y | dd of=animals.db bs=1 seek=16383 conv=notrunc",
			target: "copy.db",
			want:   "the database is damaged: row 1 missing from index pets_by_status",
		},
		{
			name:   "of an animal that breaks the rules",
			sql:    "PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'",
			target: "copy.db",
			want:   "the database is damaged: CHECK constraint failed in pets",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, 1)
			dir := filepath.Dir(db.file)
			shell(t, dir, c.shell)
			if c.sql != "" {
				db.exec(c.sql)
			}

			wantRefused(t, dir, 1, c.want, "", "-db", db.file, "-backup", dir+"/"+c.target)
		})
	}
}

// Connections.

// rawKey is the header with testKey, as it is sent.
const rawKey = "Authorization: Bearer " + testKey

// rawList is GET /v1/pets, as it is sent.
var rawList = rawRequest("GET /v1/pets", rawKey)

// rawRequest returns a request without its body, as it is sent.
func rawRequest(methodAndTarget string, headers ...string) string {
	lines := append([]string{methodAndTarget + " HTTP/1.1", "Host: x"}, headers...)
	return strings.Join(lines, "\r\n") + "\r\n\r\n"
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
		{
			name:  "the body comes slowly",
			sent:  rawCreate,
			later: " ",
			want:  10 * time.Second,
		},
		{
			name: "no request follows a response",
			sent: rawList,
			want: 150 * time.Second,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()
				start := time.Now()

				conn := ln.dial(c.sent)
				if c.later != "" {
					go func() {
						for err := error(nil); err == nil; _, err = io.WriteString(conn, c.later) {
							time.Sleep(time.Second)
						}
					}()
				}
				io.Copy(io.Discard, conn)

				if took := time.Since(start); took != c.want {
					t.Errorf("the connection was closed after %v, want %v", took, c.want)
				}
			})
		})
	}
}

func TestBodyThatNeverComes(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		defer stop()

		conn := ln.dial(rawCreate + `{"name":`)
		s.receive(conn, "POST", "/v1/pets").want(408, "within 10 seconds")

		s.db.wantQuery("SELECT count(*) FROM pets", "0")
	})
}

func TestResponseThatIsNotRead(t *testing.T) {
	for _, c := range []struct {
		wait  time.Duration
		whole bool
	}{
		{wait: 24 * time.Second, whole: true},
		{wait: 26 * time.Second, whole: false},
	} {
		t.Run(c.wait.String(), func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				defer stop()
				conn := ln.dial(rawRequest("GET /openapi.json", "Connection: close"))

				time.Sleep(c.wait)
				response, _ := io.ReadAll(conn)

				if whole := bytes.HasSuffix(response, openAPI); whole != c.whole {
					t.Errorf("the response of %d bytes is whole: %v, want %v", len(response), whole, c.whole)
				}
			})
		})
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	cert, key, trusting := newCertificate(t)
	p := startCommand(t, command(t, execSelf, "-tls-cert", cert, "-tls-key", key))
	p.send = trusting.RoundTrip // which would use HTTP/2, too

	a := p.post(rex).want(201)

	if !strings.HasPrefix(p.url, "https://") || a.proto != "HTTP/1.1" {
		t.Errorf("POST %s was answered over %s, want https and HTTP/1.1", p.url, a.proto)
	}
}

// Stops.

func TestBrokenListenerEndsTheService(t *testing.T) {
	t.Parallel()
	s := newService(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, ln.Close())

	if err := s.server.serve(t.Context(), ln); !errors.Is(err, net.ErrClosed) {
		t.Errorf("serve = %v, want %v", err, net.ErrClosed)
	}
}

// The least time that a stop takes, and the longest.
const (
	shortStop = 250 * time.Millisecond
	longStop  = shortStop + 6*time.Second
)

// rawCreate is POST /v1/pets, as it is sent, without its body.
var rawCreate = rawRequest("POST /v1/pets", rawKey, "Content-Length: 29")

// stops are states of a connection during a stop of the service.
var stops = []struct {
	name    string
	before  string        // is sent on a connection before the stop
	idle    bool          // the response to it is read, too
	after   time.Duration // the test waits so long after the stop has begun,
	later   string        // and then sends this, on that connection or a new one
	status  int           // of the response, 0 for none
	took    time.Duration // net/http may take 600 ms more to notice the end of a request
	cutsOff bool          // the log says that connections were cut off
}{
	{name: "an idle connection", before: rawList, idle: true, took: shortStop},
	{
		name:   "a request on an idle connection",
		before: rawList,
		idle:   true,
		after:  200 * time.Millisecond,
		later:  rawList,
		status: 200,
		took:   shortStop,
	},
	{name: "a new connection", after: 200 * time.Millisecond, later: rawList, status: 200, took: shortStop},
	{
		name:   "a request in progress",
		before: rawCreate,
		after:  4 * time.Second,
		later:  rex,
		status: 201,
		took:   4 * time.Second,
	},
	{name: "a request that does not end", before: rawCreate, after: 7 * time.Second, took: longStop, cutsOff: true},
}

func TestStop(t *testing.T) {
	for _, c := range stops {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service) {
				ln, stop := s.serveInMemory()
				var conn net.Conn
				if c.before != "" {
					conn = ln.dial(c.before)
				}
				if c.idle && s.receive(conn, "GET", "/v1/pets").want(200).closes {
					t.Error("the response before the stop has Connection: close")
				}

				start := time.Now()
				stopped := make(chan time.Duration)
				go func() {
					stop()
					stopped <- time.Since(start)
				}()
				time.Sleep(c.after)
				switch {
				case c.later == "":
				case conn == nil:
					conn = ln.dial(c.later)
				default:
					io.WriteString(conn, c.later)
				}

				if c.status != 0 {
					method, _, _ := strings.Cut(c.before+c.later, " ")
					if a := s.receive(conn, method, "/v1/pets").want(c.status); !a.closes {
						t.Errorf("%s during the stop has no Connection: close", a.request)
					}
				}
				if took := <-stopped; took < c.took || took > c.took+600*time.Millisecond {
					t.Errorf("the stop took %v, want %v", took, c.took)
				}
				io.Copy(io.Discard, conn) // hangs unless the service closes the connection
				synctest.Wait()           // until all handlers have logged
				if cut := strings.Contains(s.log.String(), "connections were cut off"); cut != c.cutsOff {
					t.Errorf("the log says that connections were cut off: %v; %s", cut, s.log)
				}
			})
		})
	}
}

// TestStopRefusesLateConnections holds a request, so that the stop goes on, and waits until the
// service accepts no connections any more.
func TestStopRefusesLateConnections(t *testing.T) {
	withFakeClock(t, func(t *testing.T, s *service) {
		ln, stop := s.serveInMemory()
		ln.dial(rawCreate)
		start := time.Now()

		stopped := make(chan struct{})
		go func() {
			stop()
			close(stopped)
		}()
		<-ln.closed.Done()

		if took := time.Since(start); took != 250*time.Millisecond {
			t.Errorf("the service accepted connections for %v, want 250ms", took)
		}
		<-stopped
	})
}

func TestSignals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		status int // -1 if the signal kills the process
	}{
		{name: "SIGTERM", signal: syscall.SIGTERM},
		{name: "SIGINT", signal: syscall.SIGINT},
		{name: "SIGHUP", signal: syscall.SIGHUP, status: -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := startCommand(t, command(t, execSelf, "-db", dir+"/animals.db"))
			p.post(rex).want(201)

			p.cmd.Process.Signal(c.signal)
			if c.status == 0 {
				p.log.await(fmt.Sprintf(`msg=stopping cause="%v signal received"\n`, c.signal))
				p.cmd.Process.Signal(syscall.SIGINT) // changes nothing, like the next one
				p.cmd.Process.Signal(syscall.SIGTERM)
			}
			if status := p.end(); status != c.status {
				t.Errorf("exit status %d, want %d; log %s", status, c.status, p.log)
			}
			if killer := p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(); c.status == -1 && killer != c.signal {
				t.Errorf("the process was killed by %v, want %v", killer, c.signal)
			}
			if c.status == 0 {
				p.log.want(" msg=stopped\n")
				wantFiles(t, dir, "animals.db")
			}
		})
	}
}

// openapi.json.

// TestDocumentedLimits compares openapi.json with the constants of the code.
func TestDocumentedLimits(t *testing.T) {
	t.Parallel()
	list := at(document, "paths", "/v1/pets", "get", "parameters")
	create := at(document, "paths", "/v1/pets", "post", "parameters")
	schemas := at(document, "components", "schemas")
	for _, c := range []struct {
		name string
		got  any
		want any
	}{
		{name: "the maximum of limit", got: at(list, "0", "schema", "maximum"), want: maxLimit},
		{name: "the default of limit", got: at(list, "0", "schema", "default"), want: defaultLimit},
		{name: "the length of a page", got: at(schemas, "Pets", "maxItems"), want: maxLimit},
		{name: "the statuses", got: at(schemas, "PetStatus", "enum"), want: petStatuses},
		{
			name: "the length of a key",
			got:  at(create, "0", "schema", "maxLength"),
			want: maxIdempotencyKey,
		},
		{
			name: "the length of a name",
			got:  at(schemas, "NewPet", "properties", "name", "maxLength"),
			want: maxName,
		},
		{name: "what a create needs", got: at(schemas, "NewPet", "required"), want: []string{"name", "categoryId"}},
		{name: "other members", got: at(schemas, "NewPet", "additionalProperties"), want: false},
		{name: "the deprecation", got: at(document, "paths", "/v1/pets/{petId}", "get", "deprecated"), want: true},
		{name: "the key check", got: at(document, "security", "0", "bearerAuth"), want: []any{}},
		{name: "the health check", got: at(document, "paths", "/healthz", "get", "security"), want: []any{}},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Errorf("%s in openapi.json is %v, want %v", c.name, c.got, c.want)
		}
	}

	for _, name := range []string{"", " \u3000\u0085", "a\x00", "\ufffd"} {
		if namePattern.MatchString(name) {
			t.Errorf("the pattern of names in openapi.json matches %q", name)
		}
	}
}

// namePattern is the pattern of names in openapi.json.
var namePattern = regexp.MustCompile(
	at(document, "components", "schemas", "NewPet", "properties", "name", "pattern").(string))

// TestDocumentedExamples sends the examples of requests in openapi.json, and expects the examples of
// responses there among the responses of the service.
func TestDocumentedExamples(t *testing.T) {
	t.Parallel()
	s := newService(t)
	requests := members(document,
		"paths", "/v1/pets", "post", "requestBody", "content", "application/json", "examples")
	bella := toJSON(at(requests["required"], "value"))
	milo := toJSON(at(requests["status"], "value"))
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
		s.post(milo),
	}
	s.add("Rex", 7, "sold")
	replies = append(replies, s.get("/v1/pets?limit=2"), s.get("/v1/pets/1"))
	s.db.exec("DROP TABLE pets")
	replies = append(replies, s.get("/v1/pets/2"), s.get("/healthz"))

	seen := map[string]bool{}
	for _, a := range replies {
		seen[toJSON(parseJSON(a.body))] = true
		for name := range a.header {
			seen[name+": "+a.header.Get(name)] = true
		}
	}
	for name, response := range responses() {
		for header, description := range members(response, "headers") {
			example := at(description, "example")
			fault := schemaFault(at(description, "schema"), example)
			wasSeen := seen[fmt.Sprint(http.CanonicalHeaderKey(header), ": ", example)]
			if fault != "" || !wasSeen && header != "X-Request-Id" {
				t.Errorf("%s in openapi.json has the example %s: %v %s", name, header, example, fault)
			}
		}

		content := members(response, "content", "application/json")
		examples := members(content, "examples")
		if examples == nil {
			examples = map[string]any{"": map[string]any{"value": content["example"]}}
		}
		for _, example := range examples {
			value := at(example, "value")
			if fault := schemaFault(content["schema"], value); fault != "" || !seen[toJSON(value)] {
				t.Errorf("%s in openapi.json has the example %s: %s", name, toJSON(value), fault)
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
	var all []Pet
	for i := range 30 {
		all = append(all, s.add("Rex", 7, petStatuses[i%3]))
	}

	f.Fuzz(func(t *testing.T, query string) {
		r := httptest.NewRequest("GET", "/v1/pets", nil)
		r.URL.RawQuery = query

		a := s.as(t).doRequest(r)

		if a.status == 400 {
			return
		}
		want, more := expectedPage(all, query)
		if got := decode[[]Pet](a.want(200)); !slices.Equal(got, want) {
			t.Errorf("%q = %v, want %v", query, got, want)
		}
		if link := a.header.Get("Link"); (link != "") != more {
			t.Errorf("%q has Link %q, want one: %v", query, link, more)
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
		a := s.as(t).post(body)

		if a.status == 400 || a.status == 413 && len(body) > maxBody {
			return
		}
		a.want(201).wantSent(body)
		if name := decode[Pet](a).Name; !namePattern.MatchString(name) {
			t.Errorf("openapi.json does not allow the name %q", name)
		}
		s.as(t).get(a.header.Get("Location")).want(200, a.body)
	})
}

// Benchmarks.

// BenchmarkCachedPage lists the same animals again and again.
func BenchmarkCachedPage(b *testing.B) {
	s := newService(b)
	s.db.addMany(1000)

	for b.Loop() {
		s.wantStatus("GET", "/v1/pets", "", 200)
	}
}

// BenchmarkPages lists other animals each time, more than the cache can hold.
func BenchmarkPages(b *testing.B) {
	const animals = 100_000
	s := newService(b)
	s.db.addMany(animals)

	for after := 0; b.Loop(); after = (after + 1) % animals {
		s.wantStatus("GET", fmt.Sprint("/v1/pets?after=", after), "", 200)
	}
}

// BenchmarkCreate adds animals for one client.
func BenchmarkCreate(b *testing.B) {
	s := newService(b)

	for b.Loop() {
		s.wantStatus("POST", "/v1/pets", rex, 201)
	}
}

// BenchmarkCreates adds animals for many clients at once, 64 with -cpu 2. Compared with
// BenchmarkCreate, it shows what group commit gains.
func BenchmarkCreates(b *testing.B) {
	s := newService(b)
	b.SetParallelism(32) // goroutines for each processor: they wait for the disk

	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s.wantStatus("POST", "/v1/pets", rex, 201)
		}
	})
}

// wantStatus lets the handler answer a request, and checks nothing but the status, which takes
// little time.
func (s *service) wantStatus(method, target, body string, want int) {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+testKey)
	w := httptest.NewRecorder()
	s.server.ServeHTTP(w, r)
	if w.Code != want {
		s.t.Errorf("%s %s = %d, want %d", method, target, w.Code, want)
	}
}

// Helpers: a service in this process, and its clients.

// testKey and otherKey are the API keys that a service under test accepts.
const (
	testKey  = "test-key"
	otherKey = "other-key"
)

// rex is an animal to add.
const rex = `{"name":"Rex","categoryId":7}`

// client sends requests, with testKey unless a test says otherwise, and checks each response against
// openapi.json.
type client struct {
	t    testing.TB
	url  string // of the service, "" if it is in this process
	send func(*http.Request) (*http.Response, error)
}

// sendTo returns a function that lets a handler answer a request, without a network.
func sendTo(h http.Handler) func(*http.Request) (*http.Response, error) {
	return func(r *http.Request) (*http.Response, error) {
		r.RequestURI = r.URL.RequestURI()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Result(), nil
	}
}

// as returns the client for a subtest, to which failures then belong.
func (c client) as(t testing.TB) *client {
	c.t = t
	return &c
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

// add adds an animal and returns it.
func (c *client) add(name string, category int64, status string) Pet {
	c.t.Helper()
	body := encode(NewPet{Name: name, CategoryID: category, Status: status})
	return decode[Pet](c.post(string(body)).want(201))
}

// doRequest sends a request that the test has made. If there is no response, the test fails, and the
// reply has status 0.
func (c *client) doRequest(r *http.Request, headers ...string) reply {
	c.t.Helper()
	a, err := c.try(r, headers...)
	if err != nil {
		c.t.Error(err) // and not Fatal: this may run in any goroutine
	}
	return a
}

// try is doRequest, but returns an error if there is no response.
func (c *client) try(r *http.Request, headers ...string) (reply, error) {
	c.t.Helper()
	r.Header.Set("Authorization", "Bearer "+testKey)
	for _, h := range headers {
		if strings.HasPrefix(h, "Authorization:") {
			r.Header.Del("Authorization")
		}
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ":")
		if h != "Authorization:" {
			r.Header.Add(name, strings.TrimPrefix(value, " "))
		}
	}

	r.RequestURI = "" // or http.Client refuses a request of httptest.NewRequest
	resp, err := c.send(r)
	if err != nil {
		return reply{t: c.t, request: r.Method + " " + r.URL.String()}, err
	}
	return readReply(c.t, r, resp)
}

// reply is a response that has been read, and the request that it answers.
type reply struct {
	t       testing.TB
	request string // for messages
	proto   string
	status  int
	header  http.Header
	body    string
	closes  bool // the response has Connection: close
}

// readReply reads a response, and checks it against openapi.json.
func readReply(t testing.TB, r *http.Request, resp *http.Response) (reply, error) {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	a := reply{
		t:       t,
		request: fmt.Sprintf("%.200s %.500s", r.Method, r.URL),
		proto:   resp.Proto,
		status:  resp.StatusCode,
		header:  resp.Header,
		body:    string(body),
		closes:  resp.Close,
	}
	if err == nil {
		a.check(r)
	}
	return a, err
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

// wantNot checks that the body of a response does not contain words.
func (a reply) wantNot(words string) reply {
	a.t.Helper()
	if strings.Contains(a.body, words) {
		a.t.Errorf("%s = %d %s, want no %q in it", a.request, a.status, a.body, words)
	}
	return a
}

// wantHeader checks the value of a header, "" for none.
func (a reply) wantHeader(name, want string) {
	a.t.Helper()
	if got := strings.Join(a.header.Values(name), ", "); got != want {
		a.t.Errorf("%s = %d with %s %q, want %q", a.request, a.status, name, got, want)
	}
}

// decode decodes the body of a response.
func decode[T any](a reply) (v T) {
	a.t.Helper()
	if err := json.Unmarshal([]byte(a.body), &v); err != nil {
		a.t.Errorf("%s = %s: %v", a.request, a.body, err)
	}
	return v
}

// service is the whole service on a database of its own, in this process.
type service struct {
	*client
	db     database
	log    *testLog
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
	k, err := loadKeys(testKey+","+otherKey, true, "")
	must(t, err)
	return openServiceWith(t, k, file)
}

// openServiceWith opens a service with these API keys.
func openServiceWith(t testing.TB, k keys, file string) *service {
	t.Helper()
	log := newLog(t)
	logger := slog.New(slog.NewTextHandler(log, nil))
	st, err := openStore(file, logger)
	must(t, err)

	srv := newServer(routes(st, k), logger)
	s := &service{
		client: &client{t: t, send: sendTo(srv)},
		db:     database{t, file},
		log:    log,
		server: srv,
		close:  sync.OnceValue(st.close),
	}
	t.Cleanup(func() { must(t, s.close()) })
	return s
}

// withFakeClock runs a test on a service under a fake clock, in parallel with other tests. The test
// fails if it takes longer than 30 seconds by the real clock: a fake one stands still while a
// goroutine waits for a lock.
func withFakeClock(t *testing.T, test func(t *testing.T, s *service)) {
	t.Parallel()
	limit := time.AfterFunc(30*time.Second, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { limit.Stop() })
	synctest.Test(t, func(t *testing.T) { test(t, newService(t)) })
}

// serveOn serves connections from ln until stop is called. stop returns when the service has
// stopped.
func (s *service) serveOn(ln net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error)
	go func() { ended <- s.server.serve(ctx, ln) }()
	return func() {
		s.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			s.t.Errorf("serve: %v", err)
		}
	}
}

// serveInMemory serves connections in memory, under a fake clock, until stop is called.
func (s *service) serveInMemory() (ln *pipes, stop func()) {
	ln = &pipes{conns: make(chan net.Conn)}
	ln.closed, ln.cancel = context.WithCancel(context.Background())
	s.t.Cleanup(func() { time.Sleep(time.Minute) }) // until all goroutines of net/http have ended
	return ln, s.serveOn(ln)
}

// receive reads the response to a request that was sent on conn.
func (s *service) receive(conn net.Conn, method, target string) reply {
	s.t.Helper()
	r := httptest.NewRequest(method, target, nil)
	resp, err := http.ReadResponse(bufio.NewReader(conn), r)
	must(s.t, err)
	a, err := readReply(s.t, r, resp)
	must(s.t, err)
	return a
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
	ours, theirs := net.Pipe()
	l.conns <- theirs
	go io.WriteString(ours, text)
	synctest.Wait()
	return ours
}

// testLog is an io.Writer that keeps what is logged.
type testLog struct {
	t       testing.TB
	mu      sync.Mutex // guards what follows
	changed *sync.Cond
	text    strings.Builder
	ended   bool // nothing follows
}

func newLog(t testing.TB) *testLog {
	l := &testLog{t: t}
	l.changed = sync.NewCond(&l.mu)
	return l
}

func (l *testLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed.Broadcast()
	return l.text.Write(line)
}

// String returns all that was logged.
func (l *testLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// reset forgets what was logged.
func (l *testLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Reset()
}

// end says that nothing follows.
func (l *testLog) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.changed.Broadcast()
}

// await waits until the log matches pattern, and returns the submatches.
func (l *testLog) await(pattern string) []string {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if match := regexp.MustCompile(pattern).FindStringSubmatch(l.text.String()); match != nil {
			return match
		}
		if l.ended {
			l.t.Fatalf("the log has no %s: %s", pattern, l.text.String())
		}
		l.changed.Wait()
	}
}

// want checks that the log contains all these words.
func (l *testLog) want(words ...string) {
	l.t.Helper()
	for _, w := range words {
		if !strings.Contains(l.String(), w) {
			l.t.Errorf("the log has no %q: %s", w, l)
		}
	}
}

// wantNot checks that the log contains none of these words.
func (l *testLog) wantNot(words ...string) {
	l.t.Helper()
	for _, w := range words {
		if strings.Contains(l.String(), w) {
			l.t.Errorf("the log has %q: %s", w, l)
		}
	}
}

// Helpers: the database, as other programs use it.

// database is a database file.
type database struct {
	t    testing.TB
	file string
}

// newDatabase returns a new database with animals, which no process has open.
func newDatabase(t testing.TB, count int) database {
	t.Helper()
	s := newService(t)
	s.db.addMany(count)
	must(t, s.close())
	return s.db
}

// connect opens the database.
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

// wantQuery checks the value that a query returns, as text.
func (d database) wantQuery(query, want string) {
	d.t.Helper()
	db := d.connect()
	defer db.Close()
	var got string
	if err := db.QueryRow(query).Scan(&got); err != nil || got != want {
		d.t.Errorf("%s = %s, %v, want %s", query, got, err, want)
	}
}

// addMany adds animals that are like rex, but sold.
func (d database) addMany(count int) {
	d.t.Helper()
	d.exec(`WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
		INSERT INTO pets (name, category_id, status) SELECT 'Rex', 7, 'sold' FROM n`, count)
}

// lock takes the write lock, until unlock is called.
func (d database) lock() (unlock func()) {
	d.t.Helper()
	db := d.connect()
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(d.t, err)
	return func() { must(d.t, db.Close()) }
}

// onConnect makes each connection that is opened later in this process run SQL first.
func (d database) onConnect(statements string) {
	onConnect.Store(d.file, statements)
}

// onRead makes the service call f whenever it reads an animal. The first call renames the table of
// animals to hidden, and puts a view in its place.
func (d database) onRead(f func() error) {
	d.t.Helper()
	if _, again := callbacks.Swap(d.file, f); !again {
		d.exec("ALTER TABLE pets RENAME TO hidden; CREATE VIEW pets AS SELECT id, " +
			"coalesce(callback('" + d.file + "'), name) AS name, category_id, status FROM hidden")
	}
}

var (
	onConnect sync.Map // by database file: the SQL that new connections run
	callbacks sync.Map // by database file: the func() error that callback(file) calls
)

// hookSQLite makes connections use onConnect and callbacks.
func hookSQLite() {
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		location, err := url.Parse(dsn)
		if err != nil {
			return err
		}
		statements, _ := onConnect.Load(location.Path)
		if statements == nil {
			return nil
		}
		_, err = conn.ExecContext(context.Background(), statements.(string), nil)
		return err
	})
	sqlite.MustRegisterScalarFunction("callback", 1,
		func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
			f, _ := callbacks.Load(args[0])
			return nil, f.(func() error)()
		})
}

// Helpers: the program, as a process or in this one.

// process is the program, running as a process.
type process struct {
	*client
	cmd   *exec.Cmd
	log   *testLog
	ended chan struct{} // closed when the process has ended
}

// execSelf is the line of shell that becomes the program.
const execSelf = `exec "$0" "$@"`

// startedLine matches what the program logs when it serves, with its URL.
var startedLine = regexp.MustCompile(`msg=started url=(\S+)`)

// command returns a command that runs the program on a free port and a new database, unless args
// say otherwise. script is a line of shell that ends in execSelf.
func command(t testing.TB, script string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)

	all := []string{"-c", script, os.Args[0], "-addr", "127.0.0.1:0", "-db", t.TempDir() + "/animals.db"}
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
	p := &process{
		client: &client{t: t, send: http.DefaultClient.Do},
		cmd:    cmd,
		log:    newLog(t),
		ended:  make(chan struct{}),
	}
	cmd.Stderr = p.log
	must(t, cmd.Start())
	go func() {
		cmd.Wait()
		p.log.end()
		close(p.ended)
	}()
	t.Cleanup(func() { p.stop(syscall.SIGKILL) })

	p.url = p.log.await(startedLine.String())[1]
	return p
}

// stop sends a signal to the process, waits until it has ended, and returns its exit status.
func (p *process) stop(sig syscall.Signal) (status int) {
	http.DefaultClient.CloseIdleConnections() // the service waits 5 s for one without a request
	p.cmd.Process.Signal(sig)
	return p.end()
}

// end waits until the process has ended, and returns its exit status: -1 if a signal has killed it.
func (p *process) end() (status int) {
	<-p.ended
	return p.cmd.ProcessState.ExitCode()
}

// runProgram runs the program in this process, on a free port, until it ends. env is "" or
// API_KEYS=KEYS.
func runProgram(t *testing.T, env string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // in case the service starts
	defer cancel()
	lookupEnv := func(name string) (string, bool) { return strings.CutPrefix(env, name+"=") }

	var out, errOut strings.Builder
	status = run(ctx, append([]string{"-addr", "127.0.0.1:0"}, args...), lookupEnv, &out, &errOut)
	return status, out.String(), errOut.String()
}

// wantRefused runs the program as runProgram does, with API keys that contain the word secret, if any.
// It checks that the program ends with a status and one line on standard error, which contains words
// but no key, and that it changes nothing in dir.
func wantRefused(t *testing.T, dir string, status int, words, env string, args ...string) {
	t.Helper()
	before := snapshot(t, dir)

	got, stdout, stderr := runProgram(t, env, args...)

	if got != status || stdout != "" || strings.Count(stderr, "\n") != 1 ||
		!strings.HasPrefix(stderr, "animalstore: ") || !strings.Contains(stderr, words) {
		t.Errorf("animalstore %q = %d, standard output %q, standard error %q; want %d, one line with %q",
			args, got, stdout, stderr, status, words)
	}
	if strings.Contains(stderr, "secret") {
		t.Errorf("animalstore %q revealed an API key: %s", args, stderr)
	}
	if after := snapshot(t, dir); after != before {
		t.Errorf("animalstore %q changed the files from\n%s to\n%s", args, before, after)
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
		data, _ := os.ReadFile(filepath.Join(dir, e.Name())) // fails for a folder
		text += fmt.Sprintf("%s %v %x\n", e.Name(), info.ModTime(), sha256.Sum256(data))
	}
	return text
}

// wantFiles checks the names of all files in a folder.
func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("the files are %q, want %q", got, want)
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

// The check of each response against openapi.json.

// document is openapi.json.
var document = parseJSON(string(openAPI))

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

// check checks the rules for all responses, and those of openapi.json.
func (a reply) check(r *http.Request) {
	a.t.Helper()
	fail := func(format string, args ...any) {
		a.t.Helper()
		a.t.Errorf("%s = %d: %s", a.request, a.status, fmt.Sprintf(format, args...))
	}

	for name, want := range map[string]string{
		"Cache-Control":          "^no-store$",
		"Content-Type":           "^application/json$",
		"X-Content-Type-Options": "^nosniff$",
		"X-Request-Id":           "^[A-Z2-7]{26}$",
	} {
		if values := a.header[name]; len(values) != 1 || !regexp.MustCompile(want).MatchString(values[0]) {
			fail("%s is %q, want %s", name, values, want)
		}
	}
	for name, status := range map[string]int{"Www-Authenticate": 401, "Allow": 405, "Retry-After": 503} {
		if has := len(a.header[name]) == 1; has != (a.status == status) {
			fail("%s is %q", name, a.header[name])
		}
	}

	body := parseJSON(a.body)
	length := a.header.Get("Content-Length")
	switch {
	case r.Method == "HEAD":
		if a.body != "" {
			fail("the body is %q", a.body)
		}
	case body == nil, length != strconv.Itoa(len(a.body)), strings.Contains(a.body, testKey):
		fail("the body is %q, with Content-Length %s", a.body, length)
	case a.status >= 400:
		message := at(body, "message")
		want := map[string]any{"code": wantCodes[a.status], "message": message, "status": a.status}
		if toJSON(body) != toJSON(want) || message == "" {
			fail("the error is %s, want %s", a.body, toJSON(want))
		}
	}
	if fault := documentFault(r, a, body); fault != "" {
		fail("openapi.json: %s", fault)
	}
}

// documentFault returns how a response differs from openapi.json, or "".
func documentFault(r *http.Request, a reply, body any) string {
	path := regexp.MustCompile(`^/v1/pets/[^/]+$`).ReplaceAllString(r.URL.Path, "/v1/pets/{petId}")
	method := strings.ToLower(strings.Replace(r.Method, "HEAD", "GET", 1))
	operation := members(document, "paths", path, method)
	if operation == nil || r.URL.RawPath != "" { // which is set for an unusual encoding, as of %2F
		itself := path == "/openapi.json" && a.status == 200
		if !itself && !slices.Contains([]int{401, 404, 405, 500}, a.status) {
			return "no such operation"
		}
		return ""
	}

	response := members(operation, "responses", strconv.Itoa(a.status))
	if response == nil {
		return "no such status"
	}
	if a.status == 401 && operation["security"] != nil {
		return "no API key is required"
	}
	documented := map[string]bool{
		"Cache-Control": true, "Content-Length": true, "Content-Type": true, "X-Content-Type-Options": true,
		"Date": true, "Connection": true,
	}
	for name, header := range members(response, "headers") {
		name = http.CanonicalHeaderKey(name)
		documented[name] = true
		values := a.header[name]
		if len(values) > 1 || len(values) == 0 && at(header, "required") == true {
			return fmt.Sprintf("%s is %q", name, values)
		}
		for _, v := range values {
			var value any = v
			if at(header, "schema", "type") == "integer" {
				value = json.Number(v)
			}
			if fault := schemaFault(at(header, "schema"), value); fault != "" {
				return name + ": " + fault
			}
		}
	}
	for name := range a.header {
		if !documented[name] {
			return "no such header: " + name
		}
	}
	if r.Method == "HEAD" {
		return ""
	}
	return schemaFault(at(response, "content", "application/json", "schema"), body)
}

// schemaFault returns how a value, as parseJSON returns it, breaks a schema in openapi.json, or "".
// Each keyword of a schema is a rule of its own; these are the ones that the schemas of responses
// have. A member that a schema does not name breaks it, too.
func schemaFault(schema, value any) string {
	text, isText := value.(string)
	number, _ := value.(json.Number)
	n, isInt := parseInt(number.String())
	list, isList := value.([]any)
	object, isObject := value.(map[string]any)
	types := map[any]bool{"string": isText, "integer": isInt, "array": isList, "object": isObject}

	if at(schema, "type") == nil {
		return fmt.Sprintf("no schema for %v", value)
	}
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
			for _, item := range list {
				if fault := schemaFault(rule, item); fault != "" {
					return fault
				}
			}
		case "properties":
			for name, member := range object {
				if fault := schemaFault(at(rule, name), member); fault != "" {
					return name + ": " + fault
				}
			}
		case "description", "format": // are not rules
		default:
			return "schemaFault does not know " + keyword
		}
		if !ok {
			return fmt.Sprintf("%v breaks the rule %s %v", value, keyword, rule)
		}
	}
	return ""
}

// parseJSON parses JSON, and returns nil for what is not JSON. A number becomes a json.Number, which
// has all its digits.
func parseJSON(text string) (v any) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	if dec.Decode(&v) != nil {
		return nil
	}
	return v
}

// toJSON returns v as JSON.
func toJSON(v any) string {
	return strings.TrimSpace(string(encode(v)))
}

// at returns the value at path in a part of openapi.json, or nil. It follows references. An element
// of an array is named by its index.
func at(part any, path ...string) any {
	object, _ := part.(map[string]any)
	if ref, ok := object["$ref"].(string); ok {
		target := at(document, strings.Split(ref, "/")[1:]...)
		return at(target, path...)
	}
	if len(path) == 0 {
		return part
	}
	if list, ok := part.([]any); ok {
		i, _ := strconv.Atoi(path[0])
		return at(list[i], path[1:]...)
	}
	return at(object[path[0]], path[1:]...)
}

// members returns the object at path in a part of openapi.json, or nil.
func members(part any, path ...string) map[string]any {
	object, _ := at(part, path...).(map[string]any)
	return object
}

// responses returns the responses in openapi.json, by names such as get /v1/pets 200.
func responses() map[string]any {
	all := map[string]any{}
	for path := range members(document, "paths") {
		for method, operation := range members(document, "paths", path) {
			for status, response := range members(operation, "responses") {
				all[method+" "+path+" "+status] = response
			}
		}
	}
	return all
}
