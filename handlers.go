package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"mime"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	defaultLimit = 20       // pets on a page
	maxLimit     = 100      // pets on a page
	maxBody      = 64 << 10 // bytes, many times what a pet needs
	maxFaults    = 10       // faults that one error message lists; more would hardly be read

	maxIdempotencyKey = 255 // bytes
)

// routes returns the handlers, by ServeMux pattern. All but those of open need an API key.
func routes(st *store, k apiKeys) map[string]handler {
	a := &api{store: st}
	open := map[string]handler{
		"GET /healthz":      a.getHealth,
		"GET /openapi.json": getOpenAPI,
	}
	handlers := map[string]handler{
		"GET /v1/pets":         a.listPets,
		"POST /v1/pets":        a.createPet,
		"GET /v1/pets/{petId}": deprecated(a.getPet),

		// All other methods of these paths get 405, and not the 404 of unknown paths.
		"/healthz":         methodNotAllowed("GET, HEAD"),
		"/openapi.json":    methodNotAllowed("GET, HEAD"),
		"/v1/pets":         methodNotAllowed("GET, HEAD, POST"),
		"/v1/pets/{petId}": methodNotAllowed("GET, HEAD"),

		"/": unknownPath,
	}

	for pattern, h := range handlers {
		handlers[pattern] = k.requireKey(h)
	}
	maps.Copy(handlers, open)
	return handlers
}

// api has the handlers that need the store.
type api struct{ store *store }

// listPets answers GET /v1/pets with a page of pets, and a Link to the next page if there is one
// (RFC 8288).
func (a *api) listPets(r *request) (any, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, newError("invalid_request", "the query string is malformed")
	}
	options, err := parseListOptions(query)
	if err != nil {
		return nil, err
	}

	limit := options.limit
	options.limit++ // to see whether more pets follow
	pets, err := a.store.list(options)
	if err != nil {
		return nil, err
	}

	if len(pets) > limit {
		pets = pets[:limit]
		query.Set("after", strconv.FormatInt(pets[limit-1].ID, 10))
		// The URL is relative to that of the request, because a proxy may have shortened the path.
		r.responseHeader.Set("Link", "<pets?"+query.Encode()+`>; rel="next"`)
	}
	return pets, nil
}

// createPet answers POST /v1/pets: it stores the pet that the body describes, and returns it with
// its id.
func (a *api) createPet(r *request) (any, error) {
	if err := checkContentType(r.Header.Values("Content-Type")); err != nil {
		return nil, err
	}
	idempotencyKey, err := parseIdempotencyKey(r.Header.Values("Idempotency-Key"))
	if err != nil {
		return nil, err
	}
	body, err := readBody(r)
	if err != nil {
		return nil, err
	}
	newPet, err := parseNewPet(body)
	if err != nil {
		return nil, err
	}

	pet, replayed, err := a.store.create(r.caller, idempotencyKey, newPet)
	if err != nil {
		return nil, err
	}
	r.status = http.StatusCreated
	// The URL of the new pet (RFC 9110) is that of getPet, and works until getPet is removed.
	r.responseHeader.Set("Location", "pets/"+strconv.FormatInt(pet.ID, 10))
	if replayed {
		r.responseHeader.Set("Idempotency-Replayed", "true")
	}
	return pet, nil
}

// getPet answers GET /v1/pets/{petId}.
func (a *api) getPet(r *request) (any, error) {
	id, ok := parseInt(r.PathValue("petId"))
	if !ok {
		return nil, errNotFound
	}
	return a.store.get(id)
}

// getHealth answers GET /healthz: 200 if the database is in its place and can be read, otherwise
// 503.
func (a *api) getHealth(*request) (any, error) {
	if err := a.store.checkHealth(); err != nil {
		return nil, fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return map[string]string{"status": "ok"}, nil
}

//go:embed openapi.json
var openAPI json.RawMessage

// getOpenAPI answers GET /openapi.json.
func getOpenAPI(*request) (any, error) { return openAPI, nil }

// deprecated adds two headers to each response of next: Sunset says when the operation will be
// removed (RFC 8594), and Link leads to the operation that replaces it (RFC 5829). There is no
// Deprecation header (RFC 9745): it needs the date since when the operation is deprecated, and
// nobody has set that.
func deprecated(next handler) handler {
	return func(r *request) (any, error) {
		r.responseHeader.Set("Sunset", "Thu, 05 Dec 2030 00:00:00 GMT")
		r.responseHeader.Set("Link", `<../pets>; rel="successor-version"`)
		return next(r)
	}
}

// methodNotAllowed answers a request for a known path with a method other than the allowed ones.
func methodNotAllowed(allowed string) handler {
	return func(r *request) (any, error) {
		r.responseHeader.Set("Allow", allowed)
		return nil, newError("method_not_allowed", "this path allows only %s", allowed)
	}
}

// unknownPath answers a request for an unknown path.
func unknownPath(*request) (any, error) {
	return nil, newError("unknown_path",
		"there is nothing at this path; the paths of the API begin with /v1/pets")
}

// parseListOptions parses the query of a list. It refuses unknown parameters, so that a client with
// a typo gets a 400, and not a list of other pets.
func parseListOptions(query url.Values) (listOptions, error) {
	o := listOptions{limit: defaultLimit}
	var f faults
	for _, name := range slices.Sorted(maps.Keys(query)) { // sorted, so that messages do not vary
		f.require(len(query[name]) == 1, "%.64q must not be repeated", name)
		value := query[name][0]

		switch name {
		case "limit":
			n, ok := parseInt(value)
			f.require(ok && n >= 1 && n <= maxLimit, "limit must be an integer from 1 to %d", maxLimit)
			o.limit = int(n)
		case "status":
			o.status = value
			f.requireStatus(value)
		case "after":
			n, ok := parseInt(value)
			f.require(ok && n >= 0, "after must be an integer from 0 to %d", int64(math.MaxInt64))
			o.after = n
		default:
			f.add("unknown parameter %.64q", name)
		}
	}
	return o, f.err()
}

// parseInt parses a decimal int64. It refuses forms such as +1, 01 and -0.
func parseInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// checkContentType returns a 415 unless Content-Type is missing, or given once as application/json.
func checkContentType(values []string) error {
	if len(values) == 0 {
		return nil
	}
	mediaType, _, err := mime.ParseMediaType(values[0])
	if len(values) > 1 || err != nil || mediaType != "application/json" {
		return newError("unsupported_media_type",
			"Content-Type must be application/json, not %.64q", strings.Join(values, ", "))
	}
	return nil
}

// parseIdempotencyKey returns the value of the Idempotency-Key header, or "" if there is none.
func parseIdempotencyKey(values []string) (string, error) {
	if len(values) == 0 {
		return "", nil
	}
	key := values[0]
	if len(values) > 1 || key == "" || len(key) > maxIdempotencyKey || !isVisibleASCII(key) {
		return "", newError("invalid_request",
			"Idempotency-Key must be one value of 1 to %d visible ASCII characters", maxIdempotencyKey)
	}
	return key, nil
}

// readBody returns the body of the request, or an apiError: 413, 408 or 400.
func readBody(r *request) ([]byte, error) {
	tooLarge := newError("body_too_large", "the request body is larger than %d bytes", maxBody)
	// Refuse a body by its declared size, before it is read. If that is more than maxDiscard, nothing
	// of it is read, and a client that waits for 100 Continue does not send it.
	if r.ContentLength > maxBody {
		return nil, tooLarge
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	switch {
	case len(body) > maxBody:
		return nil, tooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, newError("request_timeout",
			"the request did not arrive within %.0f seconds", readTimeout.Seconds())
	case err != nil:
		return nil, newError("invalid_request", "the request body could not be read to its end")
	}
	return body, nil
}

// parseNewPet parses body as a NewPet. Its error is a 400 that names the faults, up to maxFaults.
func parseNewPet(body []byte) (NewPet, error) {
	p := NewPet{Status: "available"}
	if !utf8.Valid(body) || bytes.HasPrefix(body, []byte("\ufeff")) {
		return p, newError("invalid_request",
			"the body must be UTF-8 without a byte order mark, and not compressed")
	}
	members, err := parseObject(body)
	if err != nil {
		return p, newError("invalid_request", "the body must be one JSON object: %v", err)
	}

	var f faults
	seen := map[string]bool{}
	for _, m := range members {
		f.require(!seen[m.name], "%.64q must not be repeated", m.name)
		seen[m.name] = true

		var ok bool
		switch m.name {
		case "name":
			p.Name, ok = parseName(m.value)
			f.require(ok, "name must be a string of 1 to %d characters, not all white space, "+
				"without U+0000, U+FFFD or unpaired surrogates", maxName)
		case "categoryId":
			p.CategoryID, ok = parseInt(string(m.value))
			f.require(ok, "categoryId must be an integer from %d to %d, "+
				"with no fraction, exponent or quotes", int64(math.MinInt64), int64(math.MaxInt64))
		case "status":
			p.Status = unquote(m.value)
			f.requireStatus(p.Status)
		default:
			f.add("unknown member %.64q", m.name)
		}
	}

	f.require(seen["name"], "name is required")
	f.require(seen["categoryId"], "categoryId is required")
	return p, f.err()
}

// member is a member of a JSON object. Its value is valid JSON.
type member struct {
	name  string
	value json.RawMessage
}

// parseObject parses body, which must be one JSON object, and returns its members, also repeated
// and unknown ones, with their values as they were sent. (json.Unmarshal into a NewPet accepts
// repeated and unknown members, null, and member names in another case, and it replaces invalid
// Unicode.)
func parseObject(body []byte) (members []member, err error) {
	// Check the syntax. Unlike a Decoder, Unmarshal also finds what follows the object.
	if err := json.Unmarshal(body, new(json.RawMessage)); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(body))
	if first, err := d.Token(); err != nil || first != json.Delim('{') {
		return nil, errors.New("it is another value")
	}

	for d.More() {
		// There are no errors here, because the syntax is valid.
		name, _ := d.Token()
		var value json.RawMessage
		d.Decode(&value)
		members = append(members, member{name.(string), value}) // JSON has no other names
	}
	return members, nil
}

// unquote returns the string in a valid JSON value, or "" if the value is not a string.
func unquote(value []byte) (s string) {
	json.Unmarshal(value, &s) // an error leaves s empty
	return s
}

// parseName returns the name in a valid JSON value, and whether it is a valid name.
//
// A name with U+FFFD is not valid, because some character was lost: encoding/json puts U+FFFD in
// the place of an unpaired surrogate, and other programs in the place of what they cannot decode.
func parseName(value []byte) (name string, ok bool) {
	name = unquote(value) // blank if value is not a string
	blank := strings.TrimSpace(name) == ""
	tooLong := utf8.RuneCountInString(name) > maxName
	return name, !blank && !tooLong && !strings.ContainsAny(name, "\x00\ufffd")
}

// faults lists what is wrong with a request, so that the client can correct it all at once.
type faults []string

// add adds a fault, unless f already has maxFaults. Use %.64q for what the client has sent: it
// quotes at most 64 characters.
func (f *faults) add(format string, args ...any) {
	if len(*f) < maxFaults {
		*f = append(*f, fmt.Sprintf(format, args...))
	}
}

// require adds a fault unless ok is true.
func (f *faults) require(ok bool, format string, args ...any) {
	if !ok {
		f.add(format, args...)
	}
}

// requireStatus adds a fault unless status is one of petStatuses.
func (f *faults) requireStatus(status string) {
	f.require(slices.Contains(petStatuses, status),
		"status must be one of %s, or be left out", strings.Join(petStatuses, ", "))
}

// err returns nil if there are no faults, otherwise a 400 that lists them.
func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	return newError("invalid_request", "%s", strings.Join(f, "; "))
}
