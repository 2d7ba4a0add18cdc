package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// reply is a response that was read to its end, or the error that came instead.
type reply struct {
	method, target string // of the request
	sent           string // its headers and its body, as the test gave them
	status         int
	header         http.Header
	body           string
	err            error
}

// newReply reads the response to a request, unless there was an error.
func newReply(method, target string, resp *http.Response, err error) reply {
	r := reply{method: method, target: target, err: err}
	if err == nil {
		defer resp.Body.Close()
		body, readErr := io.ReadAll(resp.Body)
		r.status, r.header, r.body, r.err = resp.StatusCode, resp.Header, string(body), readErr
	}
	return r
}

// request describes the request, for messages.
func (r reply) request() string {
	return strings.TrimSpace(fmt.Sprintf("%.20s %.500s %.300s", r.method, r.target, r.sent))
}

// want checks the status of a response, and what holds for all responses: see wantRules.
func (r reply) want(t testing.TB, status int) reply {
	t.Helper()
	if r.err != nil {
		t.Fatalf("%s: %v, want %d", r.request(), r.err, status)
	}
	if r.status != status {
		t.Fatalf("%s = %d, want %d: %.2000s", r.request(), r.status, status, r.body)
	}
	r.wantRules(t)
	return r
}

// wantError checks that a response is an Error with this status, code and message.
func (r reply) wantError(t testing.TB, status int, code, message string) reply {
	t.Helper()
	want := fmt.Sprintf(`{"code":%q,"message":%q,"status":%d}`+"\n", code, message, status)
	return r.want(t, status).wantBody(t, want)
}

// wantNew checks that a create got 201 and a new animal, with this id.
func (r reply) wantNew(t testing.TB, id int) reply {
	t.Helper()
	r.want(t, 201).wantHeader(t, "Idempotency-Replayed", "").
		wantHeader(t, "Location", fmt.Sprint("pets/", id))
	if !strings.HasPrefix(r.body, fmt.Sprintf(`{"id":%d,`, id)) {
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

// wantHeader checks the only value of a header or, if want is "", that the header is not there.
func (r reply) wantHeader(t testing.TB, name, want string) reply {
	t.Helper()
	if got := strings.Join(r.header.Values(name), "; "); got != want {
		t.Fatalf("%s has %s: %q, want %q", r.request(), name, got, want)
	}
	return r
}

// wantRules checks what holds for all responses:
//   - They have certain headers, among them an X-Request-Id.
//   - A 401, and no other response, has WWW-Authenticate. The same holds for a 405 and Allow, and
//     for a 503 and Retry-After.
//   - The body is JSON, and has the length that Content-Length says.
//   - The body of an error is an Error. That of a 5xx does not tell the cause.
//   - openapi.json describes the responses of operations: see wantDocumented.
func (r reply) wantRules(t testing.TB) {
	t.Helper()
	r.wantHeader(t, "Cache-Control", "no-store")
	r.wantHeader(t, "Content-Type", "application/json")
	r.wantHeader(t, "X-Content-Type-Options", "nosniff")
	if id := r.header.Get("X-Request-Id"); !regexp.MustCompile("^[A-Z2-7]{26}$").MatchString(id) {
		t.Fatalf("%s has the X-Request-Id %q, want 26 characters of base32", r.request(), id)
	}
	statuses := map[string]int{"WWW-Authenticate": 401, "Allow": 405, "Retry-After": 503}
	for name, status := range statuses {
		if has := r.header.Get(name) != ""; has != (r.status == status) {
			t.Fatalf("%s = %d has %s: %v", r.request(), r.status, name, has)
		}
	}

	if r.method != "HEAD" {
		r.wantHeader(t, "Content-Length", strconv.Itoa(len(r.body)))
		if !json.Valid([]byte(r.body)) {
			t.Fatalf("%s = %.2000s, want JSON", r.request(), r.body)
		}
		if r.status >= 400 {
			r.wantErrorShape(t)
		}
	}
	r.wantDocumented(t)
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

// wantDocumented checks that openapi.json describes a response, if an operation has sent it: its
// status, its headers, and the members of its body, or of the items of a list.
func (r reply) wantDocumented(t testing.TB) {
	t.Helper()
	path, _, _ := strings.Cut(r.target, "?")
	path, inAPI := strings.CutPrefix(path, "/v1") // the URL of the server
	path = regexp.MustCompile(`^/pets/[^/]+$`).ReplaceAllString(path, "/pets/{petId}")
	method := strings.ToLower(r.method)
	if method == "head" {
		method = "get" // a response to HEAD is that to GET, without the body
	}
	operation := document().Paths[path][method]
	if operation == nil || !inAPI {
		return
	}

	response, found := operation.Responses[strconv.Itoa(r.status)]
	if !found {
		t.Fatalf("%s = %d, which openapi.json does not describe", r.request(), r.status)
	}
	r.wantDocumentedHeaders(t, response.Headers)
	if r.method == "HEAD" {
		return
	}

	described := response.Content[jsonType].Schema
	var objects []map[string]any
	if described.Items == nil {
		objects = append(objects, decode[map[string]any](t, r.body))
	} else { // a list
		objects, described = decode[[]map[string]any](t, r.body), *described.Items
	}
	for _, object := range objects {
		for name, value := range object {
			property, found := described.Properties[name]
			if got := fmt.Sprintf("%T", value); !found || goTypes[property.Type] != got {
				t.Fatalf("%s has the member %s, a %s, unlike openapi.json: %s",
					r.request(), name, got, r.body)
			}
		}
	}
}

// goTypes has the types of OpenAPI, and those that decode makes of them.
var goTypes = map[string]string{"string": "string", "integer": "json.Number", "boolean": "bool"}

// wantDocumentedHeaders checks that a response has the headers that are described, and no others
// but those of all HTTP responses.
func (r reply) wantDocumentedHeaders(t testing.TB, described map[string]header) {
	t.Helper()
	names := []string{"Cache-Control", "Connection", "Content-Length", "Content-Type", "Date",
		"X-Content-Type-Options"}
	for name, header := range described {
		names = append(names, http.CanonicalHeaderKey(name))
		value := r.header.Get(name)
		if value == "" && !header.Required {
			continue
		}
		matches := regexp.MustCompile(header.Schema.Pattern).MatchString(value)
		listed := header.Schema.Enum == nil || slices.Contains(header.Schema.Enum, value)
		if value == "" || !matches || !listed {
			t.Fatalf("%s = %d has %s: %q, unlike openapi.json", r.request(), r.status, name, value)
		}
	}

	for name := range r.header {
		if !slices.Contains(names, name) {
			t.Fatalf("%s = %d has %s, which openapi.json does not describe",
				r.request(), r.status, name)
		}
	}
}

// decode decodes a body. It fails the test if the body has a member that v has not.
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
