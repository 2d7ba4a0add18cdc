package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
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
	sqlite3 "modernc.org/sqlite/lib"
)

// Most tests send requests to a service that runs in the process of the test, on a database file of
// its own. SQL that a test runs on this file stands for another program:
//
//	s := newService(t)
//	execSQL(t, s.file, "INSERT INTO pets (name, category_id) VALUES ('Rex', 7)")
//	s.do("GET /v1/pets?limit=1", "").want(t, 200).wantHeader(t, "Link", "")
//	s.do("GET /v1/pets/2", "").wantError(t, 404, "there is no animal with this id")
//
// Requests have a valid API key, unless a header of the request says otherwise: see newRequest. For
// each response, want and wantError also check the rules for all responses, and that openapi.json
// describes it.
//
// Tests of time use a service that listens in memory, under the fake clock of testing/synctest: see
// inMemory. Tests of signals and kills start the program as a process: see start. Most helpers
// stand at the end of this file.

// TestMain runs the tests. In a process that a test has started, it runs the program instead.
func TestMain(m *testing.M) {
	registerHooks()
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // ends when the process of the test ends
			os.Exit(1)
		}()
		main()
	}
	os.Exit(m.Run())
}

// Bodies that add an animal.
const (
	rex = `{"name":"Rex","categoryId":7}`
	zoe = `{"name":"Zoe","categoryId":13}`
)

// Messages that several tests expect.
const (
	limitRule  = "limit must be an integer from 1 to 100"
	afterRule  = "after must be the last id of a page, an integer from 0 to 9223372036854775807"
	statusRule = "status must be one of available, pending, sold"
	nameRule   = "name must be a string of 1 to 255 characters, not all white space, " +
		"without U+0000, U+FFFD or unpaired surrogates"
	categoryRule = "categoryId must be an integer from -9223372036854775808 to 9223372036854775807, " +
		"with no fraction, exponent or quotes"
	idempotencyKeyRule = "Idempotency-Key must be one value of 1 to 255 visible ASCII characters"

	unauthorized = "send a valid API key, in one header Authorization: Bearer API_KEY; " +
		"GET /openapi.json describes this interface"
	noAnimal    = "there is no animal with this id"
	noPath      = "there is nothing at this path"
	unavailable = "the database is temporarily unavailable"
)

// The operations, as their clients see them.

// newShop returns a service with Rex, Tom and Mia, and with the animals 5 to 25, which are sold.
// Animal 4 was deleted.
func newShop(t *testing.T) *service {
	t.Helper()
	s := newService(t)
	execSQL(t, s.file, `INSERT INTO pets (name, category_id, status)
		VALUES ('Rex', 7, 'available'), ('Tom', -8, 'sold'), ('Mia', 0, 'pending')`)
	addPets(t, s.file, 22)
	execSQL(t, s.file, "DELETE FROM pets WHERE id = 4")
	return s
}

// The first animals of newShop, as the service sends them.
const (
	pet1 = `{"id":1,"name":"Rex","categoryId":7,"status":"available"}`
	pet2 = `{"id":2,"name":"Tom","categoryId":-8,"status":"sold"}`
	pet3 = `{"id":3,"name":"Mia","categoryId":0,"status":"pending"}`
)

// TestListPets lists the animals of newShop: each page must have these animals, and a link to the
// next page if more animals follow.
func TestListPets(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const firstTwenty = "1 2 3 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21"

	for _, c := range []struct {
		name, query string
		ids         string // of the animals on the page
		next        string // the query of the link to the next page, "" for no link
	}{
		{"some", "?limit=3", "1 2 3", "after=3&limit=3"},
		{"20 by default", "", firstTwenty, "after=21"},
		{"one", "?limit=1", "1", "after=1&limit=1"},
		{"100", "?limit=100", firstTwenty + " 22 23 24 25", ""},
		{"exactly all", "?limit=24", firstTwenty + " 22 23 24 25", ""},
		{"a status", "?status=pending", "3", ""},
		{"the default status", "?status=available", "1", ""},
		{"a page of a status", "?limit=2&status=sold&after=2", "5 6", "after=6&limit=2&status=sold"},
		{"after an id", "?after=24", "25", ""},
		{"after 0", "?after=0&limit=1", "1", "after=1&limit=1"},
		{"after the last id", "?after=25", "", ""},
		{"after the greatest id", "?after=9223372036854775807", "", ""},
		{"an escaped query", "?st%61tus=pend%69ng", "3", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp := s.do("GET /v1/pets"+c.query, "").want(t, 200)
			var ids []string
			for _, p := range decode[[]Pet](t, resp) {
				ids = append(ids, strconv.FormatInt(p.ID, 10))
			}
			if got := strings.Join(ids, " "); got != c.ids {
				t.Fatalf("the page has the animals %s, want %s", got, c.ids)
			}
			link := ""
			if c.next != "" {
				link = "<pets?" + c.next + `>; rel="next"`
			}
			resp.wantHeader(t, "Link", link)
		})
	}

	s.do("GET /v1/pets?limit=3", "").wantBody(t, "["+pet1+","+pet2+","+pet3+"]\n")
	s.do("GET /v1/pets?after=25", "").wantBody(t, "[]\n")
	s.do("HEAD /v1/pets?limit=1", "").want(t, 200).
		wantHeader(t, "Link", `<pets?after=1&limit=1>; rel="next"`)
	s.do("GET /v1/pets", "", "Accept: text/html", "Content-Type: text/plain", "If-None-Match: *",
		"Range: bytes=0-3", "Idempotency-Key: a b").want(t, 200)
}

// TestListPetsRefuses lists animals with queries that must get 400 with this message.
func TestListPetsRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("x", 64)

	for _, c := range []struct{ name, query, message string }{
		{"limit is too small", "limit=0", limitRule},
		{"limit is too large", "limit=101", limitRule},
		{"limit is not an int64", "limit=9223372036854775808", limitRule},
		{"limit has a sign", "limit=%2B5", limitRule},
		{"limit has a leading zero", "limit=05", limitRule},
		{"limit is empty", "limit=", limitRule},
		{"status is in capitals", "status=SOLD", statusRule},
		{"status is empty", "status=", statusRule},
		{"after is negative", "after=-1", afterRule},
		{"after is not an int64", "after=9223372036854775808", afterRule},
		{"after is -0", "after=-0", afterRule},
		{"a parameter is repeated", "limit=5&limit=5", `"limit" must not be repeated`},
		{"a parameter is unknown", "Limit=5", `unknown parameter "Limit"`},
		{"a long parameter is cut", long + "yz=1", `unknown parameter "` + long + `"`},
		{"a semicolon separates", "limit=5;after=1", "the query string is malformed"},
		{"an escape is malformed", "status=%zz", "the query string is malformed"},
		{"several faults", "limit=0&status=x&a=1&after=x",
			`unknown parameter "a"; ` + afterRule + "; " + limitRule + "; " + statusRule},
		{"more than ten faults", "a&b&c&d&e&f&g&h&limit=0&status=x&y&z",
			`unknown parameter "a"; unknown parameter "b"; unknown parameter "c"; ` +
				`unknown parameter "d"; unknown parameter "e"; unknown parameter "f"; ` +
				`unknown parameter "g"; unknown parameter "h"; ` + limitRule + "; " + statusRule},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.do("GET /v1/pets?"+c.query, "").wantError(t, 400, c.message)
		})
	}
}

// TestCreatePet adds animals that must be stored, and come back, as they were sent. FuzzCreatePet
// does so with more bodies.
func TestCreatePet(t *testing.T) {
	t.Parallel()
	s := newService(t)
	dogs := strings.Repeat("🐶", 255)

	for i, c := range []struct{ name, body, stored string }{
		{"without a status", rex, `"name":"Rex","categoryId":7,"status":"available"`},
		{"with a status", `{"status":"pending","categoryId":-1,"name":" <&> "}`,
			`"name":" <&> ","categoryId":-1,"status":"pending"`},
		{"the longest name", `{"name":"` + dogs + `","categoryId":9223372036854775807}`,
			`"name":"` + dogs + `","categoryId":9223372036854775807,"status":"available"`},
		{"escapes", `{"n\u0061me":"\ud83d\udc36\"\/","categoryId":-9223372036854775808}`,
			`"name":"🐶\"/","categoryId":-9223372036854775808,"status":"available"`},
		{"the largest body", largest, `"name":"Rex","categoryId":7,"status":"available"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp := s.do("POST /v1/pets?limit=x&a;b&%zz", c.body).wantNew(t, i+1) // ignores the query
			resp.wantBody(t, fmt.Sprintf("{\"id\":%d,%s}\n", i+1, c.stored))
			s.do(fmt.Sprint("GET /v1/pets/", i+1), "").want(t, 200).wantBody(t, resp.body)
		})
	}
}

// largest is a body of the largest size that is accepted.
var largest = rex + strings.Repeat(" ", 64<<10-len(rex))

// TestCreatePetRefuses adds animals with bodies that must get 400 with this message, and store
// nothing.
func TestCreatePetRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("é", 256)

	for _, c := range []struct{ name, body, message string }{
		{"not UTF-8", "{\"name\":\"\xff\",\"categoryId\":1}",
			"the body must be UTF-8, and not compressed"},
		{"a null", "null", "the body must be one JSON object: it is another value"},
		{"an array", "[" + rex + "]", "the body must be one JSON object: it is another value"},
		{"a large number", "1e999", "the body must be one JSON object: it is another value"},
		{"no members", "{}", "name is required; categoryId is required"},
		{"no name", `{"categoryId":1}`, "name is required"},
		{"name in capitals", `{"Name":"x","categoryId":1}`,
			`unknown member "Name"; name is required`},
		{"name is null", `{"name":null,"categoryId":1}`, nameRule},
		{"name is a number", `{"name":1,"categoryId":1}`, nameRule},
		{"name is empty", `{"name":"","categoryId":1}`, nameRule},
		{"name is white space", `{"name":" \u00a0\u2003\u3000\u0085","categoryId":1}`, nameRule},
		{"name has NUL", `{"name":"a\u0000b","categoryId":1}`, nameRule},
		{"name has U+FFFD", `{"name":"a\uFFFDb","categoryId":1}`, nameRule},
		{"name has an unpaired surrogate", `{"name":"\ud83d","categoryId":1}`, nameRule},
		{"name is too long", `{"name":"` + long + `","categoryId":1}`, nameRule},
		{"no categoryId", `{"name":"x"}`, "categoryId is required"},
		{"categoryId is null", `{"name":"x","categoryId":null}`, categoryRule},
		{"categoryId is quoted", `{"name":"x","categoryId":"1"}`, categoryRule},
		{"categoryId is 1.0", `{"name":"x","categoryId":1.0}`, categoryRule},
		{"categoryId is 1e2", `{"name":"x","categoryId":1e2}`, categoryRule},
		{"categoryId is -0", `{"name":"x","categoryId":-0}`, categoryRule},
		{"categoryId is too large", `{"name":"x","categoryId":9223372036854775808}`, categoryRule},
		{"status is null", `{"name":"x","categoryId":1,"status":null}`, statusRule},
		{"status is unknown", `{"name":"x","categoryId":1,"status":"lost"}`, statusRule},
		{"status is empty", `{"name":"x","categoryId":1,"status":""}`, statusRule},
		{"an id", `{"id":5,"name":"x","categoryId":1}`, `unknown member "id"`},
		{"a repeated member", `{"name":"x","n\u0061me":"y","categoryId":1}`,
			`"name" must not be repeated`},
		{"a long member is cut", `{"` + long + `":1,"name":"x","categoryId":1}`,
			`unknown member "` + strings.Repeat("é", 64) + `"`},
		{"several faults", `{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`,
			statusRule + "; " + nameRule + `; unknown member "x"; ` + categoryRule},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.do("POST /v1/pets", c.body).wantError(t, 400, c.message)
		})
	}

	// For invalid JSON, the message ends with that of encoding/json.
	for _, body := range []string{
		"", " ", "{", `{"name":"x","categoryId":1 `, `{"name":"x","categoryId":1,}`, rex + rex,
	} {
		resp := s.do("POST /v1/pets", body).want(t, 400)
		if !strings.Contains(resp.body, `"the body must be one JSON object: `) {
			t.Fatalf("%q = %s, want another message", body, resp.body)
		}
	}
	s.do("POST /v1/pets", largest+" ").
		wantError(t, 413, "the request body is larger than 65536 bytes")
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "0")
}

// TestHeadersOfCreatePet adds an animal with headers that must be accepted, and with others that
// must get this status and message.
func TestHeadersOfCreatePet(t *testing.T) {
	t.Parallel()
	s := newService(t)

	for _, header := range []string{
		`Content-Type: Application/JSON; charset="utf-16"`,
		"Content-Encoding: gzip",
		"Idempotency-Key: !" + strings.Repeat("~", 254),
	} {
		s.do("POST /v1/pets", rex, header).want(t, 201)
	}

	for _, c := range []struct {
		header  string
		status  int
		message string
	}{
		{"Content-Type: application/json-patch+json", 415,
			`Content-Type must be application/json, not "application/json-patch+json"`},
		{"Content-Type: ", 415, `Content-Type must be application/json, not ""`},
		{"Content-Type: application/json; x", 415,
			`Content-Type must be application/json, not "application/json; x"`},
		{"Content-Type: " + strings.Repeat("x", 99), 415,
			`Content-Type must be application/json, not "` + strings.Repeat("x", 64) + `"`},
		{"Idempotency-Key: " + strings.Repeat("x", 256), 400, idempotencyKeyRule},
		{"Idempotency-Key: ", 400, idempotencyKeyRule},
		{"Idempotency-Key: é", 400, idempotencyKeyRule},
		{"Idempotency-Key: a b", 400, idempotencyKeyRule},
	} {
		s.do("POST /v1/pets", rex, c.header).wantError(t, c.status, c.message)
	}

	s.do("POST /v1/pets", rex, "Content-Type: application/json", "Content-Type: application/json").
		wantError(t, 415, `Content-Type must be application/json, not "application/json, application/json"`)
	// Two headers, also if they would be valid when joined.
	s.do("POST /v1/pets", rex, "Idempotency-Key: a", "Idempotency-Key: a").
		wantError(t, 400, idempotencyKeyRule)
	s.do("POST /v1/pets", rex, `Content-Type: application/json; a="x`, `Content-Type: y"`).
		wantError(t, 415, `Content-Type must be application/json, not "application/json; a=\"x, y\""`)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "3")
}

// TestGetPet fetches animals that exist and others that do not: each response must say that the
// operation is deprecated.
func TestGetPet(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	replies := []reply{
		s.do("GET /v1/pets/2", "").want(t, 200).wantBody(t, pet2+"\n"),
		s.do("GET /v1/pets/1?limit=x&a;b", "").want(t, 200).wantBody(t, pet1+"\n"),
		s.do("HEAD /v1/pets/1", "").want(t, 200),
		s.do("GET /v1/pets/1", "", "Authorization:").wantError(t, 401, unauthorized),
	}
	for _, id := range []string{
		"4", "26", "0", "-9223372036854775808", "9223372036854775808", "01", "+1", "1.0", "1%2F",
		"Rex",
	} {
		replies = append(replies, s.do("GET /v1/pets/"+id, "").wantError(t, 404, noAnimal))
	}

	for _, resp := range replies {
		resp.wantHeader(t, "Sunset", "Thu, 05 Dec 2030 00:00:00 GMT")
		resp.wantHeader(t, "Link", `<../pets>; rel="successor-version"`)
	}
}

// TestOtherPathsAndMethods sends requests that no operation answers, and those that need no API
// key.
func TestOtherPathsAndMethods(t *testing.T) {
	t.Parallel()
	s := newShop(t)

	for _, request := range []string{
		"GET /", "GET /pets", "GET /v1/store/orders", "GET /v1/pets/", "GET //v1/pets",
		"GET /v1/./pets", "GET /v1%2Fpets", "GET /v1/pets/1/2", "POST //v1/pets",
	} {
		s.do(request, rex).wantError(t, 404, noPath)
		s.do(request, rex, "Authorization:").wantError(t, 401, unauthorized)
	}
	for request, allow := range map[string]string{
		"DELETE /v1/pets":    "GET, HEAD, POST",
		"OPTIONS /v1/pets":   "GET, HEAD, POST",
		"DELETE /v1/pets/1":  "GET, HEAD",
		"POST /v1/pets/x":    "GET, HEAD",
		"POST /healthz":      "GET, HEAD",
		"POST /openapi.json": "GET, HEAD",
	} {
		s.do(request, rex).wantError(t, 405, "this path allows only "+allow).
			wantHeader(t, "Allow", allow)
		s.do(request, rex, "Authorization:").wantError(t, 401, unauthorized)
	}

	// These need no API key.
	s.do("GET /healthz", "", "Authorization:").want(t, 200).wantBody(t, "{\"status\":\"ok\"}\n")
	s.do("HEAD /healthz", "", "Authorization:").want(t, 200)
	s.do("GET /openapi.json", "", "Authorization:").want(t, 200).wantBody(t, string(openAPI))
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "24")
}

// TestAPIKeys lists animals with different Authorization headers. A 401 must have a challenge,
// which says that the token is invalid if there is one.
func TestAPIKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const invalid = `, error="invalid_token"`

	for _, c := range []struct {
		name, authorization string
		status              int
		challenge           string // follows the realm
	}{
		{"a key", "Bearer " + testKey, 200, ""},
		{"another key", "Bearer " + otherKey, 200, ""},
		{"the scheme in capitals", "BEARER  " + testKey, 200, ""},
		{"no scheme", testKey, 401, ""},
		{"another scheme", "Basic " + testKey, 401, ""},
		{"no token", "Bearer", 401, ""},
		{"an empty token", "Bearer  ", 401, ""},
		{"a wrong key", "Bearer wrong", 401, invalid},
		{"a part of a key", "Bearer test", 401, invalid},
		{"a key in capitals", "Bearer TEST-KEY", 401, invalid},
		{"two keys", "Bearer " + testKey + "," + otherKey, 401, invalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp := s.do("GET /v1/pets", "", "Authorization: "+c.authorization).want(t, c.status)
			if c.status == 401 {
				resp.wantHeader(t, "WWW-Authenticate", `Bearer realm="animalstore"`+c.challenge)
			}
		})
	}

	for _, headers := range [][]string{
		{"Authorization:"},
		{"Authorization: Bearer " + testKey, "Authorization: Bearer " + testKey},
	} {
		s.do("GET /v1/pets", "", headers...).wantError(t, 401, unauthorized).
			wantHeader(t, "WWW-Authenticate", `Bearer realm="animalstore"`)
	}
}

// TestOrderOfErrors sends a request with all faults, and then corrects one fault after the other.
// Each response must be for the first fault that is left.
func TestOrderOfErrors(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const (
		wrongKey = "Authorization: Bearer wrong"
		text     = "Content-Type: text/plain"
		badKey   = "Idempotency-Key: a b"
	)

	s.do("PATCH /v1/dogs", "", wrongKey, text, badKey).want(t, 401)
	s.do("PATCH /v1/dogs", "", text, badKey).want(t, 404)
	s.do("PATCH /v1/pets", "", text, badKey).want(t, 405)
	s.do("POST /v1/pets", "["+largest, text, badKey).want(t, 415)
	s.do("POST /v1/pets", "["+largest, badKey).wantError(t, 400, idempotencyKeyRule)
	s.do("POST /v1/pets", "["+largest).want(t, 413)
	s.do("POST /v1/pets", "["+rex).want(t, 400)
}

// TestPaging follows the links from page to page, while animals are added and deleted. It resolves
// each link as a client does behind a proxy that strips /shop from paths. Each animal that was
// there at the start must be listed once.
func TestPaging(t *testing.T) {
	t.Parallel()
	s := newService(t)
	addPets(t, s.file, 30)

	var ids []int64
	next, err := url.Parse("https://example.com/shop/v1/pets?limit=4&status=sold")
	must(t, err)
	for link := "?limit=4&status=sold"; link != ""; {
		next, err = next.Parse(link)
		must(t, err)
		resp := s.do("GET "+strings.TrimPrefix(next.RequestURI(), "/shop"), "").want(t, 200)
		for _, p := range decode[[]Pet](t, resp) {
			ids = append(ids, p.ID)
		}
		s.do("POST /v1/pets", `{"name":"late","categoryId":1,"status":"sold"}`).want(t, 201)
		// With OFFSET, this would shift the next page.
		execSQL(t, s.file, "DELETE FROM pets WHERE id = ?", ids[len(ids)-1])
		link, _, _ = strings.Cut(strings.TrimPrefix(resp.header.Get("Link"), "<"), ">")
	}

	for i, id := range ids {
		if id != int64(i+1) {
			t.Fatalf("the pages list the ids %v, want 1, 2, 3 and so on", ids)
		}
	}
	if len(ids) < 31 {
		t.Fatalf("the pages list %d animals, want 30 and some that came later", len(ids))
	}
}

// TestIdempotencyKey adds animals with Idempotency-Keys: a repeat must get the first response, even
// after an edit, a deletion or a restart, and a key that was used for another animal must get 422.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := newService(t)

	s.create(`{"name":1}`, "k").want(t, 400) // does not use up the key
	first := s.create(rex, "k").wantNew(t, 1)
	s.do("POST /v1/pets", rex).wantNew(t, 2)
	s.create(rex, "K").wantNew(t, 3)
	const ofOther = "Authorization: Bearer " + otherKey
	s.do("POST /v1/pets", rex, "Idempotency-Key: k", ofOther).wantNew(t, 4)

	for _, edit := range []string{
		"SELECT 'no edit'",
		"UPDATE pets SET name = 'x', status = 'sold'",
		"DELETE FROM pets WHERE id = 1",
	} {
		execSQL(t, s.file, edit)
		must(t, s.close())
		s = openService(t, s.file)
		s.create(rex, "k").wantRepeat(t, first.body)
		s.create(`{"status":"available","categoryId":7,"n\u0061me":"Rex"}`, "k").
			wantRepeat(t, first.body)
	}

	for _, body := range []string{
		`{"name":"rex","categoryId":7}`,
		`{"name":"Rex","categoryId":8}`,
		`{"name":"Rex","categoryId":7,"status":"sold"}`,
	} {
		s.create(body, "k").wantError(t, 422, "this Idempotency-Key was used for another animal")
	}
	s.create(`{"name":1}`, "k").want(t, 400)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "3")
}

// TestExpiredIdempotencyKeys lets Idempotency-Keys grow old: after 24 hours, they must add an
// animal again. Each create with a key must delete two that have expired, and no others.
func TestExpiredIdempotencyKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	age := func(d time.Duration) {
		execSQL(t, s.file, "UPDATE idempotency_keys SET created = created - ?", int(d.Seconds()))
	}
	const keys = "SELECT group_concat(key ORDER BY key) FROM idempotency_keys"

	first := s.create(rex, "k").wantNew(t, 1)
	for i, key := range []string{"a", "b", "c"} {
		s.create(rex, key).wantNew(t, i+2)
	}
	age(24*time.Hour - time.Minute)
	s.create(rex, "late").wantNew(t, 5)
	wantSQL(t, s.file, keys, "a,b,c,k,late")
	s.create(rex, "k").wantRepeat(t, first.body)

	age(2 * time.Minute) // now all but late have expired
	again := s.create(rex, "k").wantNew(t, 6)
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "3") // k, late, and one of the others
	s.create(rex, "k").wantRepeat(t, again.body)
	s.create(rex, "new").wantNew(t, 7)
	wantSQL(t, s.file, keys, "k,late,new")
}

// TestBatches adds animals to a locked database, so that many of them share a transaction. An
// animal that is refused must not keep the others from being stored.
func TestBatches(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, `INSERT INTO pets (name, category_id) VALUES ('Zoe', 13);
		CREATE UNIQUE INDEX one_of_13 ON pets (category_id) WHERE category_id = 13`)
	lockFor(t, s.file, 300*time.Millisecond)

	// Each of 20 clients sends four requests at once, two of them with the same Idempotency-Key.
	var replies [20]struct{ first, same, refused, withoutKey reply }
	var requests sync.WaitGroup
	for i := range replies {
		r, key := &replies[i], fmt.Sprint(i)
		requests.Go(func() { r.first = s.create(rex, key) })
		requests.Go(func() { r.same = s.create(rex, key) })
		requests.Go(func() { r.refused = s.create(zoe, key+"-zoe") })
		requests.Go(func() { r.withoutKey = s.do("POST /v1/pets", rex) })
	}
	requests.Wait()

	for _, r := range replies {
		if r.first.header.Get("Idempotency-Replayed") != "" {
			r.first, r.same = r.same, r.first // they arrived in this order
		}
		r.first.want(t, 201)
		r.same.wantRepeat(t, r.first.body)
		r.refused.wantError(t, 400, "a rule in the database of the shop refuses this animal")
		r.withoutKey.want(t, 201)
	}
	s.log.want(t, "UNIQUE constraint failed")
	wantSQL(t, s.file, "SELECT count(*) FROM pets WHERE name = 'Rex'", "40")
	// Only the keys of animals that were stored are kept.
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "20")
	wantSQL(t, s.file, "SELECT count(*) FROM pets JOIN idempotency_keys USING (id, name)", "20")
}

// TestGroupCommit adds 40 animals to a locked database: they must share transactions. One for each
// animal would write at least three pages to the write-ahead log.
func TestGroupCommit(t *testing.T) {
	t.Parallel()
	s := newService(t)
	before := fileSize(t, s.file+"-wal")
	lockFor(t, s.file, 300*time.Millisecond)

	var requests sync.WaitGroup
	for range 40 {
		requests.Go(func() { s.do("POST /v1/pets", rex) })
	}
	requests.Wait()

	wantSQL(t, s.file, "SELECT count(*) FROM pets", "40")
	const pageSize = 4096
	if grown := fileSize(t, s.file+"-wal") - before; grown > 40*3*pageSize/2 {
		t.Fatalf("the write-ahead log has grown by %d pages", grown/pageSize)
	}
}

// TestClientThatIsGone sends requests whose client has closed the connection: a whole one must
// still be stored, and one that breaks off must not.
func TestClientThatIsGone(t *testing.T) {
	t.Parallel()
	s := newService(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	s.send(newRequest("POST /v1/pets", strings.NewReader(rex)).WithContext(gone)).want(t, 201)
	for _, received := range []string{"", rex} {
		body := io.MultiReader(strings.NewReader(received), iotest.ErrReader(io.ErrUnexpectedEOF))
		s.send(newRequest("POST /v1/pets", body)).
			wantError(t, 400, "the request body could not be read to its end")
	}
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "1")
}

// TestLog sends requests that must each log this line.
func TestLog(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("x", 2000)
	const fingerprint = "key_sha256=62af8704" // printf %s test-key | sha256sum

	for _, c := range []struct {
		request string
		headers []string
		sql     string // is run before
		status  int
		want    string // the line, after the client's address
	}{
		{
			request: "GET /v1/pets?after=7",
			headers: []string{"X-Request-Id: mine"},
			status:  200,
			want:    "method=GET path=/v1/pets status=200 duration=D " + fingerprint,
		},
		{
			request: "GET /v1/pets?limit=0",
			status:  400,
			want: "method=GET path=/v1/pets status=400 duration=D " + fingerprint +
				` error="` + limitRule + `"`,
		},
		{
			request: long + " /" + long,
			headers: []string{"Authorization: Bearer secret"},
			status:  401,
			want: "method=" + long[:20] + " path=/" + long[:999] + " status=401 duration=D " +
				`error="` + unauthorized + `"`,
		},
		{
			request: "GET /v1/pets/1",
			sql:     "DROP TABLE pets",
			status:  500,
			want: "method=GET path=/v1/pets/1 status=500 duration=D " + fingerprint +
				` error="SQL logic error: no such table: pets (1)"`,
		},
	} {
		execSQL(t, s.file, c.sql)
		before := len(s.log.String())
		resp := s.do(c.request, "", c.headers...).want(t, c.status)

		level := "INFO"
		if c.status == 500 {
			level = "ERROR"
		}
		_, got, _ := strings.Cut(strings.TrimSpace(s.log.String()[before:]), " ") // after the time
		got = regexp.MustCompile(`duration=[0-9.µm]+s`).ReplaceAllString(got, "duration=D")
		want := "level=" + level + " msg=request id=" + resp.header.Get("X-Request-Id") +
			" client=192.0.2.1:1234 " + c.want
		if got != want {
			t.Fatalf("%.50s logged\n%s, want\n%s", c.request, got, want)
		}
	}
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
		{"x", withKey, 2, `unexpected argument "x"`},
		{"-keys x", withKey, 2, "flag provided but not defined: -keys"},
		{"-addr=", withKey, 2, "-addr must not be empty"},
		{"-db=", withKey, 2, "-db must not be empty"},
		{"-backup=", withKey, 2, "-backup must not be empty"},
		{"-h", withKey, 0, "-backup FILE"},
		{"-h", withKey, 0, `(default "127.0.0.1:8080")`},

		{"-addr " + taken.Addr().String(), withKey, 1, "address already in use"},
		{"-addr :0", env{}, 1, "API_KEYS is not set"},
		{"", env{"API_KEYS": ""}, 1, "API_KEYS: the list has no key"},
		{"", env{"API_KEYS": " , "}, 1, "API_KEYS: the list has no key"},
		{"", env{"API_KEYS": "one, secret key"}, 1,
			"API_KEYS: item 2 must consist of visible ASCII characters, without spaces"},
		{"", env{"API_KEYS": ",,sécret"}, 1, "API_KEYS: item 3 must consist of visible ASCII"},
		{"-db DIR/none/animals.db", withKey, 1, "unable to open database file (14)"},
		{"-db DIR", withKey, 1, "unable to open database file (14)"},
		{"-db :memory:", withKey, 1, "SQLite cannot use a write-ahead log here"},
	} {
		dir := t.TempDir()
		// A flag in c.args replaces the same one before it.
		args := "-addr 127.0.0.1:0 -db DIR/animals.db " + c.args
		args = strings.ReplaceAll(args, "DIR", dir)
		wantRefusal(t, dir, c.env, c.status, c.message, strings.Fields(args)...)
	}
}

// TestRefusedDatabases changes a database of one animal. The program must neither start with it, nor
// make a backup of it.
func TestRefusedDatabases(t *testing.T) {
	t.Parallel()
	const foreign = "not a database of this service: its application_id is 0"
	for _, c := range []struct {
		name    string
		change  func(t *testing.T, file string)
		message string
	}{
		{"some text", writing("some text"), "not a database (26)"},
		{"a truncated database", func(t *testing.T, file string) { must(t, os.Truncate(file, 4096)) },
			"malformed (11)"},
		{"of another program", executing("PRAGMA application_id = 0"), foreign},
		{"tables of another program", func(t *testing.T, file string) {
			must(t, os.Remove(file))
			execSQL(t, file, "CREATE TABLE t (x)")
		}, foreign},
		{"of no version", executing("PRAGMA user_version = 0"), "not a database of this service"},
		{"of a newer version", executing(fmt.Sprint("PRAGMA user_version = ", len(migrations)+1)),
			"a newer version of this service has written"},
		{"a log alone", func(t *testing.T, file string) { must(t, os.Rename(file, file+"-wal")) },
			`animals.db-wal", but no database`},
		{"a log and an empty file", func(t *testing.T, file string) {
			must(t, os.Rename(file, file+"-wal"))
			writing("")(t, file)
		}, `animals.db-wal", but no database`},
		{"a link", func(t *testing.T, file string) {
			must(t, os.Rename(file, file+".real"))
			must(t, os.Symlink(file+".real", file))
		}, "it is a symbolic link: name the file that it leads to"},
		{"a link that leads nowhere", func(t *testing.T, file string) {
			must(t, os.Remove(file))
			must(t, os.Symlink(file+".real", file))
		}, "it is a symbolic link: name the file that it leads to"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := databaseOfOneAnimal(t)
			c.change(t, file)
			dir := filepath.Dir(file)
			wantRefusal(t, dir, withKey, 1, c.message, "-addr", "127.0.0.1:0", "-db", file)
			wantRefusal(t, dir, withKey, 1, c.message, "-db", file, "-backup", dir+"/copy.db")
		})
	}
}

// TestRefusedBackups changes a database of one animal, or puts something beside it: the program must
// not make the backup copy.db.
func TestRefusedBackups(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		change  func(t *testing.T, file string)
		message string
	}{
		{"no database", func(t *testing.T, file string) { must(t, os.Remove(file)) },
			"unable to open database file (14)"},
		{"an empty file", writing(""), "the database is empty"},
		{"an animal that breaks a rule",
			executing("PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'"),
			"the database is damaged: CHECK constraint failed in pets"},
		{"the copy exists", beside("copy.db"), `copy.db" exists already; name a new file`},
		{"an old log of the copy", beside("copy.db-wal"), `copy.db-wal" exists already`},
		{"an old journal of the copy", beside("copy.db-journal"), `copy.db-journal" exists already`},
		{"the copy is a link", func(t *testing.T, file string) {
			must(t, os.Symlink("none", filepath.Join(filepath.Dir(file), "copy.db")))
		}, `copy.db" exists already; name a new file`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := databaseOfOneAnimal(t)
			c.change(t, file)
			dir := filepath.Dir(file)
			wantRefusal(t, dir, withKey, 1, c.message, "-db", file, "-backup", dir+"/copy.db")
		})
	}
}

// databaseOfOneAnimal returns the name of a database that no service has open.
func databaseOfOneAnimal(t *testing.T) (file string) {
	t.Helper()
	s := newService(t)
	s.do("POST /v1/pets", rex).want(t, 201)
	must(t, s.close())
	return s.file
}

// Changes of a file: writing gives it this text, executing runs SQL on it, and beside makes an empty
// file with this name in its folder.

func writing(text string) func(*testing.T, string) {
	return func(t *testing.T, file string) { must(t, os.WriteFile(file, []byte(text), 0o600)) }
}

func executing(statements string) func(*testing.T, string) {
	return func(t *testing.T, file string) { execSQL(t, file, statements) }
}

func beside(name string) func(*testing.T, string) {
	return func(t *testing.T, file string) {
		must(t, os.WriteFile(filepath.Join(filepath.Dir(file), name), nil, 0o600))
	}
}

// wantRefusal runs the program with args. The program must end with this status, and write a
// message that contains this one: a line alone for status 1, otherwise with the usage. It must
// change no file in dir.
func wantRefusal(t *testing.T, dir string, e env, status int, message string, args ...string) {
	t.Helper()
	const files = "find . -exec ls -ld {} +; find . -type f -exec cksum {} +"
	before := shell(t, dir, files)
	var stderr logBuffer
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // in case it starts
	defer cancel()

	if got := run(ctx, args, e.lookup, &stderr); got != status {
		t.Fatalf("%q: status %d, want %d: %s", args, got, status, &stderr)
	}
	stderr.want(t, message)
	stderr.wantNone(t, "secret", "sécret", testKey)
	form := "^animalstore: .*\n$"
	if status != 1 {
		form = "Usage of animalstore:\n"
	}
	if !regexp.MustCompile(form).MatchString(stderr.String()) {
		t.Fatalf("%q wrote %s, want the form %s", args, &stderr, form)
	}
	if after := shell(t, dir, files); after != before {
		t.Fatalf("%q changed the files from\n%s to\n%s", args, before, after)
	}
}

// The database file.

// registerHooks lets tests change what SQLite does.
//   - A pragma in onConnect runs on each new connection to a file.
//   - Three SQL functions are true, but not at once: sleep_1s sleeps before, fail returns an error
//     and break panics.
func registerHooks() {
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		var err error
		onConnect.Range(func(file, pragma any) bool {
			if strings.Contains(dsn, url.PathEscape(file.(string))) {
				_, err = conn.ExecContext(context.Background(), pragma.(string), nil)
			}
			return err == nil
		})
		return err
	})

	function := func(name string, f func() error) {
		sqlite.MustRegisterScalarFunction(name, 0,
			func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) { return int64(1), f() })
	}
	function("sleep_1s", func() error { time.Sleep(time.Second); return nil })
	function("fail", func() error { return errors.New("a mistake") })
	function("break", func() error { panic("a mistake") })
}

// onConnect has pragmas, by the name of a database file.
var onConnect sync.Map

// TestNamesOfDatabases opens databases whose names have characters with a meaning in URLs or
// SQLite: the file must have just this name.
func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", `ä"'`} {
		dir := t.TempDir()
		s := openService(t, filepath.Join(dir, name))
		s.log.want(t, `level=WARN msg="the database is new and empty"`)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, s.close())

		wantOnly(t, dir, name)
		openService(t, s.file).log.wantNone(t, "new and empty")
	}
}

// TestSchema edits pets by SQL, as other programs do: the schema must refuse these edits.
func TestSchema(t *testing.T) {
	t.Parallel()
	s := newService(t)
	db := connect(t, s.file)
	longest := strings.Repeat("é", maxName)

	const insert = "INSERT INTO pets (name, category_id, status) VALUES (?, 1, ?)"
	for _, status := range petStatuses {
		execSQL(t, s.file, insert, longest, status)
	}
	for _, edit := range []string{
		"INSERT INTO pets (name, category_id) VALUES ('" + longest + "é', 1)",
		"INSERT INTO pets (id, name, category_id) VALUES (0, 'x', 1)",
		"UPDATE pets SET name = ''",
		"UPDATE pets SET name = x'00'",
		"UPDATE pets SET category_id = 1.5",
		"UPDATE pets SET category_id = NULL",
		"UPDATE pets SET status = 'lost'",
	} {
		if _, err := db.Exec(edit); sqliteCode(err) != sqlite3.SQLITE_CONSTRAINT {
			t.Fatalf("%.60s: %v, want a constraint", edit, err)
		}
	}

	execSQL(t, s.file, "DELETE FROM pets")
	// No id is used again.
	s.do("POST /v1/pets", rex).wantNew(t, 4)
}

// TestQueryPlans explains queries like those of the store that must stay fast with millions of
// rows: each must use an index. A list by status must find all columns of a pet in the index.
func TestQueryPlans(t *testing.T) {
	t.Parallel()
	db := connect(t, newService(t).file)
	for index, query := range map[string]string{
		"COVERING INDEX pets_by_status": petColumns + ` FROM pets
			WHERE status = 'sold' AND id > 7 ORDER BY id`,
		"INDEX idempotency_keys_by_age": `key FROM idempotency_keys
			WHERE created < 7 ORDER BY created`,
	} {
		var ignored int
		var plan string
		row := db.QueryRow("EXPLAIN QUERY PLAN SELECT " + query)
		must(t, row.Scan(&ignored, &ignored, &ignored, &plan))
		if !strings.Contains(plan, index) {
			t.Fatalf("SELECT %s: %s, want the %s", query, plan, index)
		}
	}
}

// TestPragmas adds an animal, and lets a trigger report the pragmas of the connection that adds it.
func TestPragmas(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, `CREATE TABLE settings (text);
		CREATE TRIGGER tell AFTER INSERT ON pets BEGIN
			INSERT INTO settings SELECT 'synchronous ' || synchronous FROM pragma_synchronous;
			INSERT INTO settings SELECT 'fullfsync ' || fullfsync FROM pragma_fullfsync;
			INSERT INTO settings SELECT checkpoint_fullfsync FROM pragma_checkpoint_fullfsync;
			INSERT INTO settings SELECT 'busy ' || timeout FROM pragma_busy_timeout;
		END`)

	s.do("POST /v1/pets", rex).want(t, 201)

	wantSQL(t, s.file, "SELECT group_concat(text, ', ') FROM settings",
		"synchronous 2, fullfsync 1, 1, busy 2000") // 2 is FULL
	wantSQL(t, s.file, "PRAGMA journal_mode", "wal")
}

// TestMigration migrates a database with two more steps, of which the second fails: nothing must
// change. Then it migrates with the first step alone.
func TestMigration(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.do("POST /v1/pets", rex).want(t, 201)
	must(t, s.close())
	db := newPool(s.file, "rwc", 1)
	defer db.Close()
	const versionAndCategory = `SELECT user_version || ' ' || category_id
		FROM pragma_user_version, pets`
	version := len(migrations)
	steps := append(slices.Clone(migrations),
		"UPDATE pets SET category_id = category_id + 1", "DROP TABLE dogs")

	_, err := migrate(db, steps)
	if err == nil || !strings.Contains(err.Error(), "no such table: dogs") {
		t.Fatalf("migrate = %v, want no such table", err)
	}
	wantSQL(t, s.file, versionAndCategory, fmt.Sprint(version, " 7"))

	for range 2 { // the second time, there is nothing to do
		_, err := migrate(db, steps[:version+1])
		must(t, err)
		wantSQL(t, s.file, versionAndCategory, fmt.Sprint(version+1, " 8"))
	}
}

// TestLockedDatabase adds an animal while another program holds a lock: it gets 503, and lists go
// on.
func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	unlock := lock(t, s.file)

	s.create(rex, "k").wantError(t, 503, unavailable)
	s.log.want(t, "level=ERROR", "database is locked")
	s.do("GET /v1/pets", "").want(t, 200).wantBody(t, "[]\n")
	s.do("GET /healthz", "").want(t, 200)
	unlock()

	lockFor(t, s.file, 300*time.Millisecond) // a create waits that long
	s.create(rex, "k").wantNew(t, 1)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "1")
}

// TestFullDatabase adds animals until the database is full: the next one gets 503, and lists go on.
func TestFullDatabase(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	onConnect.Store(file, "PRAGMA max_page_count = 20")
	s := openService(t, file)
	large := `{"categoryId":1,"name":"` + strings.Repeat("x", 250) + `"}`

	created := 0
	for created < 1000 && s.do("POST /v1/pets", large).status == 201 {
		created++
	}
	s.do("POST /v1/pets", large).wantError(t, 503, unavailable)
	s.log.want(t, "level=ERROR", "database or disk is full")
	s.do("GET /v1/pets", "").want(t, 200)
	s.do("GET /healthz", "").want(t, 200)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", strconv.Itoa(created))

	execSQL(t, s.file, "DELETE FROM pets")
	s.do("POST /v1/pets", rex).want(t, 201)
}

// TestFailedCommit adds an animal that breaks a constraint which only COMMIT checks: it gets 500,
// and is not stored. The next one is.
func TestFailedCommit(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	onConnect.Store(file, "PRAGMA foreign_keys = ON")
	s := openService(t, file)
	execSQL(t, s.file, `CREATE TABLE t (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER rule AFTER INSERT ON pets BEGIN INSERT INTO t VALUES (-1); END`)
	s.do("POST /v1/pets", rex).want(t, 500)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "0")

	execSQL(t, s.file, "DROP TRIGGER rule")
	s.do("POST /v1/pets", rex).want(t, 201)
}

// TestMovedDatabase moves the database of a running service: creates must get 503 until it is put
// back. After a stop, each file must be undamaged, and have all animals that were added to it.
func TestMovedDatabase(t *testing.T) {
	t.Parallel()

	t.Run("it is put back", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, os.Rename(s.file, s.file+".away"))
		wantNotInItsPlace(t, s)

		must(t, os.Rename(s.file+".away", s.file))
		s.do("GET /healthz", "").want(t, 200)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, s.close())
		wantAnimals(t, s.file, 2)
	})

	t.Run("it is not put back", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, os.Rename(s.file, s.file+".away"))
		wantNotInItsPlace(t, s)

		must(t, s.close())
		wantAnimals(t, s.file+".away", 1)
		must(t, openService(t, s.file).close()) // a new database
		wantAnimals(t, s.file, 0)
	})

	t.Run("it is deleted", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, os.Remove(s.file))
		wantNotInItsPlace(t, s)

		must(t, s.close())
		must(t, openService(t, s.file).close())
		wantAnimals(t, s.file, 0)
	})

	t.Run("it is replaced by a backup", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, backup(t.Context(), s.file, s.file+".backup"))
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, os.Rename(s.file, s.file+".away"))
		must(t, os.Rename(s.file+".backup", s.file))
		wantNotInItsPlace(t, s)

		must(t, s.close())
		wantAnimals(t, s.file+".away", 2)
		wantAnimals(t, s.file, 1)
	})
}

// wantNotInItsPlace checks that a service refuses to add animals, and says why, but lists them.
func wantNotInItsPlace(t *testing.T, s *service) {
	t.Helper()
	s.do("POST /v1/pets", rex).wantError(t, 503, unavailable)
	s.log.want(t, "level=ERROR", "the database is not in its place")
	s.do("GET /healthz", "").wantError(t, 503, unavailable)
	s.do("GET /v1/pets/1", "").want(t, 200)
}

// wantAnimals checks that a database is undamaged, and how many animals it has.
func wantAnimals(t *testing.T, file string, count int) {
	t.Helper()
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
	wantSQL(t, file, "SELECT count(*) FROM pets", strconv.Itoa(count))
}

// TestListsOfAMovedDatabase sends four slow lists at once, for which the service needs four
// connections: each must read the database that was moved.
func TestListsOfAMovedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.do("POST /v1/pets", rex).want(t, 201)
	execSQL(t, s.file, `ALTER TABLE pets RENAME TO fast;
		CREATE VIEW pets AS SELECT * FROM fast WHERE sleep_1s()`)
	must(t, os.Rename(s.file, s.file+".away"))

	var replies [4]reply
	var lists sync.WaitGroup
	for i := range replies {
		lists.Go(func() { replies[i] = s.do("GET /v1/pets", "") })
	}
	lists.Wait()
	for _, r := range replies {
		r.want(t, 200).wantBody(t, "["+pet1+"]\n")
	}
}

// TestMovedLog moves the write-ahead log, or the file of locks, of a running service, puts it back,
// and deletes it: creates must get 503 while it is not there, and a stop must lose nothing.
func TestMovedLog(t *testing.T) {
	t.Parallel()
	for _, suffix := range []string{"-wal", "-shm"} {
		t.Run(suffix, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			created := 0
			createUntilRefused := func() {
				t.Helper()
				resp := s.do("POST /v1/pets", rex)
				for ; resp.status == 201; resp = s.do("POST /v1/pets", rex) {
					created++ // for up to a second, which is how often the service looks
				}
				resp.wantError(t, 503, unavailable)
			}

			must(t, os.Rename(s.file+suffix, s.file+".away"))
			createUntilRefused()
			s.log.want(t, "the database is not in its place")
			s.do("GET /healthz", "").wantError(t, 503, unavailable)
			must(t, os.Rename(s.file+".away", s.file+suffix))
			s.do("POST /v1/pets", rex).want(t, 201)
			created++

			must(t, os.Remove(s.file+suffix))
			createUntilRefused()
			must(t, s.close())
			wantSQL(t, s.file, "SELECT count(*) FROM pets", strconv.Itoa(created))
		})
	}
}

// TestBackup makes a backup of a running service, and runs another service on the copy.
func TestBackup(t *testing.T) {
	t.Parallel()
	s := newService(t)
	target := filepath.Join(t.TempDir(), "copy.db")
	first := s.create(rex, "k").wantNew(t, 1)
	list := s.do("GET /v1/pets", "").want(t, 200)
	args := []string{"-db", s.file, "-backup", target}
	var stderr logBuffer

	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if status := run(interrupted, args, os.LookupEnv, &stderr); status != 1 {
		t.Fatalf("an interrupted -backup = %d, want 1", status)
	}
	wantOnly(t, filepath.Dir(target), "")

	if status := run(t.Context(), args, os.LookupEnv, io.Discard); status != 0 {
		t.Fatalf("-backup = %d, want 0", status)
	}
	wantOnly(t, filepath.Dir(target), "copy.db")
	copied := openService(t, target)
	copied.do("GET /v1/pets", "").want(t, 200).wantBody(t, list.body)
	copied.create(rex, "k").wantRepeat(t, first.body)
	copied.create(rex, "another").wantNew(t, 2)
}

// TestFailedReads lists animals that cannot be read: that gets 500, and nothing of the page. It
// lists more often than there are connections, because each list must give its connection back.
func TestFailedReads(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, replacement, cause string }{
		{"an error in the second row",
			`CREATE VIEW pets AS SELECT * FROM old
				WHERE CASE id WHEN 2 THEN fail() ELSE true END`,
			"a mistake"},
		{"an id that is text",
			"CREATE TABLE pets AS SELECT * FROM old; UPDATE pets SET id = 'x' WHERE id = 2",
			"converting driver.Value type string"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			addPets(t, s.file, 2)
			execSQL(t, s.file, "ALTER TABLE pets RENAME TO old; "+c.replacement)
			for range 4 + runtime.GOMAXPROCS(0) {
				s.do("GET /v1/pets", "").wantError(t, 500, "internal error")
			}
			s.do("GET /v1/pets?status=sold", "").want(t, 500)
			s.log.want(t, "level=ERROR", c.cause)
			s.do("GET /v1/pets/1", "").want(t, 200)
		})
	}

	// No list works.
	s := newService(t)
	execSQL(t, s.file, "DROP TABLE pets")
	s.do("GET /v1/pets/1", "").want(t, 500)
	s.do("GET /healthz", "").wantError(t, 503, unavailable)
}

// Connections, under a fake clock.

// Requests as they are sent. That of a create lacks its body, rex.
const (
	rawList   = "GET /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\n\r\n"
	rawCreate = "POST /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey +
		"\r\nContent-Length: 29\r\n\r\n"
)

// TestTimeouts lets a client be slow: the service must close its connection after so many seconds,
// and the client must receive a response or nothing.
func TestTimeouts(t *testing.T) {
	t.Parallel()
	const document = "GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	for _, c := range []struct {
		name        string
		sent        string
		eachSecond  string // is sent after that, each second
		readAfter   int    // seconds before the client begins to read
		want        string // in what it receives, "" for nothing
		closedAfter int    // seconds
	}{
		{name: "nothing is sent", closedAfter: 5},
		{name: "the headers end early", sent: "GET /v1/pets HT", want: "HTTP/1.1 400 ",
			closedAfter: 5},
		{name: "the headers are slow", sent: "GET / HTTP/1.1\r\n", eachSecond: "X: x\r\n",
			closedAfter: 5},
		{name: "the body is slow", sent: rawCreate, eachSecond: " ",
			want: "the request did not arrive within 10 seconds", closedAfter: 10},
		{name: "no other request follows", sent: rawList, want: "\r\n\r\n[]\n", closedAfter: 150},
		{name: "there is no API key", sent: "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
			want: "\r\nConnection: close\r\n", closedAfter: 0},
		{name: "the response is read late", sent: document, readAfter: 24,
			want: string(openAPI), closedAfter: 24},
		{name: "the response is read too late", sent: document, readAfter: 26, closedAfter: 26},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *service) {
				start := time.Now()
				conn := s.connect(t)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					for err == nil && c.eachSecond != "" {
						time.Sleep(time.Second)
						_, err = io.WriteString(conn, c.eachSecond)
					}
				}()
				time.Sleep(time.Duration(c.readAfter) * time.Second)
				received, _ := io.ReadAll(conn) // until the service closes the connection

				took := int(time.Since(start).Seconds()) // without fractions, as net/http may wait a little
				if took != c.closedAfter {
					t.Fatalf("the connection was closed after %d seconds, want %d", took, c.closedAfter)
				}
				got := string(received)
				if !strings.Contains(got, c.want) || c.want == "" && got != "" {
					t.Fatalf("the client received %.1000q, want %.1000q", got, c.want)
				}
			})
		})
	}
}

// TestInvalidHTTP sends requests that net/http itself refuses: these errors must have the form of the
// others.
func TestInvalidHTTP(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, request, status, body string }{
		{"an invalid path", "GET /v1/pets/%zz HTTP/1.1\r\nHost: x\r\n\r\n", "400 Bad Request",
			`{"code":"invalid_request","message":"400 Bad Request","status":400}`},
		{"an invalid header", "GET / HTTP/1.1\r\nHost: x\r\na b: c\r\n\r\n",
			"400 Bad Request: invalid header name", `{"code":"invalid_request",` +
				`"message":"400 Bad Request: invalid header name","status":400}`},
		{"an expectation", "GET / HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n",
			"417 Expectation Failed", `{"code":"expectation_failed",` +
				`"message":"417 Expectation Failed","status":417}`},
		{"large headers",
			"GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 17<<10) + "\r\n\r\n",
			"431 Request Header Fields Too Large", `{"code":"headers_too_large",` +
				`"message":"431 Request Header Fields Too Large","status":431}`},
		{"an encoding", "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
			"501 Not Implemented",
			`{"code":"not_implemented","message":"501 Not Implemented","status":501}`},
		{"a version", "GET / HTTP/3.0\r\nHost: x\r\n\r\n",
			"505 HTTP Version Not Supported: unsupported protocol version",
			`{"code":"http_version_not_supported","message":"505 HTTP Version Not Supported: ` +
				`unsupported protocol version","status":505}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *service) {
				client := s.dial(t)
				go client.send(c.request)
				client.want(t, fmt.Sprintf("HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n"+
					"Cache-Control: no-store\r\nContent-Type: application/json\r\n"+
					"X-Content-Type-Options: nosniff\r\n\r\n%s\n", c.status, len(c.body)+1, c.body))
			})
		})
	}
}

// TestLargeRequests sends requests with large headers and bodies, which are refused or not needed:
// the client must receive this, and without delay.
func TestLargeRequests(t *testing.T) {
	t.Parallel()
	request := func(line string, headers ...string) string {
		headers = append(headers, "Host: x", "Connection: close")
		return line + "\r\n" + strings.Join(headers, "\r\n") + "\r\n\r\n"
	}
	body := func(size int) string { return strings.Repeat("x", size) }
	const put, authorized = "PUT /v1/pets HTTP/1.1", "Authorization: Bearer " + testKey

	for _, c := range []struct {
		name, sent string
		want       string // in what the client receives
		fails      bool   // the service closes the connection before it has read all
	}{
		{name: "HEAD", sent: request("HEAD /healthz HTTP/1.1"), want: "Content-Length: 16\r\n"},
		{name: "OPTIONS *", sent: request("OPTIONS * HTTP/1.1"), want: "HTTP/1.1 401 "},
		{name: "15 KiB of headers", sent: request("GET /healthz HTTP/1.1", "X: "+body(15<<10)),
			want: "HTTP/1.1 200 "},
		{name: "a body", sent: request(put, "Content-Length: 1000000") + body(1000000),
			want: "HTTP/1.1 401 "},
		{name: "a body of HTTP/1.0",
			sent: request("PUT / HTTP/1.0", "Content-Length: 1000000") + body(1000000),
			want: "HTTP/1.0 401 "},
		{name: "a body in chunks", sent: request(put, "Transfer-Encoding: chunked") +
			"7a120\r\n" + body(500000) + "\r\n0\r\n\r\n", want: "HTTP/1.1 401 "},
		{name: "a body that is too large to wait for",
			sent: request(put, "Content-Length: 2000000"), want: "HTTP/1.1 401 "},
		{name: "a body without an end", sent: request(put, "Transfer-Encoding: chunked") +
			"ffffff\r\n" + body(3<<20), want: "HTTP/1.1 401 ", fails: true},
		{name: "a body that is too large, after 100",
			sent: request("POST /v1/pets HTTP/1.1", authorized, "Expect: 100-continue",
				"Content-Length: 500000") + body(500000),
			want: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 "},
		{name: "a body that waits for 100",
			sent: request(put, "Content-Length: 9", "Expect: 100-continue"), want: "HTTP/1.1 401 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *service) {
				start := time.Now()
				conn := s.connect(t)
				sent := make(chan error, 1)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					sent <- err
				}()
				received, _ := io.ReadAll(conn)

				if took := time.Since(start); took > time.Second {
					t.Errorf("the connection was closed after %v, want no delay", took)
				}
				if !strings.Contains(string(received), c.want) {
					t.Errorf("the client received %.1000q, want %q", received, c.want)
				}
				if err := <-sent; (err != nil) != c.fails {
					t.Errorf("the request was sent with the error %v, want one: %v", err, c.fails)
				}
			})
		})
	}
}

// Tests of a stop: what happens to a connection that a client has opened before.

func TestStopClosesAnIdleConnection(t *testing.T) {
	inMemory(t, func(t *testing.T, s *service) {
		c := s.dial(t)
		c.send(rawList)
		c.want(t, "200 OK")

		stop := s.beginStop(t)
		stop.wantTook(t, drainTime)
		c.wantClosed(t)
	})
}

func TestStopAnswersOnAnOpenConnection(t *testing.T) {
	inMemory(t, func(t *testing.T, s *service) {
		c := s.dial(t)
		c.send(rawList)
		c.want(t, "200 OK")

		stop := s.beginStop(t)
		time.Sleep(drainTime - time.Millisecond)
		c.send(rawList)
		c.want(t, "200 OK", "\r\nConnection: close\r\n")
		stop.wantTook(t, drainTime)
		c.wantClosed(t)
	})
}

func TestStopWaitsForARequest(t *testing.T) {
	inMemory(t, func(t *testing.T, s *service) {
		c := s.dial(t)
		c.send(rawCreate) // without its body

		stop := s.beginStop(t)
		time.Sleep(4 * time.Second)
		c.send(rex)
		c.want(t, "201 Created", "\r\nConnection: close\r\n")
		stop.wantTook(t, 4*time.Second)
	})
}

func TestStopCutsOffARequest(t *testing.T) {
	inMemory(t, func(t *testing.T, s *service) {
		c := s.dial(t)
		c.send(rawCreate) // its body never comes

		stop := s.beginStop(t)
		stop.wantTook(t, drainTime+shutdownTime)
		c.wantClosed(t)
		s.log.want(t, `WARN msg="connections were cut off"`)
	})
}

func TestStopClosesASilentConnection(t *testing.T) {
	inMemory(t, func(t *testing.T, s *service) {
		c := s.dial(t)

		stop := s.beginStop(t)
		stop.wantTook(t, readHeaderTimeout)
		c.wantClosed(t)
		s.log.wantNone(t, "cut off")
	})
}

// TestBrokenListener serves on a closed listener: serve must return the error.
func TestBrokenListener(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, ln.Close())
	if err := newService(t).serve(t.Context(), ln); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("serve = %v, want %v", err, net.ErrClosed)
	}
}

// Processes.

// TestProcess starts the program with real settings, and stops it with two signals while clients
// add animals. Nobody may be cut off.
func TestProcess(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, env{"API_KEYS": "one,\n" + testKey + "\n"}, "-addr", "0.0.0.0:0")
	p.log.want(t, " database="+file+" keys=2 version=")
	p.log.wantNone(t, testKey, "api_key")
	p.do("GET /v1/pets", "", "Authorization: Bearer one").want(t, 200)

	var created atomic.Int64
	var clients sync.WaitGroup
	var last [8]reply // of each client
	for i := range last {
		clients.Go(func() {
			for {
				last[i] = p.do("POST /v1/pets", rex)
				if last[i].status != 201 {
					p.cmd.Process.Signal(syscall.SIGINT) // a second signal, during the stop
					return
				}
				if created.Add(1) == 100 {
					p.cmd.Process.Signal(syscall.SIGTERM)
				}
			}
		})
	}
	clients.Wait()

	for _, resp := range last {
		if !errors.Is(resp.err, syscall.ECONNREFUSED) {
			t.Fatalf("the last request got %d, %v, want a refused connection", resp.status, resp.err)
		}
	}
	if status := p.wait(); status != 0 {
		t.Fatalf("after SIGTERM, the status is %d, want 0", status)
	}
	p.log.want(t, "msg=stopping", "msg=stopped")
	p.log.wantNone(t, "cut off")
	wantOnly(t, filepath.Dir(file), "animals.db")
	wantSQL(t, file, "SELECT count(*) FROM pets", strconv.FormatInt(created.Load(), 10))
}

// TestStopAfterMove stops the program after its database was moved, while another program reads.
// The write-ahead log then stays. The stop must say where it belongs, and there it must have the
// animal.
func TestStopAfterMove(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, withKey)
	reader := connect(t, file)
	_, err := reader.Exec("BEGIN; SELECT * FROM pets")
	must(t, err)
	p.do("POST /v1/pets", rex).want(t, 201)

	must(t, os.Rename(file, file+".moved"))
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if status := p.wait(); status != 1 {
		t.Fatalf("the status is %d, want 1", status)
	}
	p.log.want(t, "the moved database still needs its write-ahead log", `animals.db-wal"`)

	must(t, reader.Close())
	must(t, os.Rename(file+"-wal", file+".moved-wal"))
	wantSQL(t, file+".moved", "SELECT count(*) FROM pets", "1")
}

// TestMadeKey starts the program without API_KEYS: it must make a key, log it, and accept only
// that.
func TestMadeKey(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), env{})
	p.log.want(t, "level=WARN", `msg="API_KEYS is not set: made a key for this run"`, " keys=1 ")
	_, key, _ := strings.Cut(p.log.String(), "api_key=")
	key, _, _ = strings.Cut(key, "\n")
	p.do("GET /v1/pets", "", "Authorization: Bearer "+key).want(t, 200)
	p.do("GET /v1/pets", "").want(t, 401)
}

// TestUnreadLog closes the pipe that the program logs to: the program must go on.
func TestUnreadLog(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), withKey)
	must(t, p.stderr.Close())
	for range 3 {
		p.do("GET /v1/pets", "").want(t, 200)
	}
}

// TestKill kills the program several times while clients add animals, each with an Idempotency-Key.
// None that was acknowledged may be missing, and a repeat must get the first response.
func TestKill(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	acknowledged := map[string]string{} // the body of the 201 by Idempotency-Key
	var mu sync.Mutex                   // guards acknowledged
	create := func(p *process, key string) reply {
		body := fmt.Sprintf(`{"name":%q,"categoryId":1}`, key)
		return p.do("POST /v1/pets", body, "Idempotency-Key: "+key)
	}

	// killAt is the number of acknowledged creates, of all rounds, at which the program is killed.
	for round, killAt := range []int{1, 100, 200, 300} {
		before, _ := os.ReadFile(file + "-wal") // fails in round 0
		p := start(t, file, withKey)
		// No request was sent yet, but the start must have committed to the WAL of the killed
		// process.
		if after, _ := os.ReadFile(file + "-wal"); round > 0 && bytes.Equal(after, before) {
			t.Fatal("the start has committed nothing: what the kill has left may not be on disk")
		}
		for key, body := range acknowledged {
			create(p, key).wantRepeat(t, body)
		}

		var clients sync.WaitGroup
		for client := range 16 {
			clients.Go(func() {
				for i := 0; ; i++ {
					key := fmt.Sprint(round, "-", client, "-", i)
					resp := create(p, key)
					if resp.status != 201 {
						return
					}
					mu.Lock()
					acknowledged[key] = resp.body
					if len(acknowledged) == killAt {
						p.cmd.Process.Kill()
					}
					mu.Unlock()
				}
			})
		}
		clients.Wait()
		p.cmd.Process.Kill() // if creates fail early
		p.wait()
	}

	s := openService(t, file)
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
	wantSQL(t, file, "SELECT count(*) - count(DISTINCT name) FROM pets", "0")
	for _, body := range acknowledged {
		id := decode[Pet](t, reply{body: body}).ID
		s.do(fmt.Sprint("GET /v1/pets/", id), "").want(t, 200).wantBody(t, body)
	}
}

// TestPanicInSQLite lets a list and a create panic in SQLite: the program must end with status 1,
// because the connection may stay in use for ever.
func TestPanicInSQLite(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "POST /v1/pets"} {
		file := newFile(t)
		p := start(t, file, withKey)
		addPets(t, file, 1)
		execSQL(t, file, `ALTER TABLE pets RENAME TO old;
			CREATE VIEW pets AS SELECT * FROM old WHERE break();
			CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN
				SELECT break();
			END`)

		if resp := p.do(request, rex); resp.err == nil {
			t.Fatalf("%s = %d, want no response", request, resp.status)
		}
		if status := p.wait(); status != 1 {
			t.Fatalf("after %s, the exit status is %d, want 1", request, status)
		}
		p.log.want(t, `level=ERROR msg="panic in the store" panic="a mistake" stack=`, "store.go:")
	}
}

// TestPanicInAHandler lets a handler panic: that request gets 500, and the next one is answered.
func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.do("GET /panic", "").wantError(t, 500, "internal error")
	s.do("GET /v1/pets", "").want(t, 200)
	s.log.want(t, "level=ERROR", "status=500", `error="panic: a mistake`, "server_test.go:")
}

// openapi.json.

// TestDocument compares openapi.json with what the code says. (want compares it with the responses.)
func TestDocument(t *testing.T) {
	t.Parallel()
	list := lookup(document, "paths", "/pets", "get")
	create := lookup(document, "paths", "/pets", "post")
	newPet := lookup(document, "components", "schemas", "NewPet")
	limit := lookup(list, "parameters", "limit", "schema")

	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"the greatest limit", lookup(limit, "maximum"), maxLimit},
		{"the default limit", lookup(limit, "default"), defaultLimit},
		{"the longest page", lookup(document, "components", "schemas", "Pets", "maxItems"), maxLimit},
		{"the statuses", lookup(list, "parameters", "status", "schema", "enum"), petStatuses},
		{"the longest Idempotency-Key",
			lookup(create, "parameters", "Idempotency-Key", "schema", "maxLength"), maxIdempotencyKey},
		{"the required members", lookup(newPet, "required"), "[name categoryId]"},
		{"other members", lookup(newPet, "additionalProperties"), false},
		{"the longest name", lookup(newPet, "properties", "name", "maxLength"), maxName},
		// With a pattern, generated clients would refuse valid names.
		{"the pattern of a name", lookup(newPet, "properties", "name", "pattern"), nil},
		{"the server", strings.Contains(string(openAPI), `"url": "/v1"`), true},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Errorf("openapi.json has %s = %v, want %v", c.name, c.got, c.want)
		}
	}

	text := fmt.Sprint(lookup(document, "info", "description"), lookup(create, "description"))
	sentences := []string{
		fmt.Sprintf("%d KiB of headers and %d KiB of body", maxHeader>>10, maxBody>>10),
		fmt.Sprintf("%v seconds to send the headers and %v to send the request",
			readHeaderTimeout.Seconds(), readTimeout.Seconds()),
		fmt.Sprintf("sent and read within %v seconds", writeTimeout.Seconds()),
		fmt.Sprintf("closed %v seconds after its last response", idleTimeout.Seconds()),
		fmt.Sprintf("end within %v seconds", shutdownTime.Seconds()),
		fmt.Sprintf("waits up to %v seconds, or up to %v behind",
			busyTimeout.Seconds(), 2*busyTimeout.Seconds()),
	}
	for status, code := range wantCodes {
		sentences = append(sentences, fmt.Sprintf("| %d | `%s` |", status, code))
	}
	for _, sentence := range sentences {
		if !strings.Contains(text, sentence) {
			t.Errorf("openapi.json has no %q", sentence)
		}
	}

	for _, ref := range regexp.MustCompile(`"#(/[^"]+)"`).FindAllStringSubmatch(string(openAPI), -1) {
		if lookup(document, strings.Split(ref[1], "/")[1:]...) == nil {
			t.Errorf("openapi.json has no %s, to which it refers", ref[1])
		}
	}
}

// A fuzz test, and a benchmark.

// FuzzCreatePet adds an animal with any body. It must be refused, or come back as it was sent.
func FuzzCreatePet(f *testing.F) {
	for _, body := range []string{
		rex,
		" {\r\n\t\"status\" : \"sold\" , \"categoryId\" : -1 , \"name\" : \" a b \" } \r\n\t",
		`{"n\u0061me":"\"\\\/\b\f\n\r\t","categoryId":1}`,
		`{"name":"}]:,{[\"\\<&>\u2028","categoryId":-9223372036854775808,"status":"pending"}`,
		`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`,
		`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":0,"status":"available"}`,
		"{}", "[]", `{"name":"\ud83d","categoryId":1e2}`, "{\"name\":\"\xff\"}",
	} {
		f.Add(body)
	}
	s := newService(f)

	f.Fuzz(func(t *testing.T, body string) {
		resp := s.do("POST /v1/pets", body)
		if resp.status == 400 || resp.status == 413 && len(body) > maxBody {
			resp.want(t, resp.status)
			return
		}
		sent := decode[map[string]any](t, reply{body: body})
		if sent["status"] == nil {
			sent["status"] = "available"
		}
		got := decode[map[string]any](t, resp.want(t, 201))
		s.do(fmt.Sprint("GET /v1/pets/", got["id"]), "").want(t, 200).wantBody(t, resp.body)
		delete(got, "id")
		if !maps.Equal(got, sent) {
			t.Fatalf("%q = %v, want the animal that was sent", body, got)
		}
	})
}

// BenchmarkCreates adds animals with an Idempotency-Key, from 64 clients for each processor.
func BenchmarkCreates(b *testing.B) {
	s := newService(b)
	var sent atomic.Int64
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			resp := s.do("POST /v1/pets", rex, fmt.Sprint("Idempotency-Key: ", sent.Add(1)))
			if resp.status != 201 {
				b.Errorf("a create = %d %s", resp.status, resp.body)
			}
		}
	})
}

// Helpers: requests and replies.

const testKey, otherKey = "test-key", "other-key"

// newRequest returns a request, given as method and target, with these headers, and with testKey
// unless one of them is Authorization. "Authorization:" alone is none.
func newRequest(request string, body io.Reader, headers ...string) *http.Request {
	method, target, _ := strings.Cut(request, " ")
	r := httptest.NewRequest(method, target, body)
	r.Header.Set("Authorization", "Bearer "+testKey)
	if strings.Contains(strings.Join(headers, "\n"), "Authorization:") {
		r.Header.Del("Authorization")
	}
	for _, header := range headers {
		if name, value, ok := strings.Cut(header, ": "); ok {
			r.Header.Add(name, value)
		}
	}
	return r
}

// reply is a response that was read to its end, or the error that came instead.
type reply struct {
	request string // its method and target
	status  int
	header  http.Header
	body    string
	err     error
}

// newReply reads the response to r.
func newReply(r *http.Request, resp *http.Response, err error) reply {
	result := reply{request: r.Method + " " + r.URL.String(), err: err}
	if err != nil {
		return result
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	result.status, result.header = resp.StatusCode, resp.Header
	result.body, result.err = string(body), err
	return result
}

// want checks the status of a response, the rules for all responses, and that openapi.json
// describes it.
func (r reply) want(t testing.TB, status int) reply {
	t.Helper()
	fault := ""
	switch {
	case r.err != nil:
		fault = r.err.Error()
	case r.status != status:
		fault = fmt.Sprintf("want %d", status)
	default:
		fault = r.generalFault() + r.documentFault()
	}
	if fault != "" {
		t.Fatalf("%.500s = %d %v\n%.2000s%s", r.request, r.status, r.header, r.body, fault)
	}
	return r
}

// wantError checks that a response is an Error with this status and message.
func (r reply) wantError(t testing.TB, status int, message string) reply {
	t.Helper()
	r.want(t, status)
	if got := decode[apiError](t, r).Message; got != message {
		t.Fatalf("%.500s has the message %q, want %q", r.request, got, message)
	}
	return r
}

// wantNew checks that a create has added the animal with this id.
func (r reply) wantNew(t testing.TB, id int) reply {
	t.Helper()
	r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "")
	return r.wantHeader(t, "Location", fmt.Sprint("pets/", id))
}

// wantRepeat checks that a create has added nothing, and got the first response, whose body this
// is.
func (r reply) wantRepeat(t testing.TB, body string) {
	t.Helper()
	r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "true").wantBody(t, body)
	r.wantHeader(t, "Location", fmt.Sprint("pets/", decode[Pet](t, r).ID))
}

// wantBody checks the whole body of a response.
func (r reply) wantBody(t testing.TB, want string) reply {
	t.Helper()
	if r.body != want {
		t.Fatalf("%s = %s, want %s", r.request, r.body, want)
	}
	return r
}

// wantHeader checks a header of a response: its only value, or "" if it must not be there.
func (r reply) wantHeader(t testing.TB, name, want string) reply {
	t.Helper()
	if got := strings.Join(r.header.Values(name), "; "); got != want {
		t.Fatalf("%.500s has %s: %q, want %q", r.request, name, got, want)
	}
	return r
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
	417: "expectation_failed",
	422: "idempotency_key_reused",
	431: "headers_too_large",
	500: "internal",
	501: "not_implemented",
	503: "unavailable",
	505: "http_version_not_supported",
}

// headerRules are the headers of each response. statusHeaders are those of one status alone.
var (
	headerRules = map[string]*regexp.Regexp{
		"Cache-Control":          regexp.MustCompile("^no-store$"),
		"Content-Type":           regexp.MustCompile("^application/json$"),
		"X-Content-Type-Options": regexp.MustCompile("^nosniff$"),
		"X-Request-Id":           regexp.MustCompile("^[A-Z2-7]{26}$"),
	}
	statusHeaders = map[string]int{"Www-Authenticate": 401, "Allow": 405, "Retry-After": 503}
)

// generalFault returns how a response breaks the rules for all responses, or "".
func (r reply) generalFault() string {
	for name, rule := range headerRules {
		if values := r.header[name]; len(values) != 1 || !rule.MatchString(values[0]) {
			return fmt.Sprintf("%s is %q", name, values)
		}
	}
	for name, status := range statusHeaders {
		if has := len(r.header[name]) == 1; has != (r.status == status) {
			return fmt.Sprintf("%s is %q", name, r.header[name])
		}
	}
	if strings.HasPrefix(r.request, "HEAD ") {
		return ""
	}
	if !json.Valid([]byte(r.body)) || r.header.Get("Content-Length") != strconv.Itoa(len(r.body)) {
		return "not JSON, or of another length than Content-Length"
	}
	var e map[string]any
	if r.status >= 400 {
		json.Unmarshal([]byte(r.body), &e)
		if len(e) != 3 || e["code"] != wantCodes[r.status] ||
			e["status"] != float64(r.status) || e["message"] == "" {
			return "not the Error of this status"
		}
		if m := e["message"]; r.status >= 500 && m != "internal error" && m != unavailable {
			return "a message that tells the cause"
		}
	}
	return ""
}

// decode decodes the body of a response.
func decode[T any](t testing.TB, resp reply) (v T) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(resp.body))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%s = %s: %v", resp.request, resp.body, err)
	}
	return v
}

// Helpers: openapi.json.

// document is openapi.json.
var document = func() (v any) {
	if err := json.Unmarshal(openAPI, &v); err != nil {
		panic(err)
	}
	return v
}()

// lookup follows names, and each $ref, from v, a part of the document. In a list, a name leads to
// the item with that name. lookup returns nil if there is nothing.
func lookup(v any, names ...string) any {
	object, _ := v.(map[string]any)
	if ref, ok := object["$ref"].(string); ok {
		return lookup(document, append(strings.Split(ref, "/")[1:], names...)...)
	}
	if len(names) == 0 {
		return v
	}
	if items, ok := v.([]any); ok {
		for _, item := range items {
			if lookup(item, "name") == names[0] {
				return lookup(item, names[1:]...)
			}
		}
	}
	return lookup(object[names[0]], names[1:]...)
}

var petPath = regexp.MustCompile(`^/v1/pets/[^/]+$`)

// documentFault returns what openapi.json lacks for a response of one of its operations, or "".
func (r reply) documentFault() string {
	method, target, _ := strings.Cut(strings.Replace(r.request, "HEAD ", "GET ", 1), " ")
	path, _, _ := strings.Cut(target, "?")
	path = petPath.ReplaceAllString(path, "/v1/pets/{petId}")
	path, isOperation := strings.CutPrefix(path, "/v1")
	operation := lookup(document, "paths", path, strings.ToLower(method))
	if operation == nil || !isOperation {
		return ""
	}
	response := lookup(operation, "responses", strconv.Itoa(r.status))
	if response == nil {
		return "openapi.json has no such response"
	}

	known := []string{"Cache-Control", "Connection", "Content-Length", "Content-Type", "Date",
		"X-Content-Type-Options"}
	headers, _ := lookup(response, "headers").(map[string]any)
	for name, header := range headers {
		known = append(known, http.CanonicalHeaderKey(name))
		if lookup(header, "required") == true && r.header.Get(name) == "" {
			return "openapi.json requires " + name
		}
	}
	for name := range r.header {
		if !slices.Contains(known, name) {
			return "openapi.json has no " + name
		}
	}

	schema := lookup(response, "content", "application/json", "schema")
	body, isList := strings.CutPrefix(r.body, "[")
	if isList {
		schema = lookup(schema, "items") // compare the first item
	}
	var object map[string]any
	json.NewDecoder(strings.NewReader(body)).Decode(&object)
	for name := range object {
		if lookup(schema, "properties", name) == nil {
			return "openapi.json has no member " + name
		}
	}
	return ""
}

// Helpers: a service in this process.

// service is the whole service in this process, on a database file.
type service struct {
	*server
	file  string
	log   *logBuffer
	close func() error // closes the store, once

	// These are only set by inMemory.
	listener *memoryListener
	stop     func()
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
	log := &logBuffer{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	keys, err := parseAPIKeys(testKey + "," + otherKey)
	must(t, err)
	st, err := openStore(file, logger)
	must(t, err)
	s := &service{file: file, log: log, close: sync.OnceValue(st.close)}
	t.Cleanup(func() { must(t, s.close()) })

	handlers := routes(st, keys)
	handlers["/panic"] = func(*request) (any, error) { panic("a mistake") }
	s.server = newServer(handlers, logger)
	return s
}

// do sends a request to the service: see newRequest.
func (s *service) do(request, body string, headers ...string) reply {
	return s.send(newRequest(request, strings.NewReader(body), headers...))
}

// create adds an animal with an Idempotency-Key.
func (s *service) create(body, idempotencyKey string) reply {
	return s.do("POST /v1/pets", body, "Idempotency-Key: "+idempotencyKey)
}

// send sends r to the service.
func (s *service) send(r *http.Request) reply {
	recorder := httptest.NewRecorder()
	s.ServeHTTP(recorder, r)
	return newReply(r, recorder.Result(), nil)
}

// inMemory runs a test, in parallel with others, on a service that serves connections in memory. The
// clock is that of testing/synctest: it stands still while anything runs.
func inMemory(t *testing.T, test func(t *testing.T, s *service)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.listener = &memoryListener{conns: make(chan net.Conn)}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.serve(ctx, s.listener) }()
		s.stop = sync.OnceFunc(func() {
			cancel()
			must(t, <-ended)
		})
		t.Cleanup(func() {
			s.stop()
			time.Sleep(time.Minute) // lets the goroutines of net/http end, or synctest would fail
		})

		test(t, s)
	})
}

// connect opens a connection, which is closed at the end of the test.
func (s *service) connect(t *testing.T) net.Conn {
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close() })
	s.listener.conns <- theirs
	return ours
}

// client is a client that reads all that it receives.
type client struct {
	conn     net.Conn
	received logBuffer
	closed   atomic.Bool // by the service
}

// dial opens a connection for a client.
func (s *service) dial(t *testing.T) *client {
	c := &client{conn: s.connect(t)}
	go func() {
		io.Copy(&c.received, c.conn)
		c.closed.Store(true)
	}()
	return c
}

func (c *client) send(text string) { io.WriteString(c.conn, text) }

// want checks what the client has received since the last call.
func (c *client) want(t *testing.T, texts ...string) {
	t.Helper()
	synctest.Wait()
	c.received.want(t, texts...)
	c.received.reset()
}

// wantClosed checks that the client has received nothing since the last call of want, and that the
// service has closed the connection.
func (c *client) wantClosed(t *testing.T) {
	t.Helper()
	synctest.Wait()
	if got := c.received.String(); got != "" || !c.closed.Load() {
		t.Fatalf("received %q, closed: %v; want nothing, and a closed connection", got, c.closed.Load())
	}
}

// stop is a stop of a service that has begun.
type stop struct {
	begun time.Time
	ended chan time.Time
}

// beginStop begins to stop the service, which must then refuse new connections.
func (s *service) beginStop(t *testing.T) stop {
	t.Helper()
	result := stop{begun: time.Now(), ended: make(chan time.Time, 1)}
	go func() {
		s.stop()
		result.ended <- time.Now()
	}()
	synctest.Wait()
	if !s.listener.closed.Load() {
		t.Fatal("the service accepts connections during the stop")
	}
	return result
}

// wantTook waits for the end of the stop, and checks how long it took. net/http looks for it only now
// and then.
func (s stop) wantTook(t *testing.T, want time.Duration) {
	t.Helper()
	if took := (<-s.ended).Sub(s.begun); took < want || took > want+600*time.Millisecond {
		t.Fatalf("the stop took %v, want %v", took, want)
	}
}

// memoryListener is a net.Listener for connections in memory, which work under a fake clock.
type memoryListener struct {
	conns  chan net.Conn
	closed atomic.Bool
}

func (l *memoryListener) Accept() (net.Conn, error) {
	conn, ok := <-l.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (l *memoryListener) Close() error {
	if !l.closed.Swap(true) {
		close(l.conns)
	}
	return nil
}

func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{} }

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

// reset forgets what was written.
func (l *logBuffer) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Reset()
}

// String returns all that was written.
func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// want checks that each of these texts was written.
func (l *logBuffer) want(t testing.TB, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(l.String(), text) {
			t.Fatalf("there is no %q in %s", text, l)
		}
	}
}

// wantNone checks that none of these texts was written.
func (l *logBuffer) wantNone(t testing.TB, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if strings.Contains(l.String(), text) {
			t.Fatalf("there is %q in %s", text, l)
		}
	}
}

// Helpers: the program as a process.

// env is the environment of the program, by the names of the variables.
type env map[string]string

// withKey is an environment with testKey.
var withKey = env{"API_KEYS": testKey}

func (e env) lookup(name string) (value string, isSet bool) {
	value, isSet = e[name]
	return value, isSet
}

// process is the program, running as a process.
type process struct {
	url    string
	http   *http.Transport
	cmd    *exec.Cmd
	stderr io.Closer
	log    logBuffer     // what it has written to standard error
	ended  chan struct{} // is closed when the process has ended
}

var startedLine = regexp.MustCompile(`msg=started url=(\S+)`)

// start starts the program with a database file, an environment and more args, and waits until it
// serves. The program is killed at the end of the test.
func start(t testing.TB, file string, e env, args ...string) *process {
	t.Helper()
	args = append([]string{"-addr", "127.0.0.1:0", "-db", file}, args...)
	p := &process{
		http:  &http.Transport{MaxIdleConnsPerHost: 16}, // one for each client of a test
		cmd:   exec.CommandContext(t.Context(), os.Args[0], args...),
		ended: make(chan struct{}),
	}
	p.cmd.Env = []string{
		"ANIMALSTORE_PROCESS=1",
		"GOCOVERDIR=" + t.TempDir(), // without it, go test -cover makes the program print a warning
	}
	for name, value := range e {
		p.cmd.Env = append(p.cmd.Env, name+"="+value)
	}
	_, err := p.cmd.StdinPipe() // see TestMain
	must(t, err)
	stderr, err := p.cmd.StderrPipe()
	must(t, err)
	p.stderr = stderr
	must(t, p.cmd.Start())

	lines := bufio.NewReader(stderr)
	for p.url == "" {
		line, err := lines.ReadString('\n')
		p.log.Write([]byte(line))
		if err != nil {
			t.Fatalf("the program has not started: %s", &p.log)
		}
		if match := startedLine.FindStringSubmatch(line); match != nil {
			p.url = match[1]
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

// do sends a request to the process: see newRequest.
func (p *process) do(request, body string, headers ...string) reply {
	r := newRequest(request, strings.NewReader(body), headers...)
	r.RequestURI = ""
	r.URL.Scheme, r.URL.Host, _ = strings.Cut(p.url, "://")
	resp, err := p.http.RoundTrip(r)
	return newReply(r, resp, err)
}

// wait waits until the process has ended, and returns its exit status: -1 if a signal has killed
// it.
func (p *process) wait() (status int) {
	<-p.ended
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

// addPets adds animals that are sold.
func addPets(t testing.TB, file string, count int) {
	t.Helper()
	execSQL(t, file, `INSERT INTO pets (name, category_id, status)
		WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
		SELECT 'Rex', 7, 'sold' FROM n LIMIT ?`, count)
}

// lock takes the write lock of a database, until unlock is called.
func lock(t testing.TB, file string) (unlock func()) {
	t.Helper()
	db := connect(t, file)
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(t, err)
	return func() { must(t, db.Close()) }
}

// lockFor takes the write lock of a database for a time, and returns at once.
func lockFor(t testing.TB, file string, d time.Duration) { time.AfterFunc(d, lock(t, file)) }

// Helpers: files and errors.

// must fails the test unless err is nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shell runs shell commands in a folder, and returns what they print.
func shell(t testing.TB, dir, commands string) string {
	t.Helper()
	cmd := exec.Command("sh", "-e", "-c", commands)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v %s", commands, err, out)
	}
	return string(out)
}

// fileSize returns the size of a file in bytes.
func fileSize(t testing.TB, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Size()
}

// wantOnly checks that a folder has only this file, or "" for none.
func wantOnly(t testing.TB, dir, file string) {
	t.Helper()
	if got := strings.TrimSpace(shell(t, dir, "ls")); got != file {
		t.Fatalf("the folder has %s, want only %s", got, file)
	}
}
