package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
)

// Messages of errors.
const (
	afterRule  = "after must be an integer from 0 to 9223372036854775807"
	limitRule  = "limit must be an integer from 1 to 100"
	statusRule = "status must be one of available, pending, sold, or be left out"
	nameRule   = "name must be a string of 1 to 255 characters, not all white space, " +
		"without U+0000, U+FFFD or unpaired surrogates"
	categoryRule = "categoryId must be an integer from -9223372036854775808 to " +
		"9223372036854775807, with no fraction, exponent or quotes"
	idempotencyKeyRule = "Idempotency-Key must be one value of 1 to 255 visible ASCII characters"
	encodingRule       = "the body must be UTF-8 without a byte order mark, and not compressed"

	noAnimal     = "there is no animal with this id"
	nothingThere = "there is nothing at this path; the paths of the API begin with /v1/pets"
	unauthorized = "send a valid API key, in one header Authorization: Bearer API_KEY; " +
		"GET /openapi.json describes this interface"
)

// newShop returns a service with 24 animals: Rex, Tom and Mia have the ids 1 to 3, and others, all
// sold, have the ids 5 to 25. Animal 4 was deleted, so an id does not tell how many animals precede
// it.
func newShop(t *testing.T) *service {
	t.Helper()
	s := newService(t)
	execSQL(t, s.file, `INSERT INTO pets (name, category_id, status)
		VALUES ('Rex', 7, 'available'), ('Tom', -8, 'sold'), ('Mia', 0, 'pending')`)
	addPets(t, s.file, 22) // 4 to 25
	execSQL(t, s.file, "DELETE FROM pets WHERE id = 4")
	return s
}

// TestListPets lists the animals of newShop: each page must have these animals, and a link to the
// next page if more animals follow.
func TestListPets(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const firstTwenty = "1 2 3 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21"
	const all = firstTwenty + " 22 23 24 25"

	for _, c := range []struct {
		query string
		ids   string // of the animals on the page
		next  string // the query of the link to the next page, "" for no link
	}{
		{"", firstTwenty, "after=21"},
		{"?limit=100", all, ""},
		{"?limit=24", all, ""}, // as many as there are
		{"?status=pending", "3", ""},
		{"?limit=2&status=sold&after=2", "5 6", "after=6&limit=2&status=sold"},
		{"?after=0&limit=1", "1", "after=1&limit=1"},
		{"?after=25", "", ""},                  // the last id
		{"?after=9223372036854775807", "", ""}, // the greatest int64
		{"?st%61tus=pend%69ng", "3", ""},       // with escapes
	} {
		t.Run("GET /v1/pets"+c.query, func(t *testing.T) {
			resp := s.get("/v1/pets"+c.query).want(t, 200)

			var ids []string
			for _, p := range decode[[]Pet](t, resp.body) {
				ids = append(ids, strconv.FormatInt(p.ID, 10))
			}
			if got := strings.Join(ids, " "); got != c.ids {
				t.Fatalf("%s = the animals %q, want %q", resp.request(), got, c.ids)
			}

			link := ""
			if c.next != "" {
				link = "<pets?" + c.next + `>; rel="next"`
			}
			resp.wantHeader(t, "Link", link)
		})
	}
}

// TestLargestPage lists 100 of 101 animals: the link shows which one is the last of the page.
func TestLargestPage(t *testing.T) {
	t.Parallel()
	s := newService(t)
	addPets(t, s.file, 101)
	s.get("/v1/pets?limit=100").want(t, 200).
		wantHeader(t, "Link", `<pets?after=100&limit=100>; rel="next"`)
}

// TestBodyOfListPets checks whole bodies: of a page with animals, and of an empty page. A HEAD gets
// the headers of the GET.
func TestBodyOfListPets(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.get("/v1/pets?limit=2").want(t, 200).wantBody(t,
		`[{"id":1,"name":"Rex","categoryId":7,"status":"available"},`+
			`{"id":2,"name":"Tom","categoryId":-8,"status":"sold"}]`+"\n")
	s.get("/v1/pets?after=25").want(t, 200).wantBody(t, "[]\n")
	s.do("HEAD /v1/pets?limit=1", "").want(t, 200).
		wantHeader(t, "Link", `<pets?after=1&limit=1>; rel="next"`)
}

// TestListPetsIgnoresHeaders lists animals with headers that must change nothing.
func TestListPetsIgnoresHeaders(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	plain := s.get("/v1/pets").want(t, 200)
	for _, header := range []string{
		"Accept: text/html", "Content-Type: text/plain", "If-None-Match: *", "Range: bytes=0-3",
		"Idempotency-Key: a b",
	} {
		s.get("/v1/pets", header).want(t, 200).wantBody(t, plain.body)
	}
}

// TestListPetsRefuses lists animals with queries that must get 400, with the message of the case.
func TestListPetsRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t)
	quoted := strings.Repeat("x", 64) // as much of a parameter as a message quotes

	for _, c := range []struct{ query, message string }{
		{"limit=0", limitRule},
		{"limit=101", limitRule},
		{"limit=%2B5", limitRule}, // +5
		{"limit=05", limitRule},
		{"limit=", limitRule},
		{"status=SOLD", statusRule},
		{"status=", statusRule},
		{"after=-1", afterRule},
		{"after=9223372036854775808", afterRule}, // not an int64
		{"limit=5&limit=5", `"limit" must not be repeated`},
		{"Limit=5", `unknown parameter "Limit"`},
		{quoted + "yz=1", `unknown parameter "` + quoted + `"`},
		{"limit=5;after=1", "the query string is malformed"},
		{"status=%zz", "the query string is malformed"},
		// Of these 12 faults, the first ten are named.
		{"a&b&c&d&e&f&g&h&limit=0&status=x&y&z",
			`unknown parameter "a"; unknown parameter "b"; unknown parameter "c"; ` +
				`unknown parameter "d"; unknown parameter "e"; unknown parameter "f"; ` +
				`unknown parameter "g"; unknown parameter "h"; ` + limitRule + "; " + statusRule},
	} {
		t.Run("GET /v1/pets?"+c.query, func(t *testing.T) {
			s.get("/v1/pets?"+c.query).wantError(t, 400, "invalid_request", c.message)
		})
	}
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
	// Each page takes 4 animals from the list, and then one is added at its end. So there are ten
	// pages: 20 rounds are enough.
	for range 20 {
		resp := s.get(strings.TrimPrefix(page.RequestURI(), "/shop")).want(t, 200)
		var last int64
		for _, p := range decode[[]Pet](t, resp.body) {
			listed[p.ID]++
			last = p.ID
		}

		s.create(`{"name":"late","categoryId":1,"status":"sold"}`).want(t, 201)
		// If the service counted animals (OFFSET), this would shift the next page.
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

// largest is a body of the largest size that is accepted, 64 KiB.
var largest = rex + strings.Repeat(" ", 64<<10-len(rex))

// TestCreatePet adds animals that must be stored, and come back, as they were sent. FuzzCreatePet
// does so with more bodies.
func TestCreatePet(t *testing.T) {
	t.Parallel()
	dogs := strings.Repeat("🐶", 255) // the longest name

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

	newService(t).do("POST /v1/pets?limit=x&a;b&%zz", rex).wantNew(t, 1) // ignores the query
}

// TestCreatePetRefuses adds animals with bodies that must get 400, with the message of the case.
// Nothing must be stored.
func TestCreatePetRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t)
	long := strings.Repeat("é", 256) // one character more than a name may have

	for _, c := range []struct{ name, body, message string }{
		{"not UTF-8", "{\"name\":\"\xff\",\"categoryId\":1}", encodingRule},
		{"a byte order mark", "\ufeff" + rex, encodingRule},
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
		{"a long member is cut after 64 characters", `{"` + long + `":1,"name":"x","categoryId":1}`,
			`unknown member "` + strings.Repeat("é", 64) + `"`},
		{"several faults", `{"status":1,"name":1,"x":{"name":2},"categoryId":null}`,
			statusRule + "; " + nameRule + `; unknown member "x"; ` + categoryRule},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.create(c.body).wantError(t, 400, "invalid_request", c.message)
		})
	}

	wantPetCount(t, s.file, 0)
}

// TestInvalidJSON adds animals with bodies that are not JSON. The message must end with that of
// encoding/json, which the test does not repeat.
func TestInvalidJSON(t *testing.T) {
	t.Parallel()
	s := newService(t)

	for _, body := range []string{
		"", " ", "{", `{"name":"x","categoryId":1 `, `{"name":"x","categoryId":1,}`, rex + rex,
	} {
		t.Run(fmt.Sprintf("%q", body), func(t *testing.T) {
			resp := s.create(body).want(t, 400)
			const begin = `{"code":"invalid_request","message":"the body must be one JSON object: `
			if !strings.HasPrefix(resp.body, begin) {
				t.Fatalf("%s = %s, want %s...", resp.request(), resp.body, begin)
			}
		})
	}

	wantPetCount(t, s.file, 0)
}

// TestBodyTooLarge adds animals with bodies that are a byte too large.
func TestBodyTooLarge(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const message = "the request body is larger than 65536 bytes"

	s.create(largest+" ").wantError(t, 413, "body_too_large", message)
	chunked := io.MultiReader(strings.NewReader(largest + " ")) // its size is not known before
	s.send(httptest.NewRequest("POST", "/v1/pets", chunked)).
		wantError(t, 413, "body_too_large", message)
	wantPetCount(t, s.file, 0)
}

// TestHeadersOfCreatePet adds animals with headers that must be accepted.
func TestHeadersOfCreatePet(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, header := range []string{
		`Content-Type: Application/JSON; charset="utf-16"`,
		"Content-Encoding: gzip",
		idempotencyKey("!" + strings.Repeat("~", 254)), // 255 bytes; ! and ~ are the outermost
	} {
		s.create(rex, header).want(t, 201)
	}
	wantPetCount(t, s.file, 3)
}

// TestContentType adds animals with Content-Types that must get 415. The message quotes up to 64
// characters of them.
func TestContentType(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const rule = "Content-Type must be application/json, not "

	for contentType, quoted := range map[string]string{
		"application/json-patch+json": `"application/json-patch+json"`,
		"":                            `""`,
		"application/json; x":         `"application/json; x"`,
		strings.Repeat("x", 65):       `"` + strings.Repeat("x", 64) + `"`,
	} {
		s.create(rex, "Content-Type: "+contentType).
			wantError(t, 415, "unsupported_media_type", rule+quoted)
	}
	s.create(rex, "Content-Type: application/json", "Content-Type: application/json").
		wantError(t, 415, "unsupported_media_type", rule+`"application/json, application/json"`)

	wantPetCount(t, s.file, 0)
}

// TestInvalidIdempotencyKeys adds animals with Idempotency-Keys that must get 400.
func TestInvalidIdempotencyKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)

	tooLong := strings.Repeat("x", 256)
	for _, key := range []string{tooLong, "", "é", "a b"} {
		s.create(rex, idempotencyKey(key)).wantError(t, 400, "invalid_request", idempotencyKeyRule)
	}
	s.create(rex, idempotencyKey("a"), idempotencyKey("a")).
		wantError(t, 400, "invalid_request", idempotencyKeyRule)

	wantPetCount(t, s.file, 0)
}

// TestGetPet fetches animals that exist and others that do not. Each response must say that the
// operation is deprecated, but for a 401.
func TestGetPet(t *testing.T) {
	t.Parallel()
	s := newShop(t)

	// The query is ignored.
	s.get("/v1/pets/2?limit=x&a;b").want(t, 200).wantDeprecated(t).
		wantBody(t, `{"id":2,"name":"Tom","categoryId":-8,"status":"sold"}`+"\n")
	s.do("HEAD /v1/pets/1", "").want(t, 200).wantDeprecated(t)

	for _, id := range []string{
		"4", "26", // one that was deleted, and the next one
		"0", "-9223372036854775808", "9223372036854775808", // the last is not an int64
		"01", "+1", "1%2F", "Rex",
	} {
		s.get("/v1/pets/"+id).wantError(t, 404, "not_found", noAnimal).wantDeprecated(t)
	}

	s.withoutKey().get("/v1/pets/1").wantError(t, 401, "unauthorized", unauthorized).
		wantHeader(t, "Sunset", "")
}

// wantDeprecated checks that a response says when the operation will be removed, and which one
// replaces it.
func (r reply) wantDeprecated(t *testing.T) reply {
	t.Helper()
	return r.wantHeader(t, "Sunset", "Thu, 05 Dec 2030 00:00:00 GMT").
		wantHeader(t, "Link", `<../pets>; rel="successor-version"`)
}

// TestUnknownPaths sends requests to paths that must get 404 or, without an API key, 401.
func TestUnknownPaths(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, request := range []string{
		"GET /", "GET /pets", "GET /v1/store/orders", "GET /v1/pets/", "GET //v1/pets",
		"GET /v1/./pets", "GET /v1%2Fpets", "POST //v1/pets",
	} {
		s.do(request, rex).wantError(t, 404, "unknown_path", nothingThere)
		s.withoutKey().do(request, rex).wantError(t, 401, "unauthorized", unauthorized)
	}
	wantPetCount(t, s.file, 0) // the POST has added nothing
}

// TestMethodsNotAllowed sends requests with methods that must get 405 or, without an API key, 401.
func TestMethodsNotAllowed(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).wantNew(t, 1)

	for request, allow := range map[string]string{
		"DELETE /v1/pets":    "GET, HEAD, POST",
		"OPTIONS /v1/pets":   "GET, HEAD, POST",
		"DELETE /v1/pets/1":  "GET, HEAD",
		"POST /v1/pets/x":    "GET, HEAD",
		"POST /healthz":      "GET, HEAD",
		"POST /openapi.json": "GET, HEAD",
	} {
		s.do(request, rex).wantError(t, 405, "method_not_allowed", "this path allows only "+allow).
			wantHeader(t, "Allow", allow)
		s.withoutKey().do(request, rex).wantError(t, 401, "unauthorized", unauthorized)
	}

	wantPetCount(t, s.file, 1) // the requests have neither added nor deleted animals
}

// TestOpenPaths sends requests without an API key to the paths that need none.
func TestOpenPaths(t *testing.T) {
	t.Parallel()
	s := newService(t).withoutKey()
	s.get("/healthz").want(t, 200).wantBody(t, "{\"status\":\"ok\"}\n").
		wantHeader(t, "Connection", "close")
	s.do("HEAD /healthz", "").want(t, 200)
	s.get("/openapi.json").want(t, 200).wantBody(t, string(encode(openAPI)))
}

// withoutKey returns the same service, but its requests have no API key.
func (s *service) withoutKey() *service {
	withoutKey := *s
	withoutKey.apiKey = ""
	return &withoutKey
}

// TestAPIKeys lists animals with valid Authorization headers. The connection must stay open.
func TestAPIKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, authorization := range []string{
		"Bearer " + testKey, "Bearer " + otherKey, "BEARER  " + testKey,
	} {
		s.get("/v1/pets", "Authorization: "+authorization).want(t, 200).
			wantHeader(t, "Connection", "")
	}
}

// TestInvalidAPIKeys lists animals with invalid Authorization headers. The 401 must have a
// challenge (RFC 6750), which says that the token is invalid if there is one, and must close the
// connection.
func TestInvalidAPIKeys(t *testing.T) {
	t.Parallel()
	s := newService(t)
	wantChallenge := func(challenge string, headers ...string) {
		t.Helper()
		s.get("/v1/pets", headers...).wantError(t, 401, "unauthorized", unauthorized).
			wantHeader(t, "WWW-Authenticate", challenge).wantHeader(t, "Connection", "close")
	}

	const plain = `Bearer realm="animalstore"`
	wantChallenge(plain, "Authorization: "+testKey) // without a scheme
	wantChallenge(plain, "Authorization: Basic "+testKey)
	wantChallenge(plain, "Authorization: Bearer")
	wantChallenge(plain, "Authorization: Bearer  ")
	wantChallenge(plain, "Authorization: Bearer "+testKey, "Authorization: Bearer "+testKey)
	wantChallenge(plain+`, error="invalid_token"`, "Authorization: Bearer wrong")
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
	s.create(tooLarge, invalidKey).wantError(t, 400, "invalid_request", idempotencyKeyRule)
	s.create(tooLarge).want(t, 413)
	s.create(invalid).want(t, 400)
}

// TestClientThatIsGone sends requests as a handler sees them after the client has disconnected.
// Only the animal of a whole request must be stored.
func TestClientThatIsGone(t *testing.T) {
	t.Parallel()
	s := newService(t)

	gone, cancel := context.WithCancel(t.Context())
	cancel() // as net/http does when the client has disconnected
	r := httptest.NewRequest("POST", "/v1/pets", strings.NewReader(rex))
	s.send(r.WithContext(gone)).want(t, 201)

	for _, received := range []string{"", rex} {
		t.Run(fmt.Sprintf("the body breaks off after %q", received), func(t *testing.T) {
			broken := iotest.ErrReader(io.ErrUnexpectedEOF)
			body := io.MultiReader(strings.NewReader(received), broken)
			s.send(httptest.NewRequest("POST", "/v1/pets", body)).wantError(t, 400,
				"invalid_request", "the request body could not be read to its end")
		})
	}

	wantPetCount(t, s.file, 1)
}

// FuzzCreatePet adds an animal with any body. It must be refused, or come back as it was sent.
// (TestCreatePet shows which bodies must not be refused.)
func FuzzCreatePet(f *testing.F) {
	for _, body := range []string{
		rex,
		" {\r\n\t\"status\" : \"sold\" , \"categoryId\" : -1 , \"name\" : \" a b \" } \r\n\t",
		`{"n\u0061me":"\"\\\/\b\f\n\r\t","categoryId":1}`,
		`{"name":"}]:,{[\"\\<&>\u2028","categoryId":-9223372036854775808,"status":"pending"}`,
		`{"name":"\uD7A3\uE000\uDBFF\uDFFF\uD800\uDC00","categoryId":9223372036854775807}`,
		`{"name":"` + strings.Repeat("🐶", 255) + `","categoryId":0,"status":"available"}`,
		`{"name":"x","categoryId":1e2}`,
		`{"name":"x","categoryId":-0}`,
	} {
		f.Add(body)
	}
	s := newService(f)

	f.Fuzz(func(t *testing.T, body string) {
		resp := s.create(body)
		if resp.status == 400 || resp.status == 413 && len(body) > maxBody {
			resp.want(t, resp.status) // checks the rest of the response
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
