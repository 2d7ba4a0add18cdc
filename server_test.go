package main

import (
	"bufio"
	"bytes"
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

// Most tests send requests to the handler of a service, which runs in the process of the test and
// has its own database file. SQL that a test runs on this file stands for another program. want
// checks the status of a response, the words that its headers, an empty line and its body must
// contain, and, after a "!", those that they must not:
//
//	s := newService(t)
//	execSQL(t, s.file, "INSERT INTO pets (name, category_id) VALUES ('Rex', 7)")
//	s.do("GET /v1/pets", "").want(t, 200, `"name":"Rex"`, "!Link:")
//
// In tests of time, the service listens in memory, under the fake clock of testing/synctest. Tests
// of signals and kills run the program as a process: see start.
//
// want also checks the rules for all responses, and that openapi.json has a response of this
// status. The helpers stand at the end of this file.

// TestMain runs the tests. In a process that a test has started, it runs the program instead.
func TestMain(m *testing.M) {
	registerHooks()
	if os.Getenv("ANIMALSTORE_PROCESS") != "" {
		go func() {
			io.Copy(io.Discard, os.Stdin) // ends when the test process does
			os.Exit(1)
		}()
		main()
	}
	os.Exit(m.Run())
}

// Requests that add an animal.
const (
	rex = `{"name":"Rex","categoryId":7}`
	zoe = `{"name":"Zoe","categoryId":13}`
)

// What messages say about invalid values.
const (
	limitRule  = "limit must be an integer from 1 to 100"
	afterRule  = "after must be the last id of a page, an integer from 0 to 9223372036854775807"
	statusRule = "status must be one of available, pending, sold"
	nameRule   = "name must be a string of 1 to 255 characters, not all white space, " +
		"without U+0000, U+FFFD or unpaired surrogates"
	categoryRule = "categoryId must be an integer from -9223372036854775808 to 9223372036854775807, " +
		"with no fraction, exponent or quotes"
	keyRule = "Idempotency-Key must be one value of 1 to 255 visible ASCII characters"
)

// TestInterface sends each request alone to a service that has Rex, Tom and Mia, no animal 4, and
// the animals 5 to 25, which are sold.
func TestInterface(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, `INSERT INTO pets (name, category_id, status)
		VALUES ('Rex', 7, 'available'), ('Tom', -8, 'sold'), ('Mia', 0, 'pending')`)
	addPets(t, s.file, 22)
	execSQL(t, s.file, "DELETE FROM pets WHERE id = 4")

	const (
		// Animals, and numbers.
		first    = `{"id":1,"name":"Rex","categoryId":7,"status":"available"}`
		second   = `{"id":2,"name":"Tom","categoryId":-8,"status":"sold"}`
		third    = `{"id":3,"name":"Mia","categoryId":0,"status":"pending"}`
		maxInt   = "9223372036854775807"
		tooLarge = "9223372036854775808"

		// Headers of requests.
		noKey    = "Authorization:"
		wrongKey = "Authorization: Bearer wrong"
		text     = "Content-Type: text/plain"
		badKey   = "Idempotency-Key: a b"

		// Headers of responses.
		challenge = "Www-Authenticate: Bearer realm=\"animalstore\"\r\n"
		invalid   = `Www-Authenticate: Bearer realm="animalstore", error="invalid_token"`
		sunset    = "Sunset: Thu, 05 Dec 2030 00:00:00 GMT"
		successor = `Link: <../pets>; rel="successor-version"`
		readOnly  = "Allow: GET, HEAD\r\n"

		// Messages.
		malformed = "the query string is malformed"
		noObject  = "the body must be one JSON object"
		unknown   = `unknown member \"`
		noAnimal  = "there is no animal with this id"
		typeRule  = `"Content-Type must be application/json, not \"`
	)
	dogs, long := strings.Repeat("🐶", 255), strings.Repeat("é", 256)
	largest := rex + strings.Repeat(" ", 64<<10-len(rex))

	type row struct {
		name    string
		request string   // the method and the target
		headers []string // see newRequest
		body    string
		status  int
		words   []string // see want
	}
	call := func(name, request string, status int, words ...string) row {
		return row{name: name, request: request, status: status, words: words}
	}
	get := func(name, suffix string, status int, words ...string) row {
		return call(name, "GET /v1/pets"+suffix, status, words...)
	}
	post := func(name, body string, status int, words ...string) row {
		return row{name: name, request: "POST /v1/pets", body: body, status: status, words: words}
	}
	with := func(r row, headers ...string) row {
		r.headers = headers
		return r
	}
	rows := []row{
		// GET /v1/pets.
		get("lists by id", "?limit=3", 200,
			"\r\n["+first+","+second+","+third+"]\n", `Link: <pets?after=3&limit=3>; rel="next"`),
		get("lists 20 by default", "", 200,
			`"id":21,`, `!"id":22,`, `Link: <pets?after=21>; rel="next"`),
		get("lists 1", "?limit=1", 200, "\r\n["+first+"]\n"),
		get("lists 100", "?limit=100", 200, `"id":25,`, "!Link:"),
		get("lists exactly all", "?limit=24", 200, `"id":25,`, "!Link:"),
		get("filters by status", "?status=pending", 200, "\r\n["+third+"]\n", "!Link:"),
		get("links to the next page of a status", "?limit=2&status=sold&after=1", 200,
			second, `"id":5,`, `Link: <pets?after=5&limit=2&status=sold>; rel="next"`),
		get("lists after an id", "?after=24", 200, "[{\"id\":25,"),
		get("lists after 0", "?after=0&limit=1", 200, first),
		get("lists nothing", "?after="+maxInt, 200, "\r\n[]\n", "!Link:"),
		get("decodes the query", "?st%61tus=pend%69ng", 200, third),
		with(get("ignores other headers", "", 200),
			"Accept: text/html", text, "If-None-Match: *", "Range: bytes=0-3", badKey),
		call("answers HEAD", "HEAD /v1/pets?limit=1", 200, "Link: <pets?after=1&limit=1>"),

		get("limit is too small", "?limit=0", 400, limitRule),
		get("limit is too large", "?limit=101", 400, limitRule),
		get("limit is not an int64", "?limit="+tooLarge, 400, limitRule),
		get("limit has a sign", "?limit=%2B5", 400, limitRule),
		get("limit has a zero in front", "?limit=05", 400, limitRule),
		get("limit is empty", "?limit=", 400, limitRule),
		get("status is in capitals", "?status=SOLD", 400, statusRule),
		get("status is empty", "?status=", 400, statusRule),
		get("after is negative", "?after=-1", 400, afterRule),
		get("after is not an int64", "?after="+tooLarge, 400, afterRule),
		get("after is -0", "?after=-0", 400, afterRule),
		get("a parameter is repeated", "?limit=5&limit=5", 400,
			`"message":"\"limit\" must not be repeated"`),
		get("a parameter is unknown", "?Limit=5", 400, `unknown parameter \"Limit\"`),
		get("a semicolon separates", "?limit=5;after=1", 400, malformed),
		get("an escape is malformed", "?status=%zz", 400, malformed),
		get("several faults", "?limit=0&status=x&a=1&after=x", 400,
			`"`+`unknown parameter \"a\"; `+afterRule+"; "+limitRule+"; "+statusRule+`"`),
		get("ten faults", "?a&b&c&d&e&f&g&h&i&j", 400, `unknown parameter \"j\""`),
		get("twelve faults", "?a&b&c&d&e&f&g&h&i&j&k&l", 400,
			`unknown parameter \"j\""`),
		get("a long parameter is cut", "?"+strings.Repeat("x", 5000), 400,
			`unknown parameter \"`+strings.Repeat("x", 64)+`\"`),

		// POST /v1/pets. FuzzCreatePet has more valid bodies.
		post("adds", rex, 201,
			`,"name":"Rex","categoryId":7,"status":"available"}`+"\n", "!Idempotency-Replayed"),
		post("adds with a status", `{"status":"pending","categoryId":-1,"name":"<&>"}`, 201,
			`"name":"<&>","categoryId":-1,"status":"pending"}`),
		{name: "ignores the query", request: "POST /v1/pets?limit=x&a;b&%zz", body: rex,
			status: 201},
		with(post("ignores a charset", rex, 201),
			`Content-Type: Application/JSON; charset="utf-16"`),
		post("accepts 255 characters", `{"name":"`+dogs+`","categoryId":`+maxInt+"}", 201,
			`"name":"`+dogs+`","categoryId":`+maxInt+","),
		post("accepts escapes", `{"n\u0061me":"\ud83d\udc36\"\/","categoryId":-9223372036854775808}`,
			201, `"name":"🐶\"/","categoryId":-9223372036854775808,`),
		post("accepts 64 KiB", largest, 201),
		with(post("accepts a long Idempotency-Key", rex, 201),
			"Idempotency-Key: !"+strings.Repeat("~", 254)),

		post("no body", "", 400, noObject),
		post("null", "null", 400, noObject),
		post("an array", "["+rex+"]", 400, noObject),
		post("not the end", `{"name":"x","categoryId":1 `, 400, noObject),
		post("a comma too many", `{"name":"x","categoryId":1,}`, 400, noObject),
		post("two objects", rex+rex, 400, noObject),
		post("not UTF-8", "{\"name\":\"\xff\",\"categoryId\":1}", 400, "must be UTF-8"),
		post("no members", "{}", 400, "name is required; categoryId is required"),
		post("no name", `{"categoryId":1}`, 400, `"name is required"`),
		post("name in capitals", `{"Name":"x","categoryId":1}`, 400,
			unknown+`Name\"; name is required`),
		post("name is null", `{"name":null,"categoryId":1}`, 400, nameRule),
		post("name is a number", `{"name":1,"categoryId":1}`, 400, nameRule),
		post("name is empty", `{"name":"","categoryId":1}`, 400, nameRule),
		post("name is white space", `{"name":" \u00a0\u2003\u3000\u0085","categoryId":1}`, 400,
			nameRule),
		post("name has NUL", `{"name":"a\u0000b","categoryId":1}`, 400, nameRule),
		post("name has U+FFFD", `{"name":"a\uFFFDb","categoryId":1}`, 400, nameRule),
		post("name has half a pair", `{"name":"\ud83d","categoryId":1}`, 400, nameRule),
		post("name is too long", `{"name":"`+long+`","categoryId":1}`, 400, nameRule),
		post("no categoryId", `{"name":"x"}`, 400, `"categoryId is required"`),
		post("categoryId is null", `{"name":"x","categoryId":null}`, 400, categoryRule),
		post("categoryId is quoted", `{"name":"x","categoryId":"1"}`, 400, categoryRule),
		post("categoryId is 1.0", `{"name":"x","categoryId":1.0}`, 400, categoryRule),
		post("categoryId is 1e2", `{"name":"x","categoryId":1e2}`, 400, categoryRule),
		post("categoryId is -0", `{"name":"x","categoryId":-0}`, 400, categoryRule),
		post("categoryId is not an int64", `{"name":"x","categoryId":`+tooLarge+"}", 400,
			categoryRule),
		post("status is null", `{"name":"x","categoryId":1,"status":null}`, 400, statusRule),
		post("status is unknown", `{"name":"x","categoryId":1,"status":"lost"}`, 400, statusRule),
		post("an id", `{"id":5,"name":"x","categoryId":1}`, 400, unknown+`id\"`),
		post("a repeated member", `{"name":"x","n\u0061me":"y","categoryId":1}`, 400,
			`"\"name\" must not be repeated"`),
		post("a long member is cut", `{"`+long+`":1,"name":"x","categoryId":1}`, 400,
			unknown+long[:128]+`\""`),
		post("several faults of a body", `{"status":1,"name":1,"x":{"name":2},"categoryId":[]}`,
			400, `"`+statusRule+"; "+nameRule+"; "+unknown+`x\"; `+categoryRule+`"`),
		with(post("an Idempotency-Key is too long", rex, 400, keyRule),
			"Idempotency-Key: "+strings.Repeat("x", 256)),
		with(post("an Idempotency-Key is empty", rex, 400, keyRule), "Idempotency-Key: "),
		with(post("an Idempotency-Key is not ASCII", rex, 400, keyRule), "Idempotency-Key: é"),
		with(post("two Idempotency-Keys", rex, 400, keyRule),
			"Idempotency-Key: a", "Idempotency-Key: a"),
		post("more than 64 KiB", largest+" ", 413, "larger than 65536 bytes"),
		with(post("Content-Type is text", rex, 415, typeRule+`text/plain\""`), text),
		with(post("Content-Type is empty", rex, 415, typeRule+`\""`), "Content-Type: "),
		with(post("two Content-Types", rex, 415, typeRule),
			"Content-Type: application/json", "Content-Type: application/json"),
		with(post("Content-Type is malformed", rex, 415, typeRule),
			"Content-Type: application/json; x"),
		with(post("Content-Type is long", rex, 415, typeRule+strings.Repeat("x", 64)+`\""`),
			"Content-Type: "+strings.Repeat("x", 99)),

		// GET /v1/pets/{petId}.
		get("gets", "/2", 200, "\r\n"+second+"\n", sunset, successor),
		get("gets with a query", "/1?limit=x&a;b", 200, first),
		call("answers HEAD of one", "HEAD /v1/pets/1", 200, sunset, successor),
		get("no such animal", "/999", 404, noAnimal, sunset, successor),
		get("an animal that was deleted", "/4", 404),
		get("id is 0", "/0", 404, noAnimal),
		get("id is the least", "/-9223372036854775808", 404, noAnimal),
		get("id is not an int64", "/"+tooLarge, 404, noAnimal),
		get("id has a zero in front", "/01", 404, noAnimal),
		get("id has a sign", "/+1", 404, noAnimal),
		get("id is a name", "/Rex", 404, noAnimal, sunset, successor),
		with(get("gets without a key", "/1", 401, sunset, successor), noKey),

		// Other paths and methods.
		call("orders", "GET /v1/store/orders", 404, "there is nothing at this path"),
		call("no version", "GET /pets", 404, "there is nothing at this path"),
		call("a slash at the end", "GET /v1/pets/", 404),
		call("two slashes", "GET //v1/pets", 404),
		call("a dot", "GET /v1/./pets", 404),
		call("an escaped slash", "GET /v1%2Fpets", 404),
		call("an id with an escaped slash", "GET /v1/pets/1%2F", 404),
		call("deletes all", "DELETE /v1/pets", 405, "Allow: GET, HEAD, POST\r\n"),
		call("deletes one", "DELETE /v1/pets/1", 405, readOnly),
		call("posts to one", "POST /v1/pets/x", 405, readOnly),
		call("OPTIONS", "OPTIONS /v1/pets", 405),
		with(call("health", "GET /healthz", 200, "\r\n{\"status\":\"ok\"}\n"), noKey),
		with(call("HEAD of health", "HEAD /healthz", 200), noKey),
		with(call("the document", "GET /openapi.json", 200, "\r\n"+string(openAPI)), noKey),
		call("posts to health", "POST /healthz", 405, readOnly),
		call("posts to the document", "POST /openapi.json", 405, readOnly),
		with(call("health needs a key for other methods", "POST /healthz", 401), noKey),
		with(call("the document, too", "POST /openapi.json", 401), noKey),

		// API keys.
		with(get("another key", "", 200), "Authorization: Bearer "+otherKey),
		with(get("the scheme in capitals", "", 200), "Authorization: BEARER  "+testKey),
		with(get("no key", "", 401, challenge, "Authorization: Bearer API_KEY",
			"GET /openapi.json", "!Sunset"), noKey),
		with(get("no scheme", "", 401, challenge), "Authorization: "+testKey),
		with(get("another scheme", "", 401, challenge), "Authorization: Basic "+testKey),
		with(get("an empty token", "", 401, challenge), "Authorization: Bearer  "),
		with(get("two headers", "", 401, challenge),
			"Authorization: Bearer "+testKey, "Authorization: Bearer "+testKey),
		with(get("a wrong key", "", 401, invalid), wrongKey),
		with(get("a part of a key", "", 401, invalid), "Authorization: Bearer test"),
		with(get("two keys", "", 401, invalid),
			"Authorization: Bearer "+testKey+","+otherKey),
		with(call("an unknown path without a key", "GET /v1/store/orders", 401), noKey),
		with(call("an unclean path without a key", "GET //v1/pets", 401), noKey),
		with(call("a wrong method without a key", "DELETE /v1/pets", 401, "!Allow:"), noKey),

		// The order of faults: each row lacks the fault that the row above was answered for.
		with(call("first the key", "PATCH /v1/dogs", 401), wrongKey, text, badKey),
		with(call("then the path", "PATCH /v1/dogs", 404), text, badKey),
		with(call("then the method", "PATCH /v1/pets", 405), text, badKey),
		with(post("then the type", largest+" ", 415), text, badKey),
		with(post("then the Idempotency-Key", largest+" ", 400, keyRule), badKey),
		post("then the size", "["+largest+" ", 413),
		post("then the body", "["+rex, 400, "!Location:"),
	}
	stored := 24
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			s.do(row.request, row.body, row.headers...).want(t, row.status, row.words...)
			if row.status == 201 {
				stored++
			}
		})
	}
	wantSQL(t, s.file, "SELECT count(*) FROM pets", strconv.Itoa(stored))
}

// TestPaging follows the links from page to page as a client does behind a proxy that strips /shop,
// while animals are added and deleted. Each one that was there at the start must be listed once.
func TestPaging(t *testing.T) {
	t.Parallel()
	s := newService(t)
	addPets(t, s.file, 30)

	var ids []int64
	next := "/v1/pets?limit=4&status=sold"
	for next != "" {
		a := s.do("GET "+next, "").want(t, 200)
		for _, p := range decode[[]Pet](t, a) {
			ids = append(ids, p.ID)
		}
		s.do("POST /v1/pets", `{"name":"late","categoryId":1,"status":"sold"}`).want(t, 201)
		// With OFFSET, this would shift the next page.
		execSQL(t, s.file, "DELETE FROM pets WHERE id = ?", ids[len(ids)-1])

		link, _, _ := strings.Cut(strings.TrimPrefix(a.header.Get("Link"), "<"), ">")
		next = ""
		if link != "" {
			next = resolve(t, a, link)
		}
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

// TestReferences resolves the references in other headers, as the client of TestPaging does.
func TestReferences(t *testing.T) {
	t.Parallel()
	s := newService(t)

	created := s.do("POST /v1/pets", rex).want(t, 201)
	location := resolve(t, created, created.header.Get("Location"))
	got := s.do("GET "+location, "").want(t, 200)
	got.wantBody(t, created.body)
	if list := resolve(t, got, "../pets"); location != "/v1/pets/1" || list != "/v1/pets" {
		t.Fatalf("the references lead to %s and %s, want /v1/pets/1 and /v1/pets", location, list)
	}
}

// resolve resolves a reference in a response (RFC 3986), and returns the target that a proxy which
// strips /shop requests for it.
func resolve(t *testing.T, a reply, reference string) string {
	t.Helper()
	_, target, _ := strings.Cut(a.request, " ")
	base, err := url.Parse("https://example.com/shop" + target)
	must(t, err)
	resolved, err := base.Parse(reference)
	must(t, err)
	return strings.TrimPrefix(resolved.RequestURI(), "/shop")
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const post, key = "POST /v1/pets", "Idempotency-Key: k"
	const replayed, notReplayed = "Idempotency-Replayed: true", "!Idempotency-Replayed"
	const ofAnother = "Authorization: Bearer " + otherKey

	s.do(post, `{"name":1}`, key).want(t, 400) // uses up no key
	first := s.do(post, rex, key).want(t, 201, notReplayed)
	s.do(post, rex).want(t, 201, notReplayed)
	s.do(post, rex, "Idempotency-Key: K").want(t, 201, notReplayed)
	s.do(post, rex, key, ofAnother).want(t, 201, `"id":4,`, notReplayed)
	s.do(post, rex, "Idempotency-Key: old").want(t, 201, `"id":5,`)

	// A repeat with the same animal: also if that was edited or deleted since, and after a restart.
	for _, edit := range []string{
		"SELECT 'no edit'", "UPDATE pets SET name = 'x', status = 'sold'", "DELETE FROM pets WHERE id = 1",
	} {
		execSQL(t, s.file, edit)
		must(t, s.close())
		s = openService(t, s.file)
		same := [2]string{rex, `{"status":"available","categoryId":7,"n\u0061me":"Rex"}`}
		for _, body := range same {
			again := s.do(post, body, key).want(t, 201, "Location: pets/1\r\n", replayed)
			again.wantBody(t, first.body)
		}
	}

	// The same key with another animal.
	for _, other := range []string{
		`{"name":"rex","categoryId":7}`,
		`{"name":"Rex","categoryId":8}`,
		`{"name":"Rex","categoryId":7,"status":"sold"}`,
	} {
		s.do(post, other, key).want(t, 422, "!Location", notReplayed)
	}
	s.do(post, `{"name":1}`, key).want(t, 400)

	// A key expires after 24 hours. Each create with a key deletes two that have expired.
	age := func(d time.Duration) {
		execSQL(t, s.file, "UPDATE idempotency_keys SET created = created - ?", int(d.Seconds()))
	}
	const keys = "SELECT group_concat(key ORDER BY key) FROM idempotency_keys"
	age(24*time.Hour - time.Minute)
	s.do(post, rex, "Idempotency-Key: late").want(t, 201, `"id":6,`)
	wantSQL(t, s.file, keys, "K,k,k,late,old") // k of two callers
	s.do(post, rex, key).want(t, 201, replayed)
	age(2 * time.Minute)
	s.do(post, rex, key).want(t, 201, `"id":7,`, notReplayed)
	s.do(post, rex, key).want(t, 201, `"id":7,`, replayed)
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "3") // k, late, and one that has expired
	s.do(post, rex, "Idempotency-Key: new").want(t, 201)
	wantSQL(t, s.file, keys, "k,late,new")
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "7")
}

// TestBatches adds animals to a locked database, so that many of them share a transaction. An
// animal that is refused must not keep the others from being stored.
func TestBatches(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, `INSERT INTO pets (name, category_id) VALUES ('Zoe', 13);
		CREATE UNIQUE INDEX one_of_13 ON pets (category_id) WHERE category_id = 13`)
	logSize := fileSize(t, s.file+"-wal")

	// Each of 20 clients sends four requests at once: two with the same key, one that is refused,
	// and one without a key.
	var replies [20][4]reply
	var sent, started sync.WaitGroup
	unlock := lock(t, s.file)
	for i := range replies {
		key := fmt.Sprint("Idempotency-Key: ", i)
		for j, r := range [4]*http.Request{
			newRequest("POST /v1/pets", strings.NewReader(rex), key),
			newRequest("POST /v1/pets", strings.NewReader(rex), key),
			newRequest("POST /v1/pets", strings.NewReader(zoe), key+"-zoe"),
			newRequest("POST /v1/pets", strings.NewReader(rex)),
		} {
			started.Add(1)
			sent.Go(func() {
				started.Done()
				replies[i][j] = s.send(r)
			})
		}
	}
	started.Wait()
	unlock()
	sent.Wait()

	for _, r := range replies {
		first, same := r[0], r[1]
		if first.header.Get("Idempotency-Replayed") != "" {
			first, same = same, first
		}
		first.want(t, 201, "!Idempotency-Replayed")
		same.want(t, 201, "Idempotency-Replayed: true").wantBody(t, first.body)
		r[2].want(t, 400, "a rule in the database of the shop refuses this animal", "!UNIQUE")
		r[3].want(t, 201, `"name":"Rex"`)
	}
	s.log.want(t, "UNIQUE constraint failed")
	wantSQL(t, s.file, "SELECT count(*) FROM pets WHERE name = 'Rex'", "40")
	wantSQL(t, s.file, "SELECT count(*) FROM pets JOIN idempotency_keys USING (id, name)", "20")
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "20")

	const alone = 40 * 3 * 4096 // bytes: a commit for each animal would write at least 3 pages
	if grown := fileSize(t, s.file+"-wal") - logSize; grown > alone/2 {
		t.Fatalf("the write-ahead log has grown by %d bytes, want at most %d", grown, alone/2)
	}
}

// TestClientThatIsGone sends requests whose client has closed the connection.
func TestClientThatIsGone(t *testing.T) {
	t.Parallel()
	s := newService(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()

	s.send(newRequest("POST /v1/pets", strings.NewReader(rex)).WithContext(gone)).want(t, 201)
	for _, received := range []string{"", rex} {
		body := io.MultiReader(strings.NewReader(received), iotest.ErrReader(io.ErrUnexpectedEOF))
		s.send(newRequest("POST /v1/pets", body)).want(t, 400, "could not be read to its end")
	}
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "1")
}

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
				`error="send a valid API key, in one header Authorization: Bearer API_KEY; ` +
				`GET /openapi.json describes this interface"`,
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
		a := s.do(c.request, "", c.headers...).want(t, c.status, "!no such table")

		level := "INFO"
		if c.status == 500 {
			level = "ERROR"
		}
		_, got, _ := strings.Cut(strings.TrimSpace(s.log.String()[before:]), " ") // after the time
		got = regexp.MustCompile(`duration=[0-9.µm]+s`).ReplaceAllString(got, "duration=D")
		want := "level=" + level + " msg=request id=" + a.header.Get("X-Request-Id") +
			" client=192.0.2.1:1234 " + c.want
		if got != want {
			t.Fatalf("%.50s logged\n%s, want\n%s", c.request, got, want)
		}
	}
}

// TestRefusals runs the program with settings and databases that it must refuse, and with -h. It
// runs in a folder with a database of one animal. Nothing in that folder may change.
func TestRefusals(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { taken.Close() })
	const (
		noKey   = "API_KEYS: the list has no key"
		foreign = "not a database of this service: its application_id is 0"
		newer   = "a newer version of this service has written the database"
		noFile  = "unable to open database file (14)"
		orphan  = `animals.db-wal", but no database`
		damaged = "malformed (11)"
		exists  = `" exists already; name a new file`
	)
	nextVersion := fmt.Sprint("PRAGMA user_version = ", len(migrations)+1)
	rows := []struct {
		name   string
		args   []string // follow -addr 127.0.0.1:0 -db DIR/animals.db; DIR is the folder
		backup bool     // args are -backup DIR/copy.db
		env    env      // instead of API_KEYS=test-key
		shell  string   // is run in the folder before
		sql    string   // is run on the database after that
		status int
		words  string // in what the program writes
	}{
		{name: "an argument", args: []string{"x"}, status: 2, words: `unexpected argument "x"`},
		{name: "an unknown flag", args: []string{"-keys", "x"}, status: 2,
			words: "flag provided but not defined: -keys"},
		{name: "an empty -addr", args: []string{"-addr", ""}, status: 2,
			words: "-addr must not be empty"},
		{name: "an empty -db", args: []string{"-db", ""}, status: 2,
			words: "-db must not be empty"},
		{name: "an empty -backup", args: []string{"-backup", ""}, status: 2,
			words: "-backup must not be empty"},
		{name: "help", args: []string{"-h"}, status: 0, words: "-backup FILE"},
		{name: "the default address", args: []string{"-h"}, status: 0, words: `"127.0.0.1:8080"`},

		{name: "an address in use", args: []string{"-addr", taken.Addr().String()}, status: 1,
			words: "address already in use"},
		{name: "no keys for the network", args: []string{"-addr", ":0"}, env: env{}, status: 1,
			words: "API_KEYS is not set"},
		{name: "empty keys", env: env{"API_KEYS": ""}, status: 1, words: noKey},
		{name: "blank keys", env: env{"API_KEYS": " , "}, status: 1, words: noKey},
		{name: "a key with a space", env: env{"API_KEYS": "one, secret key"}, status: 1,
			words: "API_KEYS: item 2 must consist of visible ASCII"},
		{name: "a key that is not ASCII", env: env{"API_KEYS": ",,sécret"}, status: 1,
			words: "item 3 must"},

		{name: "no folder", args: []string{"-db", "DIR/none/a.db"}, status: 1, words: noFile},
		{name: "a folder", args: []string{"-db", "DIR"}, status: 1, words: noFile},
		{name: "no database", shell: "echo some text >animals.db", status: 1,
			words: "not a database (26)"},
		{name: "a truncated database", shell: "truncate -s 4096 animals.db", status: 1,
			words: damaged},
		{name: "another program's", sql: "PRAGMA application_id = 0", status: 1, words: foreign},
		{name: "another program's tables", shell: "rm animals.db", sql: "CREATE TABLE t (x)",
			status: 1, words: foreign},
		{name: "a version of nobody", sql: "PRAGMA user_version = 0", status: 1,
			words: "not a database of this service"},
		{name: "a newer database", sql: nextVersion, status: 1, words: newer},
		{name: "a log alone", shell: "mv animals.db animals.db-wal", status: 1, words: orphan},
		{name: "a log and an empty file", shell: "mv animals.db animals.db-wal; : >animals.db",
			status: 1, words: orphan},

		{name: "a backup of a log and an empty file", shell: "mv animals.db animals.db-wal; : >animals.db",
			backup: true, status: 1, words: orphan},
		{name: "a backup to a file", shell: ": >copy.db", backup: true, status: 1,
			words: exists},
		{name: "a backup to a link", shell: "ln -s none copy.db", backup: true, status: 1,
			words: exists},
		{name: "a backup beside an old log", shell: ": >copy.db-wal", backup: true, status: 1,
			words: "copy.db-wal" + exists},
		{name: "a backup beside an old journal", shell: ": >copy.db-journal", backup: true, status: 1,
			words: "copy.db-journal" + exists},
		{name: "a backup of nothing", shell: "rm animals.db", backup: true, status: 1,
			words: noFile},
		{name: "a backup of an empty file", shell: ": >animals.db", backup: true, status: 1,
			words: "the database is empty"},
		{name: "a backup of another program", sql: "PRAGMA application_id = 0", backup: true,
			status: 1, words: foreign},
		{name: "a backup of a newer database", sql: nextVersion, backup: true,
			status: 1, words: newer},
		{name: "a backup of a truncated database", shell: "truncate -s 4096 animals.db",
			backup: true, status: 1, words: damaged},
		{
			name:   "a backup with an animal that breaks a rule",
			sql:    "PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'",
			backup: true, status: 1, words: "the database is damaged: CHECK constraint failed in pets",
		},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			addPets(t, s.file, 1)
			must(t, s.close())
			dir := filepath.Dir(s.file)
			shell(t, dir, row.shell)
			if row.sql != "" {
				execSQL(t, s.file, row.sql)
			}
			args := []string{"-addr", "127.0.0.1:0", "-db", s.file}
			if row.backup {
				row.args = []string{"-backup", "DIR/copy.db"}
			}
			for _, arg := range row.args {
				args = append(args, strings.Replace(arg, "DIR", dir, 1))
			}
			if row.env == nil {
				row.env = env{"API_KEYS": testKey}
			}
			before := snapshot(t, dir)

			var stderr logBuffer
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // in case it starts
			defer cancel()
			status := run(ctx, args, row.env.lookup, &stderr)

			if status != row.status {
				t.Fatalf("status %d, want %d: %s", status, row.status, &stderr)
			}
			stderr.want(t, row.words, "!secret", "!sécret", "!"+testKey)
			oneLine := regexp.MustCompile("^animalstore: .*\n$").MatchString(stderr.String())
			usage := strings.Contains(stderr.String(), "Usage of animalstore:\n")
			if oneLine != (status == 1) || usage != (status != 1) {
				t.Fatalf("it wrote %s, want one line for status 1, and the usage otherwise", &stderr)
			}
			if after := snapshot(t, dir); after != before {
				t.Fatalf("it changed the files from\n%s to\n%s", before, after)
			}
		})
	}
}

// The database file.

func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", `ä"'`} {
		dir := t.TempDir()
		s := openService(t, filepath.Join(dir, name))
		s.log.want(t, `level=WARN msg="the database is new and empty"`)
		s.do("POST /v1/pets", rex).want(t, 201)
		must(t, s.close())

		wantFiles(t, dir, name)
		openService(t, s.file).log.want(t, "!new and empty")
	}
}

// TestSchema checks that the schema has the rules of the handlers, for edits by other programs.
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
	s.do("POST /v1/pets", rex).want(t, 201, `"id":4,`) // no id is used again
}

// TestPragmas lets a trigger tell the settings of the connection on which the service adds animals.
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

func TestMigration(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.do("POST /v1/pets", rex).want(t, 201)
	must(t, s.close())
	db := newPool(s.file, "rwc", 1)
	defer db.Close()
	const versionAndCategory = "SELECT user_version || ' ' || category_id FROM pragma_user_version, pets"
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

func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	unlock := lock(t, s.file)

	s.do("POST /v1/pets", rex, "Idempotency-Key: k").want(t, 503)
	s.log.want(t, "level=ERROR", "database is locked")
	s.do("GET /v1/pets", "").want(t, 200, "[]")
	s.do("GET /healthz", "").want(t, 200)

	unlock()
	s.do("POST /v1/pets", rex, "Idempotency-Key: k").want(t, 201, `"id":1,`, "!Idempotency-Replayed")
}

func TestFullDatabase(t *testing.T) {
	t.Parallel()
	s := openService(t, filepath.Join(t.TempDir(), hookedDatabase))
	large := `{"categoryId":1,"name":"` + strings.Repeat("x", 250) + `"}`

	created := 0
	for s.do("POST /v1/pets", large).status == 201 {
		created++
	}
	s.do("POST /v1/pets", large).want(t, 503, "!full")
	s.log.want(t, "level=ERROR", "database or disk is full")
	s.do("GET /v1/pets?limit=1", "").want(t, 200, "xxx")
	s.do("GET /healthz", "").want(t, 200)

	wantSQL(t, s.file, "SELECT count(*) FROM pets", strconv.Itoa(created))
	execSQL(t, s.file, "DELETE FROM pets")
	s.do("POST /v1/pets", rex).want(t, 201, fmt.Sprintf(`"id":%d,`, created+1))
}

// TestFailedCommit breaks a constraint that is checked only by the COMMIT.
func TestFailedCommit(t *testing.T) {
	t.Parallel()
	s := openService(t, filepath.Join(t.TempDir(), hookedDatabase))
	execSQL(t, s.file, `CREATE TABLE t (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER rule AFTER INSERT ON pets BEGIN INSERT INTO t VALUES (-1); END`)
	s.do("POST /v1/pets", rex).want(t, 500)
	wantSQL(t, s.file, "SELECT count(*) FROM pets", "0")

	execSQL(t, s.file, "DROP TRIGGER rule")
	s.do("POST /v1/pets", rex).want(t, 201)
}

// TestMovedDatabase moves the database of a running service, and stops the service. Then it opens
// what is at the old path as the next service would: its ids must be those of the field next.
func TestMovedDatabase(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, move string // a line of shell
		back       string // another one, run later
		next       string
	}{
		{name: "it is put back", move: "mv animals.db away", back: "mv away animals.db",
			next: "1,2,3"},
		{name: "it is not put back", move: "mv animals.db away", next: ""},
		{name: "it is deleted", move: "rm animals.db", next: ""},
		{name: "it is replaced", move: "mv animals.db away; cp backup animals.db", next: "1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			dir := filepath.Dir(s.file)
			s.do("POST /v1/pets", rex).want(t, 201)
			must(t, backup(t.Context(), s.file, dir+"/backup"))
			s.do("POST /v1/pets", rex).want(t, 201)

			// From now on, a list takes a second, so that several at once need several connections.
			execSQL(t, s.file, `ALTER TABLE pets RENAME TO slow;
				CREATE VIEW pets AS SELECT * FROM slow WHERE sleep() IS NULL`)

			shell(t, dir, c.move)
			s.do("POST /v1/pets", rex).want(t, 503)
			s.log.want(t, "level=ERROR", "the database is not in its place")
			s.do("GET /healthz", "").want(t, 503)
			var lists sync.WaitGroup
			replies := make([]reply, 4)
			for i := range replies {
				lists.Go(func() { replies[i] = s.do("GET /v1/pets", "") })
			}
			lists.Wait()
			for _, a := range replies {
				a.want(t, 200, `"id":2,`)
			}

			shell(t, dir, c.back)
			if c.back != "" {
				s.do("GET /healthz", "").want(t, 200)
				execSQL(t, s.file, "DROP VIEW pets; ALTER TABLE slow RENAME TO pets")
				s.do("POST /v1/pets", rex).want(t, 201)
			}
			must(t, s.close())

			if strings.HasPrefix(c.move, "mv") && c.back == "" {
				wantSQL(t, dir+"/away", "SELECT count(*) FROM slow", "2")
			}
			must(t, openService(t, s.file).close())
			wantSQL(t, s.file, "SELECT coalesce(group_concat(id ORDER BY id), '') FROM pets", c.next)
			wantSQL(t, s.file, "PRAGMA integrity_check", "ok")
		})
	}
}

func TestBackup(t *testing.T) {
	t.Parallel()
	s := newService(t)
	target := filepath.Join(t.TempDir(), "copy.db")
	s.do("POST /v1/pets", rex, "Idempotency-Key: k").want(t, 201)
	list := s.do("GET /v1/pets", "").want(t, 200)
	args := []string{"-db", s.file, "-backup", target}
	var stderr logBuffer

	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if status := run(interrupted, args, os.LookupEnv, &stderr); status != 1 {
		t.Fatalf("an interrupted -backup = %d, want 1", status)
	}
	wantFiles(t, filepath.Dir(target))

	if status := run(t.Context(), args, os.LookupEnv, io.Discard); status != 0 {
		t.Fatalf("-backup = %d, want 0", status)
	}
	wantFiles(t, filepath.Dir(target), "copy.db")
	copied := openService(t, target)
	copied.do("GET /v1/pets", "").want(t, 200).wantBody(t, list.body)
	copied.do("POST /v1/pets", rex, "Idempotency-Key: k").want(t, 201, "Idempotency-Replayed: true")
	copied.do("POST /v1/pets", rex).want(t, 201, `"id":2,`)
}

// TestFailedReads fails more reads than there are connections. One that is not given back would be
// missing later.
func TestFailedReads(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, id, cause string }{
		{name: "an error", id: "abs(-9223372036854775808)", cause: "integer overflow"},
		{name: "another type", id: "'x'", cause: "converting driver.Value type string"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newService(t)
			execSQL(t, s.file, "ALTER TABLE pets RENAME TO old; CREATE VIEW pets AS "+
				"SELECT "+c.id+" AS id, 'x' AS name, 1 AS category_id, 'sold' AS status")
			for range 4 + runtime.GOMAXPROCS(0) {
				s.do("GET /v1/pets", "").want(t, 500, "internal error", "!"+c.cause)
			}
			s.do("GET /v1/pets?status=sold", "").want(t, 500)
			s.do("GET /v1/pets/1", "").want(t, 500, "Sunset: ")
			s.log.want(t, "level=ERROR", c.cause)
			s.do("GET /healthz", "").want(t, 503)

			execSQL(t, s.file, "DROP VIEW pets; ALTER TABLE old RENAME TO pets")
			s.do("GET /v1/pets", "").want(t, 200, "[]")
		})
	}
}

// Connections, under a fake clock.

// Requests as they are sent. That of a create lacks its body.
const (
	rawList   = "GET /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\n\r\n"
	rawCreate = "POST /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey +
		"\r\nContent-Length: 29\r\n\r\n"
)

func TestConnections(t *testing.T) {
	t.Parallel()
	request := func(line string, headers ...string) string {
		return line + "\r\nHost: x\r\n" + strings.Join(headers, "\r\n") + "\r\n\r\n"
	}
	body := func(size int) string { return strings.Repeat("x", size) }
	const (
		put      = "PUT /v1/pets HTTP/1.1"
		closing  = "Connection: close"
		document = "GET /openapi.json HTTP/1.1"
	)
	for _, c := range []struct {
		name   string
		sent   string
		later  string        // is sent each second after that
		pause  time.Duration // before the client begins to read
		words  []string      // in what it receives
		unread bool          // the service does not read all that is sent
		closed time.Duration // when the service closes the connection
	}{
		{name: "nothing is sent", closed: 5 * time.Second},
		{name: "the headers end early", sent: "GET /v1/pets HT", closed: 5 * time.Second},
		{name: "the headers are slow", sent: "GET / HTTP/1.1\r\n", later: "X: x\r\n", unread: true,
			closed: 5 * time.Second},
		{name: "the body is slow", sent: rawCreate, later: " ",
			words: []string{"request_timeout", "within 10 seconds"}, unread: true, closed: 10 * time.Second},
		{name: "no other request follows", sent: rawList, words: []string{"\r\n\r\n[]\n"},
			closed: 150 * time.Second},
		{name: "the response is read late", sent: request(document, closing),
			pause: 24 * time.Second, words: []string{string(openAPI)}, closed: 24 * time.Second},
		{name: "the response is read too late", sent: request(document, closing),
			pause: 26 * time.Second, words: []string{"!" + string(openAPI)},
			closed: 26 * time.Second},
		{name: "HEAD", sent: request("HEAD /healthz HTTP/1.1", closing),
			words: []string{"Content-Length: 16\r\n", "!{"}},
		{name: "OPTIONS *", sent: request("OPTIONS * HTTP/1.1", closing),
			words: []string{"HTTP/1.1 401 "}},
		{name: "15 KiB of headers",
			sent:  request("GET /healthz HTTP/1.1", closing, "X: "+body(15<<10)),
			words: []string{"HTTP/1.1 200 "}},
		{name: "17 KiB of headers",
			sent:  request("GET /healthz HTTP/1.1", closing, "X: "+body(17<<10)),
			words: []string{"HTTP/1.1 431 "}, unread: true},

		// A client that sends all of its body first must get the response.
		{name: "a refused body",
			sent:  request(put, closing, "Content-Length: 1000000") + body(1000000),
			words: []string{"HTTP/1.1 401 "}},
		{name: "a refused body of HTTP/1.0",
			sent:  request("PUT / HTTP/1.0", "Content-Length: 1000000") + body(1000000),
			words: []string{"HTTP/1.0 401 "}},
		{name: "a refused body on a connection that stays",
			sent:  request(put, "Content-Length: 1000000") + body(1000000),
			words: []string{"HTTP/1.1 401 "}, closed: 150 * time.Second},
		{name: "a refused body in chunks",
			sent: request(put, closing, "Transfer-Encoding: chunked") + "7a120\r\n" + body(500000) +
				"\r\n0\r\n\r\n",
			words: []string{"HTTP/1.1 401 "}},
		{name: "a body that is too large to wait for",
			sent:  request(put, closing, "Content-Length: 2000000"),
			words: []string{"HTTP/1.1 401 "}},
		{name: "a body without an end",
			sent:  request(put, closing, "Transfer-Encoding: chunked") + "ffffff\r\n" + body(3<<20),
			words: []string{"HTTP/1.1 401 "}, unread: true},
		{name: "a body that is too large after 100",
			sent: request("POST /v1/pets HTTP/1.1", closing, "Authorization: Bearer "+testKey,
				"Expect: 100-continue", "Content-Length: 500000") + body(500000),
			words: []string{"HTTP/1.1 100 ", "HTTP/1.1 413 "}},
		{name: "a body that waits for 100",
			sent:  request(put, closing, "Content-Length: 9", "Expect: 100-continue"),
			words: []string{"HTTP/1.1 401 "}},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service, ln *memoryListener, stop func()) {
				defer stop()
				start := time.Now()
				conn := ln.dial(t)
				sent := make(chan error, 1)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					for err == nil && c.later != "" {
						time.Sleep(time.Second)
						_, err = io.WriteString(conn, c.later)
					}
					sent <- err
				}()
				time.Sleep(c.pause)
				received, _ := io.ReadAll(conn)
				took := time.Since(start)

				if fault := contains(string(received), c.words); fault != "" {
					t.Fatalf("%s in %.1000s", fault, received)
				}
				if err := <-sent; (err != nil) != c.unread {
					t.Fatalf("the request was sent with the error %v, want one: %v", err, c.unread)
				}
				if took < c.closed || took > c.closed+time.Second { // net/http may wait a little
					t.Fatalf("the connection was closed after %v, want %v", took, c.closed)
				}
			})
		})
	}
}

func TestStops(t *testing.T) {
	t.Parallel()
	const closing = "\r\nConnection: close\r\n"
	for _, c := range []struct {
		name  string
		sent  string        // before the stop
		pause time.Duration // after the stop has begun
		later string        // is sent after that, on the same connection
		words []string      // in all that the client receives
		took  time.Duration // that the stop takes
	}{
		{name: "an idle connection is closed", sent: rawList,
			words: []string{"200 OK", "!" + closing}, took: 250 * time.Millisecond},
		{name: "a request on an open connection is answered", sent: rawList,
			pause: 200 * time.Millisecond, later: rawList,
			words: []string{"200 OK", closing}, took: 250 * time.Millisecond},
		{name: "a request in progress ends", sent: rawCreate, pause: 4 * time.Second, later: rex,
			words: []string{"201 Created", closing}, took: 4 * time.Second},
		{name: "a request that does not end is cut off", sent: rawCreate,
			words: []string{"!HTTP"}, took: 6250 * time.Millisecond},
		{name: "a silent connection is closed", words: []string{"!HTTP"}, took: 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, s *service, ln *memoryListener, stop func()) {
				conn := ln.dial(t)
				var received logBuffer
				read := make(chan struct{})
				go func() {
					io.Copy(&received, conn)
					close(read)
				}()
				io.WriteString(conn, c.sent)
				synctest.Wait()

				start := time.Now()
				stopped := make(chan time.Duration, 1)
				go func() {
					stop()
					stopped <- time.Since(start)
				}()
				synctest.Wait()
				if !ln.closed.Load() {
					t.Fatal("the service accepts connections during the stop")
				}
				time.Sleep(c.pause)
				io.WriteString(conn, c.later)
				<-read

				received.want(t, c.words...)
				took := <-stopped
				if took < c.took || took > c.took+600*time.Millisecond { // net/http polls
					t.Fatalf("the stop took %v, want %v", took, c.took)
				}
				cutOff := strings.Contains(s.log.String(), `WARN msg="connections were cut off"`)
				if cutOff != (c.took > shutdownTime) {
					t.Fatalf("the log says that connections were cut off: %v", cutOff)
				}
			})
		})
	}
}

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
	file := filepath.Join(t.TempDir(), "animals.db")
	p := start(t, env{"API_KEYS": "one,\n" + testKey + "\n"}, "-addr", "0.0.0.0:0", "-db", file)
	p.log.want(t, " database="+file+" keys=2 version=", "!"+testKey, "!api_key")
	p.do("GET /v1/pets", "", "Authorization: Bearer one").want(t, 200)
	p.do("GET /v1/pets", "", "Authorization: Bearer "+otherKey).want(t, 401)

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

	for _, a := range last {
		if !errors.Is(a.err, syscall.ECONNREFUSED) {
			t.Fatalf("the last request got %d, %v, want a refused connection", a.status, a.err)
		}
	}
	if status := p.wait(); status != 0 {
		t.Fatalf("after SIGTERM, the status is %d, want 0", status)
	}
	p.log.want(t, "msg=stopping", "msg=stopped", "!cut off")
	wantFiles(t, filepath.Dir(file), "animals.db")
	wantSQL(t, file, "SELECT count(*) FROM pets", strconv.FormatInt(created.Load(), 10))
}

// TestStopWithoutDatabase stops the program after its database was moved. Its write-ahead log must
// stay, because another program reads. The program must say where it belongs.
func TestStopWithoutDatabase(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "animals.db")
	p := start(t, env{"API_KEYS": testKey}, "-addr", "127.0.0.1:0", "-db", file)
	_, err := connect(t, file).Exec("BEGIN; SELECT * FROM pets")
	must(t, err)
	p.do("POST /v1/pets", rex).want(t, 201)

	must(t, os.Rename(file, file+".moved"))
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if status := p.wait(); status != 1 {
		t.Fatalf("the status is %d, want 1", status)
	}
	p.log.want(t, "the moved database still needs its write-ahead log", `animals.db-wal"`)
}

func TestMadeKey(t *testing.T) {
	t.Parallel()
	p := start(t, env{}, "-addr", "127.0.0.1:0", "-db", filepath.Join(t.TempDir(), "animals.db"))
	_, key, _ := strings.Cut(p.log.String(), "api_key=")
	key, _, _ = strings.Cut(key, "\n")
	p.log.want(t, "level=WARN", `msg="API_KEYS is not set: made a key for this run"`, " keys=1 ")
	p.do("GET /v1/pets", "", "Authorization: Bearer "+key).want(t, 200)
	p.do("GET /v1/pets", "", "Authorization: Bearer").want(t, 401)

	p.stderr.Close()
	for range 3 { // each writes to a log that nobody reads
		p.do("GET /v1/pets", "", "Authorization: Bearer "+key).want(t, 200)
	}
}

// TestKill kills the program several times while clients add animals, each with an Idempotency-Key.
// None that was acknowledged may be missing, and a repeat must get the first response.
func TestKill(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "animals.db")
	acknowledged := map[string]string{} // the body of the 201 by Idempotency-Key
	var mu sync.Mutex                   // guards acknowledged
	create := func(p *process, key string) reply {
		body := fmt.Sprintf(`{"name":%q,"categoryId":1}`, key)
		return p.do("POST /v1/pets", body, "Idempotency-Key: "+key)
	}

	for round, killAt := range []int{1, 100, 200, 300} { // kill at so many acknowledged creates, of all rounds
		before, _ := os.ReadFile(file + "-wal") // fails in round 0
		p := start(t, env{"API_KEYS": testKey}, "-addr", "127.0.0.1:0", "-db", file)
		// The start must have committed to the WAL of the killed process. No create was sent yet.
		if after, _ := os.ReadFile(file + "-wal"); round == 1 && bytes.Equal(after, before) {
			t.Fatal("the start has committed nothing: what the kill has left may not be on disk")
		}
		for key, body := range acknowledged {
			create(p, key).want(t, 201, "Idempotency-Replayed: true").wantBody(t, body)
		}

		var clients sync.WaitGroup
		for client := range 16 {
			clients.Go(func() {
				for i := 0; ; i++ {
					key := fmt.Sprint(round, "-", client, "-", i)
					a := create(p, key)
					if a.status != 201 {
						return
					}
					mu.Lock()
					acknowledged[key] = a.body
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

// TestPanicInSQLite expects that the program ends: a connection may be in use for ever.
func TestPanicInSQLite(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "POST /v1/pets"} {
		file := filepath.Join(t.TempDir(), "animals.db")
		p := start(t, env{"API_KEYS": testKey}, "-addr", "127.0.0.1:0", "-db", file)
		execSQL(t, file, `ALTER TABLE pets RENAME TO old;
			CREATE VIEW pets AS SELECT panic() AS id, name, category_id, status FROM old;
			CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN SELECT panic(); END;
			INSERT INTO old (name, category_id) VALUES ('Rex', 7)`)

		if a := p.do(request, rex); a.err == nil {
			t.Fatalf("%s = %d, want no response", request, a.status)
		}
		if status := p.wait(); status != 1 {
			t.Fatalf("after %s, the exit status is %d, want 1", request, status)
		}
		p.log.want(t, `level=ERROR msg="panic in the store" panic="a mistake" stack=`, "store.go:")
	}
}

// TestPanicInAHandler expects a 500 for this request alone.
func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	var log logBuffer
	h := func(*request) (any, error) { panic("a mistake") }
	logger := slog.New(slog.NewTextHandler(&log, nil))
	s := &service{server: newServer(map[string]handler{"/panic": h}, unknownPath, logger)}

	s.do("GET /panic", "").want(t, 500, `"internal error"`, "!mistake")
	s.do("GET /", "").want(t, 404)
	log.want(t, "level=ERROR", "status=500", `error="panic: a mistake`, "server_test.go:")
}

// openapi.json.

// TestDocument checks that all references in openapi.json lead somewhere, and compares it with the
// constants of the code. want checks that it has the responses of the service.
func TestDocument(t *testing.T) {
	t.Parallel()
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			if lookup(v) == nil {
				t.Fatalf("%v leads nowhere", v["$ref"])
			}
			for _, member := range v {
				walk(member)
			}
		case []any:
			for _, item := range v {
				walk(item)
			}
		}
	}
	walk(document)

	const list, create, get = "paths /pets get ", "paths /pets post ", "paths /pets/{petId} get "
	const schemas, newPet = "components schemas ", "components schemas NewPet "
	for _, c := range []struct {
		path string // see lookup
		want any
	}{
		{"security", "[map[bearerAuth:[]]]"},
		{"components securitySchemes bearerAuth scheme", "bearer"},
		{list + "operationId", "listPets"},
		{create + "operationId", "createPet"},
		{get + "operationId", "getPet"},
		{get + "deprecated", true},
		{list + "parameters limit in", "query"},
		{list + "parameters limit schema minimum", 1},
		{list + "parameters limit schema maximum", maxLimit},
		{list + "parameters limit schema default", defaultLimit},
		{list + "parameters status schema enum", petStatuses},
		{list + "parameters after in", "query"},
		{list + "parameters after schema minimum", 0},
		{create + "parameters Idempotency-Key in", "header"},
		{create + "parameters Idempotency-Key required", nil},
		{create + "parameters Idempotency-Key schema maxLength", maxIdempotencyKey},
		{create + "requestBody required", true},
		{create + "requestBody content application/json schema required", "[name categoryId]"},
		{get + "parameters petId in", "path"},
		{get + "parameters petId schema format", "int64"},
		{newPet + "properties name minLength", 1},
		{newPet + "properties name maxLength", maxName},
		{newPet + "properties name pattern", nil},
		{newPet + "properties categoryId format", "int64"},
		{newPet + "properties categoryId type", "integer"},
		{newPet + "additionalProperties", false},
		{schemas + "PetStatus enum", petStatuses},
		{schemas + "Pet required", "[id name categoryId status]"},
		{schemas + "Pet properties id format", "int64"},
		{schemas + "Pet properties categoryId format", "int64"},
		{schemas + "Pets maxItems", maxLimit},
		{schemas + "Error required", "[code message status]"},
	} {
		if got := lookup(document, strings.Fields(c.path)...); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Fatalf("openapi.json has %s = %v, want %v", c.path, got, c.want)
		}
	}

	for path, words := range map[string][]string{
		"info description": {
			fmt.Sprintf("%d KiB of headers and %d KiB of body", maxHeader>>10, maxBody>>10),
			fmt.Sprintf("%v seconds to send the headers and %v to send the request",
				readHeaderTimeout.Seconds(), readTimeout.Seconds()),
			fmt.Sprintf("sent and read within %v seconds", writeTimeout.Seconds()),
			fmt.Sprintf("closed %v seconds after its last response", idleTimeout.Seconds()),
			fmt.Sprintf("end within %v seconds", shutdownTime.Seconds()),
		},
		create + "description": {
			fmt.Sprintf("waits up to %v seconds, or up to %v behind",
				busyTimeout.Seconds(), 2*busyTimeout.Seconds()),
		},
		"servers": {"url:/v1]"},
	} {
		for _, w := range words {
			text := fmt.Sprint(lookup(document, strings.Fields(path)...))
			if !strings.Contains(text, w) {
				t.Fatalf("openapi.json has no %q in %s", w, path)
			}
		}
	}
	for status, code := range wantCodes {
		row := fmt.Sprintf("| %d | `%s` |", status, code)
		if !strings.Contains(fmt.Sprint(lookup(document, "info", "description")), row) {
			t.Fatalf("openapi.json has no row %s", row)
		}
	}
}

// Fuzz tests.

// FuzzListPets lists animals with any query. It must be refused, or the page must be what it says.
func FuzzListPets(f *testing.F) {
	for _, query := range []string{
		"", "limit=5&status=sold&after=3", "status=pending&limit=10", "status=pending&limit=9",
		"limit=101", "limit=05", "limit=1&limit=1", "&limit=%32", "a;b", "%zz",
		"after=9223372036854775807", "after=9223372036854775808",
	} {
		f.Add(query)
	}
	s := newService(f)
	for i := range 30 {
		execSQL(f, s.file, "INSERT INTO pets (name, category_id, status) VALUES ('x', ?, ?)",
			i, petStatuses[i%3])
	}
	all := decode[[]Pet](f, s.do("GET /v1/pets?limit=100", "").want(f, 200))

	f.Fuzz(func(t *testing.T, query string) {
		r := newRequest("GET /v1/pets", nil)
		r.URL.RawQuery = query
		a := s.send(r)
		if a.status == 400 {
			a.want(t, 400)
			return
		}

		values, err := url.ParseQuery(query)
		must(t, err)
		after, _ := strconv.ParseInt(values.Get("after"), 10, 64)
		limit := 20
		if values.Has("limit") {
			limit, err = strconv.Atoi(values.Get("limit"))
			must(t, err)
		}
		var want []Pet
		for _, p := range all {
			if p.ID > after && (!values.Has("status") || p.Status == values.Get("status")) {
				want = append(want, p)
			}
		}
		got := decode[[]Pet](t, a.want(t, 200))
		if !slices.Equal(got, want[:min(limit, len(want))]) {
			t.Fatalf("%q = %v, want %v", query, got, want)
		}
		if link := a.header.Get("Link"); (link != "") != (len(want) > limit) {
			t.Fatalf("%q has the Link %q", query, link)
		}
	})
}

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
		a := s.do("POST /v1/pets", body)
		if a.status == 400 || a.status == 413 && len(body) > maxBody {
			a.want(t, a.status)
			return
		}
		sent := decode[map[string]any](t, reply{body: body})
		if sent["status"] == nil {
			sent["status"] = "available"
		}
		got := decode[map[string]any](t, a.want(t, 201))
		s.do(fmt.Sprint("GET /v1/pets/", got["id"]), "").want(t, 200).wantBody(t, a.body)
		delete(got, "id")
		if !maps.Equal(got, sent) {
			t.Fatalf("%q = %v, want the animal that was sent", body, got)
		}
	})
}

// Benchmarks.

// BenchmarkListOfARareStatus lists animals of a status that one in a thousand has.
func BenchmarkListOfARareStatus(b *testing.B) {
	s := newService(b)
	addPets(b, s.file, 100_000)
	execSQL(b, s.file, "UPDATE pets SET status = 'pending' WHERE id % 1000 = 0")
	for b.Loop() {
		s.do("GET /v1/pets?status=pending&limit=100", "").want(b, 200)
	}
}

// BenchmarkCreates adds animals with an Idempotency-Key, from 64 clients for each processor.
func BenchmarkCreates(b *testing.B) {
	s := newService(b)
	var sent atomic.Int64
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			a := s.do("POST /v1/pets", rex, fmt.Sprint("Idempotency-Key: ", sent.Add(1)))
			if a.status != 201 {
				b.Errorf("a create = %d %s", a.status, a.body)
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
	a := reply{request: r.Method + " " + r.URL.String(), err: err}
	if err != nil {
		return a
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	a.status, a.header, a.body, a.err = resp.StatusCode, resp.Header, string(body), err
	return a
}

// want checks a response: its status, that its headers and body contain all the words, and none of
// those with a "!" in front, and the rules for all responses. An empty line is before the body.
func (a reply) want(t testing.TB, status int, words ...string) reply {
	t.Helper()
	var text strings.Builder
	a.header.Write(&text)
	text.WriteString("\r\n" + a.body)

	fault := contains("\r\n"+text.String(), words)
	if a.status != status {
		fault = fmt.Sprintf("want %d", status)
	} else if fault == "" && a.err == nil {
		fault = a.generalFault() + a.documentFault()
	}
	if fault != "" || a.err != nil {
		t.Fatalf("%.500s = %d %v\n%.2000s%s", a.request, a.status, a.err, &text, fault)
	}
	return a
}

// wantBody checks the whole body of a response.
func (a reply) wantBody(t testing.TB, want string) {
	t.Helper()
	if a.body != want {
		t.Fatalf("%s = %s, want %s", a.request, a.body, want)
	}
}

// contains returns "" if text contains all the words, and none of those with a "!" in front.
func contains(text string, words []string) (fault string) {
	for _, w := range words {
		if w, unwanted := strings.CutPrefix(w, "!"); strings.Contains(text, w) == unwanted {
			return fmt.Sprintf("%.1000q is there: %v", w, unwanted)
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
func (a reply) generalFault() string {
	for name, rule := range headerRules {
		if values := a.header[name]; len(values) != 1 || !rule.MatchString(values[0]) {
			return fmt.Sprintf("%s is %q", name, values)
		}
	}
	for name, status := range statusHeaders {
		if has := len(a.header[name]) == 1; has != (a.status == status) {
			return fmt.Sprintf("%s is %q", name, a.header[name])
		}
	}
	if strings.HasPrefix(a.request, "HEAD ") {
		return ""
	}
	if !json.Valid([]byte(a.body)) || a.header.Get("Content-Length") != strconv.Itoa(len(a.body)) {
		return "not JSON, or of another length than Content-Length"
	}
	var e map[string]any
	if a.status >= 400 {
		json.Unmarshal([]byte(a.body), &e)
		if len(e) != 3 || e["code"] != wantCodes[a.status] ||
			e["status"] != float64(a.status) || e["message"] == "" {
			return "not the Error of this status"
		}
	}
	return ""
}

// decode decodes the body of a response.
func decode[T any](t testing.TB, a reply) (v T) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(a.body))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%s = %s: %v", a.request, a.body, err)
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
func (a reply) documentFault() string {
	method, target, _ := strings.Cut(strings.Replace(a.request, "HEAD ", "GET ", 1), " ")
	path, _, _ := strings.Cut(target, "?")
	path = petPath.ReplaceAllString(path, "/v1/pets/{petId}")
	path, below := strings.CutPrefix(path, "/v1")
	op := lookup(document, "paths", path, strings.ToLower(method))
	if op == nil || !below {
		return ""
	}
	resp := lookup(op, "responses", strconv.Itoa(a.status))
	if resp == nil {
		return "openapi.json has no such response"
	}

	known := []string{"Cache-Control", "Connection", "Content-Length", "Content-Type", "Date",
		"X-Content-Type-Options"}
	headers, _ := lookup(resp, "headers").(map[string]any)
	for name, header := range headers {
		value := a.header.Get(name)
		known = append(known, http.CanonicalHeaderKey(name))
		if value == "" && lookup(header, "required") == nil {
			continue
		}
		values, _ := lookup(header, "schema", "enum").([]any)
		pattern, _ := lookup(header, "schema", "pattern").(string)
		if values != nil && !slices.Contains(values, any(value)) ||
			!regexp.MustCompile(pattern).MatchString(value) {
			return "openapi.json has another " + name
		}
	}
	for name := range a.header {
		if !slices.Contains(known, name) {
			return "openapi.json has no " + name
		}
	}

	schema := lookup(resp, "content", "application/json", "schema")
	body := strings.TrimPrefix(a.body, "[")
	if len(body) < len(a.body) {
		schema = lookup(schema, "items")
	}
	var object map[string]any // that is the body, or its first item
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
	close func() error // the store, as at the end of the program
}

// newService opens a service on a new database.
func newService(t testing.TB) *service {
	t.Helper()
	return openService(t, filepath.Join(t.TempDir(), "animals.db"))
}

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

	handlers, fallback := routes(st, keys)
	s.server = newServer(handlers, fallback, logger)
	return s
}

// do sends a request to the service: see newRequest.
func (s *service) do(request, body string, headers ...string) reply {
	return s.send(newRequest(request, strings.NewReader(body), headers...))
}

// send sends r to the service.
func (s *service) send(r *http.Request) reply {
	recorder := httptest.NewRecorder()
	s.ServeHTTP(recorder, r)
	return newReply(r, recorder.Result(), nil)
}

// withFakeClock runs a test, in parallel with others, on a service that serves connections to ln
// until stop is called. The clock stands still while anything runs.
func withFakeClock(
	t *testing.T,
	test func(t *testing.T, s *service, ln *memoryListener, stop func()),
) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		ln := &memoryListener{conns: make(chan net.Conn)}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.serve(ctx, ln) }()

		test(t, s, ln, func() {
			cancel()
			must(t, <-ended)
		})
		time.Sleep(time.Minute) // until all goroutines of net/http have ended
	})
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

// dial opens a connection, which is closed at the end of the test.
func (l *memoryListener) dial(t *testing.T) net.Conn {
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close() })
	l.conns <- theirs
	return ours
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

// want checks that what was written contains all the words, and none of those with a "!" in front.
func (l *logBuffer) want(t testing.TB, words ...string) {
	t.Helper()
	if fault := contains(l.String(), words); fault != "" {
		t.Fatalf("%s: %s", fault, l)
	}
}

// Helpers: the program as a process.

// env is the environment of the program, by the names of the variables.
type env map[string]string

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

// start starts the program, and waits until it serves. It is killed at the end of the test.
func start(t testing.TB, e env, args ...string) *process {
	t.Helper()
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

// hookedDatabase is the name of a database that has room for few pages, and checks foreign keys.
const hookedDatabase = "hooked.db"

// registerHooks adds the settings of each hookedDatabase, and the SQL functions panic and sleep.
func registerHooks() {
	sqlite.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, dsn string) error {
		if !strings.Contains(dsn, hookedDatabase) {
			return nil
		}
		const pragmas = "PRAGMA max_page_count = 20; PRAGMA foreign_keys = ON"
		_, err := conn.ExecContext(context.Background(), pragmas, nil)
		return err
	})
	sqlite.MustRegisterScalarFunction("panic", 0,
		func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) { panic("a mistake") })
	sqlite.MustRegisterScalarFunction("sleep", 0,
		func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) {
			time.Sleep(time.Second)
			return nil, nil
		})
}

// Helpers: files and errors.

// must fails the test unless err is nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
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

// snapshot lists the files in a folder, with the sums of their contents.
func snapshot(t testing.TB, dir string) (text string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		content, _ := os.ReadFile(path) // fails for a folder
		text += fmt.Sprintf("%s %x\n", path, sha256.Sum256(content))
		return err
	}))
	return text
}

// fileSize returns the size of a file in bytes.
func fileSize(t testing.TB, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Size()
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
		t.Fatalf("the files are %q, want %q", got, want)
	}
}
