package main

import (
	"bufio"
	"context"
	"crypto/sha256"
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
//	s.get("/v1/pets?limit=1").want(t, 200).wantHeader(t, "Link", "")
//	s.get("/v1/pets/2").wantError(t, 404, noAnimal)
//
// A request has a valid API key, unless one of its headers says otherwise. These methods and
// functions check what comes of it:
//   - want: a response has this status, and follows the rules for all. If it is that of an
//     operation, openapi.json describes it.
//   - wantError: it is also an Error with this message.
//   - wantNew and wantRepeat: a create has added this animal, or has returned the first response.
//   - wantSQL and wantPetCount: the database has this value, or so many animals and no damage.
//   - wantNotInItsPlace: the service has noticed that a file was moved.
//
// Tests of connections run under the fake clock of testing/synctest: see inMemory. Tests of signals
// and kills start the program as a process: see start. Most helpers stand at the end of this file.

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

// rex is a body that adds an animal.
const rex = `{"name":"Rex","categoryId":7}`

// Messages of errors.
const (
	limitRule  = "limit must be an integer from 1 to 100"
	afterRule  = "after must be an integer from 0 to 9223372036854775807"
	statusRule = "status must be one of available, pending, sold, or be left out"
	nameRule   = "name must be a string of 1 to 255 characters, not all white space, " +
		"without U+0000, U+FFFD or unpaired surrogates"
	categoryRule = "categoryId must be an integer from -9223372036854775808 to 9223372036854775807, " +
		"with no fraction, exponent or quotes"
	idempotencyKeyRule = "Idempotency-Key must be one value of 1 to 255 visible ASCII characters"

	nothingThere = "there is nothing at this path; the paths of the API begin with /v1/pets"
	unauthorized = "send a valid API key, in one header Authorization: Bearer API_KEY; " +
		"GET /openapi.json describes this interface"
	noAnimal    = "there is no animal with this id"
	unavailable = "the database is temporarily unavailable"
)

// The operations, as their clients see them.

// newShop returns a service with Rex, Tom and Mia, and with the animals 5 to 25, which are sold.
// Animal 4 was deleted, so that an id does not tell how many animals come before it.
func newShop(t *testing.T) *service {
	t.Helper()
	s := newService(t)
	execSQL(t, s.file, `INSERT INTO pets (name, category_id, status)
		VALUES ('Rex', 7, 'available'), ('Tom', -8, 'sold'), ('Mia', 0, 'pending')`)
	addPets(t, s.file, 22)
	execSQL(t, s.file, "DELETE FROM pets WHERE id = 4")
	return s
}

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
		{"20 by default", "", firstTwenty, "after=21"},
		{"100", "?limit=100", firstTwenty + " 22 23 24 25", ""},
		{"exactly all", "?limit=24", firstTwenty + " 22 23 24 25", ""},
		{"a status", "?status=pending", "3", ""},
		{"a page of a status", "?limit=2&status=sold&after=2", "5 6", "after=6&limit=2&status=sold"},
		{"one, after 0", "?after=0&limit=1", "1", "after=1&limit=1"},
		{"after the last id", "?after=25", "", ""},
		{"after the greatest id", "?after=9223372036854775807", "", ""},
		{"an escaped query", "?st%61tus=pend%69ng", "3", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp := s.get("/v1/pets"+c.query).want(t, 200)
			var ids []string
			for _, p := range decode[[]Pet](t, resp.body) {
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

	s.get("/v1/pets?limit=2").wantBody(t,
		`[{"id":1,"name":"Rex","categoryId":7,"status":"available"},`+
			`{"id":2,"name":"Tom","categoryId":-8,"status":"sold"}]`+"\n")
	s.get("/v1/pets?after=25").wantBody(t, "[]\n")
	s.do("HEAD /v1/pets?limit=1", "").want(t, 200).
		wantHeader(t, "Link", `<pets?after=1&limit=1>; rel="next"`)
	// These headers change nothing.
	s.get("/v1/pets", "Accept: text/html", "Content-Type: text/plain", "If-None-Match: *",
		"Range: bytes=0-3", "Idempotency-Key: a b").want(t, 200)
}

// TestListPetsRefuses lists animals with queries that must get 400, with the message of the case.
func TestListPetsRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("x", 64)

	for _, c := range []struct{ name, query, message string }{
		{"limit is too small", "limit=0", limitRule},
		{"limit is too large", "limit=101", limitRule},
		{"limit has a sign", "limit=%2B5", limitRule},
		{"limit has a leading zero", "limit=05", limitRule},
		{"limit is empty", "limit=", limitRule},
		{"status is in capitals", "status=SOLD", statusRule},
		{"status is empty", "status=", statusRule},
		{"after is negative", "after=-1", afterRule},
		{"after is not an int64", "after=9223372036854775808", afterRule},
		{"a parameter is repeated", "limit=5&limit=5", `"limit" must not be repeated`},
		{"a parameter is unknown", "Limit=5", `unknown parameter "Limit"`},
		{"a long parameter is cut", long + "yz=1", `unknown parameter "` + long + `"`},
		{"a semicolon separates", "limit=5;after=1", "the query string is malformed"},
		{"an escape is malformed", "status=%zz", "the query string is malformed"},
		{"more than ten faults", "a&b&c&d&e&f&g&h&limit=0&status=x&y&z",
			`unknown parameter "a"; unknown parameter "b"; unknown parameter "c"; ` +
				`unknown parameter "d"; unknown parameter "e"; unknown parameter "f"; ` +
				`unknown parameter "g"; unknown parameter "h"; ` + limitRule + "; " + statusRule},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.get("/v1/pets?"+c.query).wantError(t, 400, c.message)
		})
	}
}

// largest is a body of the largest size that is accepted.
var largest = rex + strings.Repeat(" ", 64<<10-len(rex))

// TestCreatePet adds animals that must be stored, and come back, as they were sent. FuzzCreatePet
// does so with more bodies.
func TestCreatePet(t *testing.T) {
	t.Parallel()
	dogs := strings.Repeat("🐶", 255)

	for _, c := range []struct{ name, body, stored string }{
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
			t.Parallel()
			s := newService(t)
			s.create(c.body).wantNew(t, 1).wantBody(t, `{"id":1,`+c.stored+"}\n")
			s.get("/v1/pets/1").want(t, 200).wantBody(t, `{"id":1,`+c.stored+"}\n")
		})
	}

	s := newService(t)
	s.do("POST /v1/pets?limit=x&a;b&%zz", rex).wantNew(t, 1) // ignores the query
}

// TestCreatePetRefuses adds animals with bodies that must be refused: those of the table get 400
// with the message of the case. Nothing must be stored.
func TestCreatePetRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("é", 256)

	for _, c := range []struct{ name, body, message string }{
		{"not UTF-8", "{\"name\":\"\xff\",\"categoryId\":1}",
			"the body must be UTF-8 without a byte order mark, and not compressed"},
		{"a byte order mark", "\ufeff" + rex,
			"the body must be UTF-8 without a byte order mark, and not compressed"},
		{"a null", "null", "the body must be one JSON object: it is another value"},
		{"an array", "[" + rex + "]", "the body must be one JSON object: it is another value"},
		{"no members", "{}", "name is required; categoryId is required"},
		{"name in capitals", `{"Name":"x","categoryId":1}`,
			`unknown member "Name"; name is required`},
		{"name is null", `{"name":null,"categoryId":1}`, nameRule},
		{"name is white space", `{"name":" \u00a0\u2003\u3000\u0085","categoryId":1}`, nameRule},
		{"name has NUL", `{"name":"a\u0000b","categoryId":1}`, nameRule},
		{"name has U+FFFD", `{"name":"a\uFFFDb","categoryId":1}`, nameRule},
		{"name has an unpaired surrogate", `{"name":"\ud83d","categoryId":1}`, nameRule},
		{"name is too long", `{"name":"` + long + `","categoryId":1}`, nameRule},
		{"categoryId is quoted", `{"name":"x","categoryId":"1"}`, categoryRule},
		{"categoryId is 1.0", `{"name":"x","categoryId":1.0}`, categoryRule},
		{"categoryId is too large", `{"name":"x","categoryId":9223372036854775808}`, categoryRule},
		{"status is null", `{"name":"x","categoryId":1,"status":null}`, statusRule},
		{"status is unknown", `{"name":"x","categoryId":1,"status":"lost"}`, statusRule},
		{"status is empty", `{"name":"x","categoryId":1,"status":""}`, statusRule},
		{"an id", `{"id":5,"name":"x","categoryId":1}`, `unknown member "id"`},
		{"a repeated member", `{"name":"x","n\u0061me":"y","categoryId":1}`,
			`"name" must not be repeated`},
		{"a long member is cut", `{"` + long + `":1,"name":"x","categoryId":1}`,
			`unknown member "` + strings.Repeat("é", 64) + `"`},
		{"several faults", `{"status":1,"name":1,"x":{"name":2},"categoryId":null}`,
			statusRule + "; " + nameRule + `; unknown member "x"; ` + categoryRule},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.create(c.body).wantError(t, 400, c.message)
		})
	}

	// For invalid JSON, the message ends with that of encoding/json.
	for _, body := range []string{
		"", " ", "{", `{"name":"x","categoryId":1 `, `{"name":"x","categoryId":1,}`, rex + rex,
	} {
		resp := s.create(body).want(t, 400)
		if !strings.Contains(resp.body, `"the body must be one JSON object: `) {
			t.Fatalf("%q = %s, want another message", body, resp.body)
		}
	}
	s.create(largest+" ").
		wantError(t, 413, "the request body is larger than 65536 bytes")
	wantPetCount(t, s.file, 0)
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
		t.Run(header, func(t *testing.T) { s.create(rex, header).want(t, 201) })
	}

	const mediaType = "Content-Type must be application/json, not "
	for _, c := range []struct {
		header  string
		status  int
		message string
	}{
		{"Content-Type: application/json-patch+json", 415,
			mediaType + `"application/json-patch+json"`},
		{"Content-Type: ", 415, mediaType + `""`},
		{"Content-Type: application/json; x", 415, mediaType + `"application/json; x"`},
		{"Content-Type: " + strings.Repeat("x", 99), 415,
			mediaType + `"` + strings.Repeat("x", 64) + `"`},
		{"Idempotency-Key: " + strings.Repeat("x", 256), 400, idempotencyKeyRule},
		{"Idempotency-Key: ", 400, idempotencyKeyRule},
		{"Idempotency-Key: é", 400, idempotencyKeyRule},
		{"Idempotency-Key: a b", 400, idempotencyKeyRule},
	} {
		t.Run(c.header, func(t *testing.T) {
			s.create(rex, c.header).wantError(t, c.status, c.message)
		})
	}

	s.create(rex, "Idempotency-Key: a", "Idempotency-Key: a").wantError(t, 400, idempotencyKeyRule)
	s.create(rex, "Content-Type: application/json", "Content-Type: application/json").
		wantError(t, 415, mediaType+`"application/json, application/json"`)
	wantPetCount(t, s.file, 3)
}

// TestGetPet fetches animals that exist and others that do not: each response must say that the
// operation is deprecated.
func TestGetPet(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	replies := []reply{
		s.get("/v1/pets/2?limit=x&a;b").want(t, 200).
			wantBody(t, `{"id":2,"name":"Tom","categoryId":-8,"status":"sold"}`+"\n"),
		s.do("HEAD /v1/pets/1", "").want(t, 200),
		s.get("/v1/pets/1", noAPIKey).wantError(t, 401, unauthorized),
	}
	for _, id := range []string{
		"4", "26", "0", "-9223372036854775808", "9223372036854775808", "01", "+1", "1%2F",
		"Rex",
	} {
		replies = append(replies, s.get("/v1/pets/"+id).wantError(t, 404, noAnimal))
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
		"GET /v1/./pets", "GET /v1%2Fpets", "POST //v1/pets",
	} {
		s.do(request, rex).wantError(t, 404, nothingThere)
		s.do(request, rex, noAPIKey).wantError(t, 401, unauthorized)
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
		s.do(request, rex, noAPIKey).wantError(t, 401, unauthorized)
	}

	// These need no API key.
	s.get("/healthz", noAPIKey).want(t, 200).wantBody(t, "{\"status\":\"ok\"}\n").
		wantHeader(t, "Connection", "close")
	s.do("HEAD /healthz", "", noAPIKey).want(t, 200)
	s.get("/openapi.json", noAPIKey).want(t, 200).wantBody(t, string(encode(openAPI)))
	wantPetCount(t, s.file, 24)
}

// TestAPIKeys lists animals with different Authorization headers. A 401 must have a challenge,
// which says that the token is invalid if there is one, and must close the connection.
func TestAPIKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, authorization := range []string{
		"Bearer " + testKey, "Bearer " + otherKey, "BEARER  " + testKey,
	} {
		s.get("/v1/pets", "Authorization: "+authorization).want(t, 200).
			wantHeader(t, "Connection", "")
	}

	const invalid = `, error="invalid_token"`
	for _, c := range []struct{ name, authorization, challenge string }{
		{"no scheme", testKey, ""},
		{"another scheme", "Basic " + testKey, ""},
		{"no token", "Bearer", ""},
		{"an empty token", "Bearer  ", ""},
		{"a wrong key", "Bearer wrong", invalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.get("/v1/pets", "Authorization: "+c.authorization).wantError(t, 401, unauthorized).
				wantHeader(t, "WWW-Authenticate", `Bearer realm="animalstore"`+c.challenge).
				wantHeader(t, "Connection", "close")
		})
	}
	s.get("/v1/pets", "Authorization: Bearer "+testKey, "Authorization: Bearer "+testKey).
		wantError(t, 401, unauthorized).
		wantHeader(t, "WWW-Authenticate", `Bearer realm="animalstore"`)
}

// TestOrderOfErrors sends a request with all faults, and then corrects one fault after the other.
// Each response must be for the first fault that is left.
func TestOrderOfErrors(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const (
		wrongKey   = "Authorization: Bearer wrong"
		textType   = "Content-Type: text/plain"
		invalidKey = "Idempotency-Key: a b"
		invalid    = "[" + rex
	)
	tooLarge := invalid + strings.Repeat(" ", 64<<10)

	s.do("PATCH /v1/dogs", tooLarge, wrongKey, textType, invalidKey).want(t, 401)
	s.do("PATCH /v1/dogs", tooLarge, textType, invalidKey).want(t, 404)
	s.do("PATCH /v1/pets", tooLarge, textType, invalidKey).want(t, 405)
	s.create(tooLarge, textType, invalidKey).want(t, 415)
	s.create(tooLarge, invalidKey).wantError(t, 400, idempotencyKeyRule)
	s.create(tooLarge).want(t, 413)
	s.create(invalid).want(t, 400)
}

// TestPaging follows the links from page to page. It resolves each link as a client does behind a
// proxy that strips /shop from paths. Each animal that was there at the start must be listed once,
// although an animal is added and one is deleted after each page.
func TestPaging(t *testing.T) {
	t.Parallel()
	s := newService(t)
	addPets(t, s.file, 30)

	listed := map[int64]int{} // how often, by id
	page, err := url.Parse("https://example.com/shop/v1/pets?limit=4&status=sold")
	must(t, err)
	for range 20 { // more pages than there are
		resp := s.get(strings.TrimPrefix(page.RequestURI(), "/shop")).want(t, 200)
		var last int64
		for _, p := range decode[[]Pet](t, resp.body) {
			listed[p.ID]++
			last = p.ID
		}
		s.create(`{"name":"late","categoryId":1,"status":"sold"}`).want(t, 201)
		// With OFFSET in place of the last id, this would shift the next page.
		execSQL(t, s.file, "DELETE FROM pets WHERE id = ?", last)

		link, found := strings.CutPrefix(resp.header.Get("Link"), "<")
		if !found {
			break
		}
		page, err = page.Parse(strings.TrimSuffix(link, `>; rel="next"`))
		must(t, err)
	}

	for id := int64(1); id <= 30; id++ {
		if listed[id] != 1 {
			t.Fatalf("the pages list animal %d %d times, want once", id, listed[id])
		}
	}
}

// TestIdempotencyKey adds animals with Idempotency-Keys. A repeat must get the first response, even
// after an edit or a deletion, and a key that was used for another animal must get 422.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := newService(t)

	s.create(`{"name":1}`, idempotencyKey("k")).want(t, 400) // does not use up the key
	first := s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	s.create(rex).wantNew(t, 2)
	s.create(rex, idempotencyKey("K")).wantNew(t, 3)
	s.create(rex, idempotencyKey("k"), "Authorization: Bearer "+otherKey).wantNew(t, 4)

	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	s.create(`{"status":"available","categoryId":7,"n\u0061me":"Rex"}`, idempotencyKey("k")).
		wantRepeat(t, first)
	execSQL(t, s.file, "UPDATE pets SET name = 'x', category_id = 1, status = 'sold'")
	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	execSQL(t, s.file, "DELETE FROM pets WHERE id = 1")
	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)

	for _, body := range []string{
		`{"name":"rex","categoryId":7}`,
		`{"name":"Rex","categoryId":8}`,
		`{"name":"Rex","categoryId":7,"status":"sold"}`,
	} {
		s.create(body, idempotencyKey("k")).
			wantError(t, 422, "this Idempotency-Key was used for another animal")
	}
	s.create(`{"name":1}`, idempotencyKey("k")).want(t, 400)
	wantPetCount(t, s.file, 3)

	// If the status was added to pets later, the response lacks it. That is no difference.
	execSQL(t, s.file, "UPDATE idempotency_keys SET response = json_remove(response, '$.status')")
	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	execSQL(t, s.file, "UPDATE idempotency_keys SET response = 'no JSON'")
	s.create(rex, idempotencyKey("k")).want(t, 500)
}

// TestExpiredIdempotencyKeys lets Idempotency-Keys grow old, under a fake clock: after 24 hours,
// they must add an animal again. Each new animal with a key must delete up to two keys that have
// expired, and no others.
func TestExpiredIdempotencyKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		const keys = "SELECT group_concat(key ORDER BY key) FROM idempotency_keys"
		for _, k := range []string{"a", "b", "c", "d"} {
			s.create(rex, idempotencyKey(k)).want(t, 201)
			time.Sleep(time.Second) // a is the oldest
		}

		time.Sleep(24*time.Hour - time.Minute)
		s.create(rex, idempotencyKey("late")).wantNew(t, 5)
		wantSQL(t, s.file, keys, "a,b,c,d,late")
		s.create(rex, idempotencyKey("d")).want(t, 201).wantHeader(t, "Idempotency-Replayed", "true")

		time.Sleep(2 * time.Minute) // now all but late have expired
		again := s.create(rex, idempotencyKey("d")).wantNew(t, 6)
		wantSQL(t, s.file, keys, "c,d,late") // d has replaced the old d; a and b were deleted
		s.create(rex, idempotencyKey("d")).wantRepeat(t, again)
		s.create(rex, idempotencyKey("e")).wantNew(t, 7)
		wantSQL(t, s.file, keys, "d,e,late")
	})
}

// TestBatches adds animals to a locked database, so that many of them share a transaction. An
// animal that is refused must not keep the others from being stored.
func TestBatches(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const zoe = `{"name":"Zoe","categoryId":13}`
	execSQL(t, s.file, `INSERT INTO pets (name, category_id) VALUES ('Zoe', 13);
		CREATE UNIQUE INDEX one_of_13 ON pets (category_id) WHERE category_id = 13`)
	before := len(readFile(t, s.file+"-wal"))
	lockFor(t, s.file, 300*time.Millisecond)

	// Each of 20 clients sends four requests at once, two of them with the same Idempotency-Key.
	var replies [20]struct{ first, same, refused, withoutKey reply }
	var requests sync.WaitGroup
	for i := range replies {
		r, k := &replies[i], fmt.Sprint(i)
		requests.Go(func() { r.first = s.create(rex, idempotencyKey(k)) })
		requests.Go(func() { r.same = s.create(rex, idempotencyKey(k)) })
		requests.Go(func() { r.refused = s.create(zoe, idempotencyKey(k+"-zoe")) })
		requests.Go(func() { r.withoutKey = s.create(rex) })
	}
	requests.Wait()

	for _, r := range replies {
		if r.first.header.Get("Idempotency-Replayed") != "" {
			r.first, r.same = r.same, r.first // same arrived first
		}
		r.first.want(t, 201)
		r.same.wantRepeat(t, r.first)
		r.refused.wantError(t, 400, "a rule in the database of the shop refuses this animal")
		r.withoutKey.want(t, 201)
	}
	s.log.wantText(t, "UNIQUE constraint failed")
	// A transaction writes at least three pages of 4096 bytes to the WAL. So 40 transactions, one for
	// each animal, would write 120 pages. But most animals wait for the lock, share the second or
	// third transaction, and write some 20 pages.
	if pages := (len(readFile(t, s.file+"-wal")) - before) / 4096; pages > 60 {
		t.Fatalf("the WAL has grown by %d pages, want at most 60", pages)
	}
	wantPetCount(t, s.file, 41) // the first Zoe, and two of each client
	// Only the keys of animals that were stored are kept.
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "20")
	wantSQL(t, s.file,
		"SELECT count(*) FROM pets JOIN idempotency_keys ON id = response ->> 'id'", "20")
}

// TestClientThatIsGone sends requests as a handler sees them after the client has disconnected:
// their context is cancelled, or their body breaks off. Only the animal of a whole request must be
// stored.
func TestClientThatIsGone(t *testing.T) {
	t.Parallel()
	s := newService(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	r := newRequest("POST /v1/pets", strings.NewReader(rex))
	s.send(r.WithContext(gone)).want(t, 201)
	for _, received := range []string{"", rex} {
		body := io.MultiReader(strings.NewReader(received), iotest.ErrReader(io.ErrUnexpectedEOF))
		s.send(newRequest("POST /v1/pets", body)).
			wantError(t, 400, "the request body could not be read to its end")
	}
	wantPetCount(t, s.file, 1)
}

// The log, and a panic.

// TestLog sends requests, and checks the line that each of them logs.
func TestLog(t *testing.T) {
	t.Parallel()
	s := newService(t)
	wantLine := func(r reply, level, rest string) {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(s.log.String()), "\n")
		_, got, _ := strings.Cut(lines[len(lines)-1], " ") // after the time
		got = regexp.MustCompile(`duration_ms=[0-9.]+`).ReplaceAllString(got, "duration_ms=D")
		want := "level=" + level + " msg=request id=" + r.header.Get("X-Request-Id") +
			" client=192.0.2.1:1234 " + rest
		if got != want {
			t.Fatalf("%.50s logged\n%s, want\n%s", r.request, got, want)
		}
	}

	const ofKey = "key_sha256=62af8704" // printf %s test-key | sha256sum
	wantLine(s.get("/v1/pets?after=7", "X-Request-Id: mine").want(t, 200), "INFO",
		"method=GET path=/v1/pets status=200 duration_ms=D "+ofKey)
	wantLine(s.get("/v1/pets?limit=0"), "INFO",
		"method=GET path=/v1/pets status=400 duration_ms=D "+ofKey+` error="`+limitRule+`"`)
	long := strings.Repeat("x", 2000)
	wantLine(s.do(long+" /"+long, "", "Authorization: Bearer secret"), "INFO",
		"method="+long[:20]+" path=/"+long[:999]+` status=401 duration_ms=D error="`+unauthorized+`"`)
	execSQL(t, s.file, "DROP TABLE pets")
	wantLine(s.get("/v1/pets/1"), "ERROR", "method=GET path=/v1/pets/1 status=500 duration_ms=D "+
		ofKey+` error="SQL logic error: no such table: pets (1)"`)
}

// TestPanicInAHandler lets a handler panic: the request gets 500, and the next one is answered.
func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	log := &logBuffer{}
	handlers := map[string]handler{"/": func(*request) (any, error) { panic("a mistake") }}
	c := client{transport: inProcess{newServer(handlers, log.logger()), t.Name()}}

	for range 2 {
		c.get("/").wantError(t, 500, "internal error")
	}
	log.wantText(t, "level=ERROR", "status=500", `error="panic: a mistake`, "server_test.go:")
}

// What the program refuses at its start.

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
		{"-h", withAPIKey, 0, `(default "127.0.0.1:8080")`},

		{"-addr " + taken.Addr().String(), withAPIKey, 1, "address already in use"},
		{"-addr :0", env{}, 1, "API_KEYS is not set"},
		{"-addr " + lan(t), env{}, 1, "API_KEYS is not set"},
		{"", env{"API_KEYS": ""}, 1, "API_KEYS: the list has no key"},
		{"", env{"API_KEYS": "one, secret key"}, 1,
			"API_KEYS: item 2 must consist of visible ASCII characters, without spaces"},
		{"", env{"API_KEYS": ",,sécret"}, 1, "API_KEYS: item 3 must consist of visible ASCII"},
		{"-db DIR/none/animals.db", withAPIKey, 1, "unable to open database file (14)"},
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

// lan returns an address of this machine beyond loopback if it has one, otherwise :0.
func lan(t *testing.T) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	must(t, err)
	for _, a := range addrs {
		if ip := a.(*net.IPNet).IP; ip.To4() != nil && ip.IsGlobalUnicast() {
			return net.JoinHostPort(ip.String(), "0")
		}
	}
	return ":0"
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
		{"of another program", edit("PRAGMA application_id = 0"), foreign},
		{"of no version", edit("PRAGMA user_version = 0"), "not a database of this service"},
		{"of another program, of no version",
			edit("PRAGMA application_id = 0; PRAGMA user_version = 0"), foreign},
		{"of a newer version", edit(fmt.Sprint("PRAGMA user_version = ", len(migrations)+1)),
			"a newer version of this service has written the database"},
		{"a WAL alone", func(t *testing.T, file string) { must(t, os.Rename(file, file+"-wal")) },
			`animals.db-wal", but no database`},
		{"a WAL and an empty file", func(t *testing.T, file string) {
			must(t, os.Rename(file, file+"-wal"))
			writeFile(t, file, "")
		}, `animals.db-wal", but no database`},
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
	wantRefusal(t, dir, withAPIKey, 1, ": open "+dir+"/none/copy.db.", // not in TMPDIR
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

// newClosedDatabase returns the name of a database with one animal, which no service has open.
func newClosedDatabase(t *testing.T) (file string) {
	t.Helper()
	s := newService(t)
	s.create(rex).want(t, 201)
	must(t, s.close())
	return s.file
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

// The database file.

// TestNamesOfDatabases opens databases whose names have characters with a meaning in URLs or
// SQLite: the file must have just this name.
func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", `ä"'`} {
		dir := t.TempDir()
		s := openService(t, filepath.Join(dir, name))
		s.log.wantText(t, `level=WARN msg="the database is new and empty"`)
		s.create(rex).want(t, 201)
		must(t, s.close())

		wantOnly(t, dir, name)
		openService(t, s.file).log.wantNoText(t, "new and empty")
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
	s.create(rex).wantNew(t, 4) // no id is used again
}

// TestQueryPlans explains the statements that search: with millions of rows, each must use an
// index.
func TestQueryPlans(t *testing.T) {
	t.Parallel()
	db := connect(t, newService(t).file)
	for query, index := range map[string]string{
		selectPetsSQL:     "SEARCH pets USING INTEGER PRIMARY KEY (rowid>?)",
		selectPetSQL:      "SEARCH pets USING INTEGER PRIMARY KEY (rowid=?)",
		selectResponseSQL: "idempotency_keys_1 (caller=? AND key=?)", // the index of the primary key
		selectByStatusSQL: "SEARCH pets USING INDEX pets_by_status (status=? AND rowid>?)",
		deleteExpiredSQL:  "SEARCH idempotency_keys USING COVERING INDEX idempotency_keys_by_age",
	} {
		var plan []string
		// Each placeholder is NULL.
		rows, err := db.Query("EXPLAIN QUERY PLAN "+query, make([]any, strings.Count(query, "?"))...)
		must(t, err)
		for rows.Next() {
			var ignored, detail string
			must(t, rows.Scan(&ignored, &ignored, &ignored, &detail))
			plan = append(plan, detail)
		}
		got := strings.Join(plan, "; ")
		if !strings.Contains(got, index) || strings.Contains(got, "SCAN") {
			t.Fatalf("%s: %s, want %s", query, got, index)
		}
	}
}

// TestPragmas reads the pragmas of a connection. A synchronous of 2 is FULL. Without checkpoints,
// the WAL would grow for ever.
func TestPragmas(t *testing.T) {
	t.Parallel()
	db := newPool(newService(t).file, "rw", 1)
	defer db.Close()
	var got string
	must(t, db.QueryRow(`SELECT concat_ws(' ', journal_mode, synchronous, timeout, fullfsync,
		checkpoint_fullfsync) FROM pragma_journal_mode, pragma_synchronous, pragma_busy_timeout,
		pragma_fullfsync, pragma_checkpoint_fullfsync`).Scan(&got))
	if want := "wal 2 2000 1 1"; got != want {
		t.Fatalf("the pragmas are %s, want %s", got, want)
	}
	if must(t, db.QueryRow("PRAGMA wal_autocheckpoint").Scan(&got)); got != "1000" {
		t.Fatalf("wal_autocheckpoint is %s, want 1000", got)
	}
}

// TestMigration migrates a database with two more steps, of which the second fails: nothing must
// change. Then it migrates with the first step alone.
func TestMigration(t *testing.T) {
	t.Parallel()
	file := newClosedDatabase(t)
	db := newPool(file, "rwc", 1)
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
	wantSQL(t, file, versionAndCategory, fmt.Sprint(version, " 7"))

	for range 2 { // the second time, there is nothing to do
		_, err := migrate(db, steps[:version+1])
		must(t, err)
		wantSQL(t, file, versionAndCategory, fmt.Sprint(version+1, " 8"))
	}
}

// TestVersion1 opens a database of version 1, in which an Idempotency-Key was used: a repeat must
// get the first response.
func TestVersion1(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	db := newPool(file, "rwc", 1)
	_, err := migrate(db, migrations[:1])
	must(t, err)
	must(t, db.Close())
	caller := sha256.Sum256([]byte(testKey))
	execSQL(t, file, "INSERT INTO pets VALUES (1, ?, 7, 'sold')", `"<é>"`)
	execSQL(t, file, "INSERT INTO idempotency_keys SELECT ?, 'k', 9999999999, * FROM pets", caller[:])

	s := openService(t, file)
	wantSQL(t, file, "SELECT created || ' ' || response FROM idempotency_keys",
		`9999999999 {"id":1,"name":"\"<é>\"","categoryId":7,"status":"sold"}`)
	first := s.get("/v1/pets/1").want(t, 200)
	first.header.Set("Location", "pets/1") // as the response of the create had
	s.create(`{"name":"\"<é>\"","categoryId":7,"status":"sold"}`, idempotencyKey("k")).
		wantRepeat(t, first)
	s.create(rex).wantNew(t, 2)
}

// TestLockedDatabase adds an animal while another program holds a lock: it gets 503, and reads do
// not wait for it. If the lock ends in time, an animal with an Idempotency-Key is added.
func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	unlock := lock(t, s.file)

	var created atomic.Bool
	var creates sync.WaitGroup
	creates.Go(func() {
		s.create(rex).wantError(t, 503, unavailable).wantHeader(t, "Retry-After", "1")
		created.Store(true)
	})
	time.Sleep(200 * time.Millisecond) // now the create waits, for 2 seconds
	s.get("/v1/pets/1").want(t, 404)
	s.get("/v1/pets").want(t, 200).wantBody(t, "[]\n")
	s.get("/healthz").want(t, 200)
	if created.Load() {
		t.Fatal("the reads have waited for the create")
	}
	creates.Wait()
	s.log.wantText(t, "level=ERROR", "database is locked")

	unlock()
	lockFor(t, s.file, 300*time.Millisecond)
	s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	wantPetCount(t, s.file, 1)
}

// TestFullDatabase adds animals until the database is full: the next one gets 503, and lists go on.
func TestFullDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.pragma(t, "max_page_count = 20")
	large := `{"categoryId":1,"name":"` + strings.Repeat("x", 250) + `"}`

	created := 0
	for created < 1000 && s.create(large).status == 201 {
		created++
	}
	s.create(large).wantError(t, 503, unavailable)
	s.log.wantText(t, "level=ERROR", "database or disk is full")
	s.get("/v1/pets").want(t, 200)
	s.get("/healthz").want(t, 200)
	wantPetCount(t, s.file, created)

	execSQL(t, s.file, "DELETE FROM pets")
	s.create(rex).want(t, 201)
}

// TestFailedTransactions lets three transactions fail. Each animal must get 500, and not be stored.
// The next one must be.
//  1. COMMIT fails: a trigger adds a row that breaks a deferred constraint.
//  2. The Idempotency-Key cannot be stored: a trigger calls fail() (see registerSQL).
//  3. It cannot be looked up: a view that calls fail() is in place of the table. The view has the
//     columns and triggers that the prepared statements need.
func TestFailedTransactions(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.pragma(t, "foreign_keys = ON")
	execSQL(t, s.file, `CREATE TABLE t (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER rule AFTER INSERT ON pets BEGIN INSERT INTO t VALUES (-1); END`)
	s.create(rex).want(t, 500)

	execSQL(t, s.file, `DROP TRIGGER rule;
		CREATE TRIGGER rule BEFORE INSERT ON idempotency_keys BEGIN SELECT fail(); END`)
	s.create(rex, idempotencyKey("k")).want(t, 500)
	s.create(rex).wantNew(t, 1)

	execSQL(t, s.file, `DROP TABLE idempotency_keys;
		CREATE VIEW idempotency_keys AS SELECT x'' AS caller, 'k' AS key, fail() AS created,
			1 AS rowid, '' AS response;
		CREATE TRIGGER i INSTEAD OF INSERT ON idempotency_keys BEGIN SELECT 1; END;
		CREATE TRIGGER d INSTEAD OF DELETE ON idempotency_keys BEGIN SELECT 1; END`)
	s.create(rex, idempotencyKey("k")).want(t, 500)
	s.create(rex).wantNew(t, 2)
}

// TestFailedReads lists and fetches two animals, of which the second cannot be read. A response
// that would have it must be a 500. Each list must give its connection back, or there would be none
// left for the last ones.
func TestFailedReads(t *testing.T) {
	t.Parallel()
	for expression, cause := range map[string]string{ // of the second name
		"fail()": "a mistake", // see registerSQL
		"NULL":   "converting NULL to string is unsupported",
	} {
		s := newService(t)
		addPets(t, s.file, 2)
		replaceSecondName(t, s.file, expression)

		for range 100 { // more than there are connections, on most machines
			s.get("/v1/pets").wantError(t, 500, "internal error")
		}
		s.get("/v1/pets?status=sold").want(t, 500)
		s.get("/v1/pets/2").want(t, 500)
		s.log.wantText(t, "level=ERROR", cause)
		s.get("/v1/pets/1").want(t, 200)
	}
}

// replaceSecondName puts a view in the place of the table of animals. In the view, the name of
// animal 2 is what an SQL expression returns.
func replaceSecondName(t *testing.T, file, expression string) {
	t.Helper()
	execSQL(t, file, `ALTER TABLE pets RENAME TO old;
		CREATE VIEW pets AS SELECT id, category_id, status,
			CASE id WHEN 2 THEN `+expression+` ELSE name END AS name FROM old`)
}

// TestMissingTable drops the table of a running service: it must not be healthy, and the next start
// must say why in one line.
func TestMissingTable(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, "DROP TABLE pets")
	s.get("/healthz").wantError(t, 503, unavailable)
	s.log.wantText(t, `error="`+unavailable+`: SQL logic error: no such table: pets (1)"`)

	must(t, s.close())
	_, err := openStore(s.file, s.log.logger())
	if want := "SQL logic error: no such table: pets (1)"; err == nil || err.Error() != want {
		t.Fatalf("openStore = %v, want %s", err, want)
	}
}

// TestMovedDatabase moves the database of a running service, puts it back, and moves it again while
// a create waits for a lock. Creates must get 503 while it is away. After a stop, the moved
// database must have all animals, and a new one in its place must have none.
func TestMovedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	must(t, os.Rename(s.file, s.file+".away"))
	wantNotInItsPlace(t, s)

	must(t, os.Rename(s.file+".away", s.file))
	s.get("/healthz").want(t, 200)
	s.create(rex).want(t, 201)

	unlock := lock(t, s.file)
	time.AfterFunc(200*time.Millisecond, func() {
		os.Rename(s.file, s.file+".away")
		unlock()
	})
	s.create(rex).wantError(t, 503, unavailable)
	wantNotInItsPlace(t, s)
	must(t, s.close())
	wantPetCount(t, s.file+".away", 2)
	must(t, openService(t, s.file).close()) // makes a new database
	wantPetCount(t, s.file, 0)
}

// TestReplacedDatabase moves a backup to the place of the database. After a stop, each of the two
// must have its own animals.
func TestReplacedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	must(t, backup(t.Context(), s.file, s.file+".backup"))
	s.create(rex).want(t, 201)

	must(t, os.Rename(s.file, s.file+".away"))
	must(t, os.Rename(s.file+".backup", s.file))
	wantNotInItsPlace(t, s)
	must(t, s.close())
	wantPetCount(t, s.file+".away", 2)
	wantPetCount(t, s.file, 1)
}

// TestMovedWAL moves the WAL of a running service, or its index: creates must get 503, until the
// file is put back. Then the test deletes the file. SQLite still has it open, and copies the WAL to
// the database when the service stops. So nothing must be lost.
func TestMovedWAL(t *testing.T) {
	t.Parallel()
	for _, suffix := range []string{"-wal", "-shm"} {
		t.Run(suffix, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			s.create(rex).want(t, 201)
			must(t, os.Rename(s.file+suffix, s.file+".away"))
			wantNotInItsPlace(t, s)
			must(t, os.Rename(s.file+".away", s.file+suffix))
			s.create(rex).want(t, 201)

			must(t, os.Remove(s.file+suffix))
			wantNotInItsPlace(t, s)
			must(t, s.close())
			wantPetCount(t, s.file, 2)
		})
	}
}

// TestStopBesideAMovedWAL moves the WAL, and stops the service while another program has the
// database open. The service is not the last to close, so SQLite leaves the WAL as it is. The stop
// must leave it, too: the other program may have begun a new WAL, and pages of two WALs damage a
// database.
func TestStopBesideAMovedWAL(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	_, err := connect(t, s.file).Exec("SELECT * FROM pets") // the connection stays open
	must(t, err)

	must(t, os.Rename(s.file+"-wal", s.file+".away"))
	must(t, s.close())
	if readFile(t, s.file+".away") == "" {
		t.Fatal("the stop has emptied the WAL")
	}
}

// wantNotInItsPlace checks that a service refuses to add animals, and logs why, but returns them.
func wantNotInItsPlace(t *testing.T, s *service) {
	t.Helper()
	s.create(rex).wantError(t, 503, unavailable)
	s.log.wantText(t, "level=ERROR", "the database is not in its place")
	s.get("/healthz").wantError(t, 503, unavailable)
	s.get("/v1/pets/1").want(t, 200)
}

// TestListsOfAMovedDatabase sends four lists at once, which sleep_1s() makes slow (registerSQL), so
// that the service uses four connections. openReaders must have opened them before the database was
// moved.
func TestListsOfAMovedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	execSQL(t, s.file, `ALTER TABLE pets RENAME TO fast;
		CREATE VIEW pets AS SELECT * FROM fast WHERE sleep_1s()`)
	must(t, os.Rename(s.file, s.file+".away"))

	var replies [4]reply
	var lists sync.WaitGroup
	for i := range replies {
		lists.Go(func() { replies[i] = s.get("/v1/pets") })
	}
	lists.Wait()
	for _, r := range replies {
		r.want(t, 200).
			wantBody(t, `[{"id":1,"name":"Rex","categoryId":7,"status":"available"}]`+"\n")
	}
}

// TestIdleReaders lets a day pass, under a fake clock. The service must keep its connections open,
// and open no new ones, which may be to another file.
func TestIdleReaders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		time.Sleep(24 * time.Hour)
		must(t, os.Rename(s.file, s.file+".away"))
		s.get("/v1/pets").want(t, 200)
	})
}

// TestBackup makes a backup of a running service, and runs another service on the copy.
func TestBackup(t *testing.T) {
	t.Parallel()
	s := newService(t)
	dir := t.TempDir()
	first := s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	list := s.get("/v1/pets").want(t, 200)
	args := []string{"-db", s.file, "-backup", filepath.Join(dir, "copy.db")}

	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if status := run(interrupted, args, os.LookupEnv, io.Discard); status != 1 {
		t.Fatalf("an interrupted -backup = %d, want 1", status)
	}
	wantOnly(t, dir)

	if status := run(t.Context(), args, os.LookupEnv, io.Discard); status != 0 {
		t.Fatalf("-backup = %d, want 0", status)
	}
	wantOnly(t, dir, "copy.db")
	copied := openService(t, filepath.Join(dir, "copy.db"))
	copied.get("/v1/pets").want(t, 200).wantBody(t, list.body)
	copied.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	copied.create(rex, idempotencyKey("another")).wantNew(t, 2)
}

// Connections, under a fake clock. They are pipes in memory, which hold nothing: a write returns
// when the other end has read it.

// Requests as they are sent. rawCreate lacks its body, rex.
var (
	rawList   = "GET /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\n\r\n"
	rawCreate = "POST /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey +
		"\r\nContent-Length: " + strconv.Itoa(len(rex)) + "\r\n\r\n"
)

// TestSlowRequests lets a client send slowly: the service must close its connection after so many
// seconds. (net/http answers a first line that is cut off with 400, and slow headers not at all.)
func TestSlowRequests(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		sent        string
		eachSecond  string // is sent after that, each second
		closedAfter int    // seconds
		received    string // by the client, as a regular expression
	}{
		{name: "nothing is sent", closedAfter: 5, received: "^$"},
		{name: "the first line is cut off", sent: "GET /v1/pets HT", closedAfter: 5,
			received: "^HTTP/1.1 400 "},
		{name: "the headers are slow", sent: "GET / HTTP/1.1\r\n", eachSecond: "X: x\r\n",
			closedAfter: 5, received: "^$"},
		{name: "the body is slow", sent: rawCreate, eachSecond: " ", closedAfter: 10,
			received: "the request did not arrive within 10 seconds"},
		{name: "no other request follows", sent: rawList, closedAfter: 150, received: `\[\]\n$`},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
				begun := time.Now()
				conn := s.dial(t)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					for err == nil && c.eachSecond != "" {
						time.Sleep(time.Second)
						_, err = io.WriteString(conn, c.eachSecond)
					}
				}()
				got := conn.receiveAll()

				took := int(time.Since(begun).Seconds()) // without fractions: net/http may wait a little
				if took != c.closedAfter {
					t.Errorf("the connection was closed after %d seconds, want %d", took, c.closedAfter)
				}
				if !regexp.MustCompile(c.received).MatchString(got) {
					t.Errorf("the client received %q, want %s", got, c.received)
				}
			})
		})
	}
}

// TestLateReading lets a client read a response late: after 24 seconds, it must still be there, and
// after 26 no more.
func TestLateReading(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]string{
		24 * time.Second: string(encode(openAPI)),
		26 * time.Second: "",
	} {
		t.Run(wait.String(), func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
				conn := s.dial(t)
				conn.send(t, "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
				time.Sleep(wait)
				_, body, _ := strings.Cut(conn.receiveAll(), "\r\n\r\n")
				if body != want {
					t.Fatalf("the client received %.1000q, want %.1000q", body, want)
				}
			})
		})
	}
}

// TestInvalidHTTP sends requests that net/http itself refuses: these errors must have the form of
// the others, and be logged.
func TestInvalidHTTP(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, request string
		status        int
		message       string
	}{
		{"an invalid path", "GET /v1/pets/%zz HTTP/1.1\r\nHost: x\r\n\r\n",
			400, "400 Bad Request"},
		{"an invalid header", "GET / HTTP/1.1\r\nHost: x\r\na b: c\r\n\r\n",
			400, "400 Bad Request: invalid header name"},
		{"an expectation", "GET / HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n",
			417, "417 Expectation Failed"},
		{"large headers", "GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 17<<10) + "\r\n\r\n",
			431, "431 Request Header Fields Too Large"},
		{"an encoding", "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
			501, "501 Not Implemented"},
		{"a version", "GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505,
			"505 HTTP Version Not Supported: unsupported protocol version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
				conn := s.dial(t)
				go io.WriteString(conn, c.request)
				want := fmt.Sprintf(`{"code":"invalid_http","message":%q,"status":%d}`,
					c.message, c.status)
				resp := conn.receive(t).want(t, c.status).wantBody(t, want+"\n").
					wantHeader(t, "Connection", "close")
				s.log.wantText(t, "id="+resp.header.Get("X-Request-Id")+" client=pipe ", c.message)
				conn.wantClosed(t)
			})
		})
	}
}

// TestRawRequests sends requests that only a connection can show. Each proves the rule that its
// name states. In most, no handler reads the body to its end. The client must be able to send all
// of it, unless cutOff is set, and receive the response without delay.
func TestRawRequests(t *testing.T) {
	t.Parallel()
	request := func(line string, headers ...string) string {
		headers = append(headers, "Host: x", "Connection: close")
		return line + "\r\n" + strings.Join(headers, "\r\n") + "\r\n\r\n"
	}
	body := func(size int) string { return strings.Repeat("x", size) }
	// chunk begins a chunk of so many bytes (RFC 9112).
	chunk := func(size int) string { return fmt.Sprintf("%x\r\n", size) }
	const put = "PUT /v1/pets HTTP/1.1"

	for _, c := range []struct {
		name, sent string
		want       string // in what the client receives
		cutOff     bool   // the connection is closed before the client has sent all
	}{
		{name: "OPTIONS * needs an API key", sent: request("OPTIONS * HTTP/1.1"), want: "HTTP/1.1 401 "},
		{name: "15 KiB of headers are accepted", want: "HTTP/1.1 200 ",
			sent: request("GET /healthz HTTP/1.1", "X: "+body(15<<10))},
		{name: "a body of up to 1 MiB is read", want: "HTTP/1.1 401 ",
			sent: request(put, "Content-Length: 1000000") + body(1000000)},
		{name: "it is read in HTTP/1.0, too",
			sent: request("PUT / HTTP/1.0", "Content-Length: 1000000") + body(1000000),
			want: "HTTP/1.0 401 "},
		{name: "it is read in chunks, too", sent: request(put, "Transfer-Encoding: chunked") +
			chunk(500000) + body(500000) + "\r\n" + chunk(0) + "\r\n", want: "HTTP/1.1 401 "},
		{name: "a body that is declared to be larger is not waited for",
			sent: request(put, "Content-Length: 2000000"), want: "HTTP/1.1 401 "},
		{name: "no more than 1 MiB is read", sent: request(put, "Transfer-Encoding: chunked") +
			chunk(9<<20) + body(3<<20), want: "HTTP/1.1 401 ", cutOff: true},
		{name: "a client that waits for 100 gets it, and its refusal",
			sent: request("POST /v1/pets HTTP/1.1", "Authorization: Bearer "+testKey,
				"Expect: 100-continue", "Content-Length: 500000") + body(500000),
			want: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
				begun, conn := time.Now(), s.dial(t)
				sent := make(chan error, 1)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					sent <- err
				}()
				got := conn.receiveAll()

				if took := time.Since(begun); took > time.Second {
					t.Errorf("the connection was closed after %v, want no delay", took)
				}
				if !strings.Contains(got, c.want) {
					t.Errorf("the client received %.1000q, want %q", got, c.want)
				}
				if err := <-sent; (err != nil) != c.cutOff {
					t.Errorf("sending the request failed: %v, want a failure: %v", err, c.cutOff)
				}
			})
		})
	}
}

// Tests of serve: what happens to open connections at a stop, and a broken listener.

// TestStopAnswersOnAnOpenConnection sends a request while the service stops: it must be answered. A
// connection without a request must be closed.
func TestStopAnswersOnAnOpenConnection(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn, idle := s.dial(t), s.dial(t)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200).wantHeader(t, "Connection", "")
		idle.send(t, rawList)
		idle.receive(t).want(t, 200)

		begun := s.beginStop(t)
		time.Sleep(249 * time.Millisecond)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200).wantHeader(t, "Connection", "close")
		s.wantStopped(t, begun, 250*time.Millisecond)
		conn.wantClosed(t)
		idle.wantClosed(t)
	})
}

// TestStopWaitsForARequest stops the service while a request arrives: it must be answered.
func TestStopWaitsForARequest(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn := s.dial(t)
		conn.send(t, rawCreate) // without its body

		begun := s.beginStop(t)
		time.Sleep(4 * time.Second)
		conn.send(t, rex)
		conn.receive(t).want(t, 201).wantHeader(t, "Connection", "close")
		s.wantStopped(t, begun, 4*time.Second)
	})
}

// TestStopCutsOffARequest stops the service while a request arrives that never ends: the service
// must not wait for it for ever.
func TestStopCutsOffARequest(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn := s.dial(t)
		conn.send(t, rawCreate) // its body never comes

		begun := s.beginStop(t)
		s.wantStopped(t, begun, drainTime+shutdownTime)
		conn.wantClosed(t)
		s.log.wantText(t, `WARN msg="connections were cut off"`)
	})
}

// TestStopClosesASilentConnection stops the service beside a connection on which nothing was sent.
func TestStopClosesASilentConnection(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn := s.dial(t)

		begun := s.beginStop(t)
		s.wantStopped(t, begun, readHeaderTimeout)
		conn.wantClosed(t)
		s.log.wantNoText(t, "cut off")
	})
}

// TestFailedAccept lets the listener fail once, as without file descriptors: the service must log
// that as a warning, and go on.
func TestFailedAccept(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		s.listener.conns <- nil
		conn := s.dial(t)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200)
		s.log.wantText(t, "level=WARN", "too many open files")
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

// The program as a process.

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

// TestLargeHeaders sends large headers over TCP, and goes on sending: after the response, the
// connection must end, and not be reset, or the client could miss the response.
func TestLargeHeaders(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), withAPIKey)
	conn, err := net.Dial("tcp", p.host)
	must(t, err)
	defer conn.Close()
	io.WriteString(conn, "GET / HTTP/1.1\r\nX: "+strings.Repeat("x", 40<<10))
	got, err := io.ReadAll(conn)
	if must(t, err); !strings.HasPrefix(string(got), "HTTP/1.1 431 ") {
		t.Fatalf("the client received %q, want 431", got)
	}
}

// TestMadeKey starts the program without API_KEYS: it must make a key, log it, and accept only
// that.
func TestMadeKey(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), env{})
	p.log.wantText(t, "level=WARN", `msg="API_KEYS is not set: made a key for this run"`, " keys=1 ")
	_, made, _ := strings.Cut(p.log.String(), "api_key=")
	made, _, _ = strings.Cut(made, "\n")
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

	if status := p.wait(); status != 0 {
		t.Fatalf("after the signals, the status is %d, want 0", status)
	}
	p.log.wantText(t, "msg=stopping", "msg=stopped")
	p.log.wantNoText(t, "cut off")
	wantOnly(t, filepath.Dir(file), "animals.db")
	wantPetCount(t, file, int(created.Load()))
}

// TestStopAfterMove stops the program after its database was moved, while another program reads.
// The WAL then stays. The stop must say where it belongs, and there it must have the animal.
func TestStopAfterMove(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, withAPIKey)
	reader := connect(t, file)
	_, err := reader.Exec("BEGIN; SELECT * FROM pets")
	must(t, err)
	p.create(rex).want(t, 201)

	must(t, os.Rename(file, file+".moved"))
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if status := p.wait(); status != 1 {
		t.Fatalf("the status is %d, want 1", status)
	}
	p.log.wantText(t, "the moved database still needs its write-ahead log (another program uses it)",
		`animals.db-wal"`)

	must(t, reader.Close())
	must(t, os.Rename(file+"-wal", file+".moved-wal"))
	wantPetCount(t, file+".moved", 1)
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
		maps.Copy(acknowledged, createUntilKilled(p, round))
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
func createUntilKilled(p *process, round int) map[string]reply {
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
	p.wait()
	return acknowledged
}

func petNamed(name string) string { return fmt.Sprintf(`{"name":%q,"categoryId":1}`, name) }

// TestStartAfterKill opens the database of a program that was killed: the start must sync the WAL
// by a commit, because the newest animals may not be on disk. It must warn if the WAL is missing,
// but not after a stop, which deletes it.
func TestStartAfterKill(t *testing.T) {
	t.Parallel()
	const warning = `level=WARN msg="the write-ahead log is missing: animals may be lost"`
	file := newFile(t)
	startAndKill(t, file)
	must(t, os.Remove(file+"-wal"))
	s := openService(t, file)
	s.log.wantText(t, warning)
	must(t, s.close())

	startAndKill(t, file).wantNoText(t, warning)
	before := readFile(t, file+"-wal")
	openService(t, file).log.wantNoText(t, warning)
	if readFile(t, file+"-wal") == before {
		t.Fatal("the start has committed nothing")
	}
}

// startAndKill starts the program on a database, adds an animal, and kills the program. It returns
// the log of the program.
func startAndKill(t *testing.T, file string) *logBuffer {
	t.Helper()
	p := start(t, file, withAPIKey)
	p.create(rex).want(t, 201)
	p.cmd.Process.Kill()
	p.wait()
	return &p.log
}

// TestPanicInSQLite lets requests panic in SQLite: the program must end with status 1, because the
// connection may stay in use for ever.
func TestPanicInSQLite(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "GET /v1/pets/2", "POST /v1/pets"} {
		file := newFile(t)
		p := start(t, file, withAPIKey)
		addPets(t, file, 2)
		// The first animal can be read, so a list panics in rows.Next.
		execSQL(t, file, `ALTER TABLE pets RENAME TO old;
			CREATE VIEW pets AS SELECT * FROM old WHERE id = 1 OR panic_now();
			CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN SELECT panic_now(); END`)

		if resp := p.do(request, rex); resp.err == nil {
			t.Fatalf("%s = %d, want no response", request, resp.status)
		}
		if status := p.wait(); status != 1 {
			t.Fatalf("after %s, the exit status is %d, want 1", request, status)
		}
		p.log.wantText(t, `level=ERROR msg="panic in the store" panic="a mistake" stack=`, "store.go:")
	}
}

// openapi.json.

// TestDocument compares openapi.json with the constants of the code. (want compares it with the
// responses of the operations.)
func TestDocument(t *testing.T) {
	t.Parallel()
	list := document().Paths["/pets"]["get"]
	create := document().Paths["/pets"]["post"]
	newPet := create.RequestBody.Content[jsonType].Schema

	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"the greatest limit", list.parameter("limit").Maximum, maxLimit},
		{"the smallest limit", list.parameter("limit").Minimum, 1},
		{"the default limit", list.parameter("limit").Default, defaultLimit},
		{"a deprecated getPet", document().Paths["/pets/{petId}"]["get"].Deprecated, true},
		{"the longest page", list.Responses["200"].Content[jsonType].Schema.MaxItems, maxLimit},
		{"the statuses", list.parameter("status").Enum, petStatuses},
		{"the longest Idempotency-Key", create.parameter("Idempotency-Key").MaxLength,
			maxIdempotencyKey},
		{"the longest name", newPet.Properties["name"].MaxLength, maxName},
		{"the type of categoryId", newPet.Properties["categoryId"].Type, "integer"},
		{"the format of categoryId", newPet.Properties["categoryId"].Format, "int64"},
		{"the required members", newPet.Required, "[name categoryId]"},
		{"the format of an id",
			create.Responses["201"].Content[jsonType].Schema.Properties["id"].Format, "int64"},
		{"the place of the Idempotency-Key", create.Parameters[0].In, "header"},
		{"the server", document().Servers[0].URL, "/v1"},
		{"the security", document().Security, "[map[bearerAuth:[]]]"},
		{"the scheme", document().Components.SecuritySchemes["bearerAuth"].Scheme, "bearer"},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Errorf("openapi.json has %s = %v, want %v", c.name, c.got, c.want)
		}
	}

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
	for code, status := range statusByCode {
		sentences = append(sentences, fmt.Sprintf("| %d | `%s` |", status, code))
	}
	text := document().Info.Description + create.Description
	for _, sentence := range sentences {
		if !strings.Contains(text, sentence) {
			t.Errorf("openapi.json has no %q", sentence)
		}
	}
}

// openAPIDocument is what the tests read of an OpenAPI document.
type openAPIDocument struct {
	Info       struct{ Description string }
	Servers    []struct{ URL string }
	Security   []map[string][]string
	Paths      map[string]map[string]*operation // by path and method
	Components struct {
		SecuritySchemes map[string]struct{ Scheme string }
	}
}

type operation struct {
	Deprecated  bool
	Description string
	Parameters  []struct {
		Name, In string
		Schema   schema
	}
	RequestBody struct{ Content content }
	Responses   map[string]struct { // by status
		Headers map[string]struct{ Required bool }
		Content content
	}
}

// parameter returns the schema of a parameter.
func (o *operation) parameter(name string) (s schema) {
	for _, p := range o.Parameters {
		if p.Name == name {
			s = p.Schema
		}
	}
	return s
}

// content has the schema of a body, by media type.
type content map[string]struct{ Schema schema }

const jsonType = "application/json"

type schema struct {
	Type, Format                                   string
	Default, Minimum, Maximum, MaxItems, MaxLength int
	Enum, Required                                 []string
	Items                                          *schema
	Properties                                     map[string]schema
}

// document returns openapi.json, with each reference {"$ref": "#/components/KIND/NAME"} replaced by
// the component that it names. (It does not end if a component refers to itself.)
var document = sync.OnceValue(func() (d openAPIDocument) {
	var named struct {
		Components map[string]map[string]json.RawMessage
	}
	err := json.Unmarshal(openAPI, &named)

	reference := regexp.MustCompile(`\{"\$ref": "#/components/(\w+)/(\w+)"\}`)
	text := openAPI
	for reference.Match(text) { // a component may have references, too
		text = reference.ReplaceAllFunc(text, func(found []byte) []byte {
			match := reference.FindSubmatch(found)
			return named.Components[string(match[1])][string(match[2])]
		})
	}
	if err := errors.Join(err, json.Unmarshal(text, &d)); err != nil {
		panic(err)
	}
	return d
})

// A fuzz test.

// FuzzCreatePet adds an animal with any body. It must be refused, or come back as it was sent.
func FuzzCreatePet(f *testing.F) {
	for _, body := range []string{
		rex,
		" {\r\n\t\"status\" : \"sold\" , \"categoryId\" : -1 , \"name\" : \" a b \" } \r\n\t",
		`{"n\u0061me":"\"\\\/\b\f\n\r\t","categoryId":1}`,
		`{"name":"}]:,{[\"\\<&>\u2028","categoryId":-9223372036854775808,"status":"pending"}`,
		`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`,
		`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":0,"status":"available"}`,
		`{"name":"x","categoryId":1e2}`, `{"name":"x","categoryId":-0}`,
	} {
		f.Add(body)
	}
	s := newService(f)

	f.Fuzz(func(t *testing.T, body string) {
		resp := s.create(body)
		if resp.status == 400 || resp.status == 413 && len(body) > maxBody {
			resp.want(t, resp.status)
			return
		}
		sent := decode[map[string]any](t, body)
		if sent["status"] == nil {
			sent["status"] = "available"
		}
		got := decode[map[string]any](t, resp.want(t, 201).body)
		s.get(fmt.Sprint("/v1/pets/", got["id"])).want(t, 200).wantBody(t, resp.body)
		delete(got, "id")
		if !maps.Equal(got, sent) {
			t.Fatalf("%q = %v, want the animal that was sent", body, got)
		}
	})
}

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
	return newReply(r.Method+" "+r.URL.RequestURI(), resp, err)
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
	request string // its method and target
	status  int
	header  http.Header
	body    string
	err     error
}

// newReply reads the response to a request.
func newReply(request string, resp *http.Response, err error) reply {
	if err != nil {
		return reply{request: request, err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{request, resp.StatusCode, resp.Header, string(body), err}
}

// want checks the status of a response, and the rules for all responses:
//   - The headers are those that all responses have, and an X-Request-Id.
//   - A 401, and no other response, has WWW-Authenticate. So it is with 405 and Allow, and with 503
//     and Retry-After.
//   - The body is JSON, of the length that Content-Length says. That of an error is an Error.
//   - openapi.json has its status, its headers and the members of its body: see wantDocumented.
func (r reply) want(t testing.TB, status int) reply {
	t.Helper()
	if r.err != nil || r.status != status {
		t.Fatalf("%.500s = %d %.2000s (error: %v), want %d",
			r.request, r.status, r.body, r.err, status)
	}
	r.wantHeader(t, "Cache-Control", "no-store")
	r.wantHeader(t, "Content-Type", "application/json")
	r.wantHeader(t, "X-Content-Type-Options", "nosniff")
	if id := r.header.Get("X-Request-Id"); !regexp.MustCompile("^[A-Z2-7]{26}$").MatchString(id) {
		t.Fatalf("%.500s has the X-Request-Id %q", r.request, id)
	}
	statuses := map[string]int{"WWW-Authenticate": 401, "Allow": 405, "Retry-After": 503}
	for name, wanted := range statuses {
		if has := r.header.Get(name) != ""; has != (status == wanted) {
			t.Fatalf("%.500s = %d has %s: %v", r.request, status, name, has)
		}
	}
	if !strings.HasPrefix(r.request, "HEAD ") {
		r.wantHeader(t, "Content-Length", strconv.Itoa(len(r.body)))
		if !json.Valid([]byte(r.body)) {
			t.Fatalf("%.500s = %.2000s, want JSON", r.request, r.body)
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
		t.Fatalf("%.500s = %d %s, want an Error", r.request, r.status, r.body)
	}
	if r.status >= 500 && e.Message != "internal error" && e.Message != unavailable {
		t.Fatalf("%.500s tells the cause: %s", r.request, e.Message)
	}
}

// wantDocumented checks that openapi.json describes a response of an operation: its status, its
// headers, and the members of its body, or of the items of a list.
func (r reply) wantDocumented(t testing.TB) {
	t.Helper()
	method, target, _ := strings.Cut(strings.Replace(r.request, "HEAD ", "GET ", 1), " ")
	path, _, _ := strings.Cut(target, "?")
	path = regexp.MustCompile(`^/v1/pets/[^/]+$`).ReplaceAllString(path, "/v1/pets/{petId}")
	path, inVersion := strings.CutPrefix(path, "/v1")
	operation := document().Paths[path][strings.ToLower(method)]
	if operation == nil || !inVersion {
		return
	}
	response, found := operation.Responses[strconv.Itoa(r.status)]
	if !found {
		t.Fatalf("%s = %d, which openapi.json does not describe", r.request, r.status)
	}

	names := []string{"Cache-Control", "Connection", "Content-Length", "Content-Type", "Date",
		"X-Content-Type-Options"}
	for name, header := range response.Headers {
		names = append(names, http.CanonicalHeaderKey(name))
		if header.Required && r.header.Get(name) == "" {
			t.Fatalf("%s = %d has no %s, which openapi.json requires", r.request, r.status, name)
		}
	}
	for name := range r.header {
		if !slices.Contains(names, name) {
			t.Fatalf("%s = %d has %s, which openapi.json does not describe", r.request, r.status, name)
		}
	}

	if r.body == "" { // of HEAD
		return
	}
	object := response.Content[jsonType].Schema
	list := "[" + r.body + "]"
	if object.Items != nil {
		object, list = *object.Items, r.body
	}
	for _, members := range decode[[]map[string]any](t, list) {
		for name, value := range members {
			want := "string"
			if _, isNumber := value.(json.Number); isNumber {
				want = "integer"
			}
			if object.Properties[name].Type != want { // "" if it is not there
				t.Fatalf("openapi.json has no %s %s of %s = %s", want, name, r.request, r.body)
			}
		}
	}
}

// wantError checks that a response is an Error with this status and message.
func (r reply) wantError(t testing.TB, status int, message string) reply {
	t.Helper()
	r.want(t, status)
	if got := decode[apiError](t, r.body).Message; got != message {
		t.Fatalf("%.500s has the message %q, want %q", r.request, got, message)
	}
	return r
}

// wantNew checks that a create got 201, and has added the animal with this id.
func (r reply) wantNew(t testing.TB, id int) reply {
	t.Helper()
	return r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "").
		wantHeader(t, "Location", fmt.Sprint("pets/", id))
}

// wantRepeat checks that a create got 201 and the first response, and has added nothing.
func (r reply) wantRepeat(t testing.TB, first reply) {
	t.Helper()
	r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "true").
		wantHeader(t, "Location", first.header.Get("Location")).wantBody(t, first.body)
}

// wantBody checks the whole body of a response.
func (r reply) wantBody(t testing.TB, want string) reply {
	t.Helper()
	if r.body != want {
		t.Fatalf("%.500s = %s, want %s", r.request, r.body, want)
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
	t.Cleanup(func() { must(t, s.close()) })
	s.server = newServer(routes(st, keys), log.logger())
	s.client.transport = inProcess{s.server, t.Name()}
	return s
}

// pragma runs a PRAGMA on the connection that stores animals.
func (s *service) pragma(t testing.TB, pragma string) {
	t.Helper()
	_, err := s.writer.Exec("PRAGMA " + pragma)
	must(t, err)
}

// registerSQL adds three SQL functions to SQLite: sleep_1s sleeps for a second and is true, fail
// returns an error, and panic_now panics.
func registerSQL() {
	for name, f := range map[string]func() error{
		"sleep_1s":  func() error { time.Sleep(time.Second); return nil },
		"fail":      func() error { return errors.New("a mistake") },
		"panic_now": func() error { panic("a mistake") },
	} {
		sqlite.MustRegisterScalarFunction(name, 0,
			func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) { return int64(1), f() })
	}
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

// Helpers: connections in memory.

// memoryService is a service that serves connections in memory.
type memoryService struct {
	*service
	listener *memoryListener
	stop     func() // stops the service, and returns when it has ended
}

// inMemory calls t.Parallel, and runs a test on a service that serves connections in memory.
// The clock is that of testing/synctest: it stands still while anything runs.
func inMemory(t *testing.T, test func(t *testing.T, s *memoryService)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &memoryService{
			service:  newService(t),
			listener: &memoryListener{conns: make(chan net.Conn)},
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := s.serve(ctx, s.listener); err != nil {
				t.Errorf("serve = %v", err)
			}
		}()
		s.stop = func() {
			cancel()
			<-ended
		}
		t.Cleanup(func() {
			s.stop() // again, if the test has stopped it: that changes nothing
			// Let a fake minute pass, in which net/http closes the connections and ends their
			// goroutines: synctest would fail if one was left.
			time.Sleep(time.Minute)
		})

		test(t, s)
	})
}

// beginStop begins to stop the service, which must then refuse new connections. It returns the
// time.
func (s *memoryService) beginStop(t *testing.T) time.Time {
	t.Helper()
	go s.stop()
	synctest.Wait()
	if !s.listener.closed.Load() {
		t.Fatal("the service accepts connections during the stop")
	}
	return time.Now()
}

// wantStopped waits for the end of a stop, and checks how long it took. It may take some 500 ms
// more, because net/http looks at the connections only now and then.
func (s *memoryService) wantStopped(t *testing.T, begun time.Time, want time.Duration) {
	t.Helper()
	s.stop()
	if took := time.Since(begun); took < want || took > want+600*time.Millisecond {
		t.Fatalf("the stop took %v, want %v", took, want)
	}
}

// dial opens a connection, which is closed at the end of the test.
func (s *memoryService) dial(t *testing.T) *conn {
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close() })
	s.listener.conns <- theirs
	return &conn{ours, bufio.NewReader(ours)}
}

// conn is a client's end of a connection. A Write returns when the service has read all of it.
type conn struct {
	net.Conn
	reader *bufio.Reader
}

func (c *conn) send(t *testing.T, text string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	must(t, err)
}

// receive reads a response. It does not know the request, so want does not look into openapi.json.
func (c *conn) receive(t *testing.T) reply {
	t.Helper()
	resp, err := http.ReadResponse(c.reader, nil)
	must(t, err)
	if resp.Close { // http.ReadResponse has taken the header away
		resp.Header.Set("Connection", "close")
	}
	return newReply("a request on a connection", resp, nil)
}

// receiveAll reads until the service closes the connection.
func (c *conn) receiveAll() string {
	received, _ := io.ReadAll(c.reader)
	return string(received)
}

// wantClosed checks that the service has closed the connection.
func (c *conn) wantClosed(t *testing.T) {
	t.Helper()
	begun := time.Now()
	if got := c.receiveAll(); got != "" || time.Since(begun) > time.Second {
		t.Fatalf("received %q after %v, want a closed connection", got, time.Since(begun))
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
	if conn == nil {
		return nil, syscall.EMFILE
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

// Helpers: the program as a process.

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

// start starts the program with a database file, an environment and more args, and waits until it
// serves. The program is killed at the end of the test: t.Context ends then, before the cleanups.
func start(t testing.TB, file string, e env, args ...string) *process {
	t.Helper()
	args = append([]string{"-addr", "127.0.0.1:0", "-db", file}, args...)
	p := &process{
		cmd:   exec.CommandContext(t.Context(), os.Args[0], args...),
		ended: make(chan struct{}),
	}
	p.transport = &http.Transport{MaxIdleConnsPerHost: 16} // one for each client of a test
	p.cmd.Env = []string{"ANIMALSTORE_PROCESS=1"}
	for name, value := range e {
		p.cmd.Env = append(p.cmd.Env, name+"="+value)
	}
	_, err := p.cmd.StdinPipe() // see TestMain
	must(t, err)
	stderr, err := p.cmd.StderrPipe()
	must(t, err)
	p.stderr = stderr
	must(t, p.cmd.Start())

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

// lock takes the write lock of a database, until unlock is called.
func lock(t testing.TB, file string) (unlock func()) {
	t.Helper()
	db := connect(t, file)
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(t, err)
	return func() { db.Close() } // ends the transaction
}

// lockFor takes the write lock of a database, and returns. The lock ends after d.
func lockFor(t testing.TB, file string, d time.Duration) {
	t.Helper()
	unlock := lock(t, file)
	time.AfterFunc(d, unlock)
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
