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
	maxBody      = 64 << 10 // bytes
	maxFaults    = 10       // faults that an error message names

	maxIdempotencyKey = 255 // bytes
)

// routes returns the handlers of the service, by pattern of ServeMux, and the handler of all other
// paths. st must be open.
func routes(st *store, k apiKeys) (handlers map[string]handler, fallback handler) {
	a := &api{store: st}
	return map[string]handler{
		"GET /healthz":         a.getHealth,
		"GET /openapi.json":    getOpenAPI,
		"GET /v1/pets":         k.requireKey(a.listPets),
		"POST /v1/pets":        k.requireKey(a.createPet),
		"GET /v1/pets/{petId}": deprecated(k.requireKey(a.getPet)),

		// These replace ServeMux's own 405, which is not JSON and needs no key.
		"/healthz":         k.requireKey(methodNotAllowed("GET, HEAD")),
		"/openapi.json":    k.requireKey(methodNotAllowed("GET, HEAD")),
		"/v1/pets":         k.requireKey(methodNotAllowed("GET, HEAD, POST")),
		"/v1/pets/{petId}": k.requireKey(methodNotAllowed("GET, HEAD")),
	}, k.requireKey(unknownPath)
}

// api has the handlers that need the store.
type api struct{ store *store }

// listPets answers GET /v1/pets with a page of pets, and a Link to the next page if there is one
// (RFC 8288).
func (a *api) listPets(r *request) (any, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, newError(http.StatusBadRequest, "the query string is malformed")
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
		r.responseHeader.Set("Link", "<pets?"+query.Encode()+`>; rel="next"`)
	}
	return pets, nil
}

// createPet answers POST /v1/pets: it stores the pet that the body describes, and answers with it
// and its id.
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
	p, err := parseNewPet(body)
	if err != nil {
		return nil, err
	}

	stored, replayed, err := a.store.create(r.caller, idempotencyKey, p)
	if err != nil {
		return nil, err
	}

	r.status = http.StatusCreated
	// A 201 names the URL of what it has created (RFC 9110), although GET of it is deprecated.
	r.responseHeader.Set("Location", "pets/"+strconv.FormatInt(stored.ID, 10))
	if replayed {
		r.responseHeader.Set("Idempotency-Replayed", "true")
	}
	return stored, nil
}

// getPet answers GET /v1/pets/{petId} with the pet, which it reads as a list of one.
func (a *api) getPet(r *request) (any, error) {
	id, ok := parseInt(r.PathValue("petId"))
	if !ok || id < 1 {
		return nil, errNotFound
	}
	pets, err := a.store.list(listOptions{after: id - 1, limit: 1}) // the first pet from id on
	if err != nil {
		return nil, err
	}
	if len(pets) == 0 || pets[0].ID != id {
		return nil, errNotFound
	}
	return pets[0], nil
}

// getHealth answers GET /healthz: 200 if the database is in its place and can be read, else 503.
func (a *api) getHealth(*request) (any, error) {
	if err := a.store.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return map[string]string{"status": "ok"}, nil
}

//go:embed openapi.json
var openAPI []byte

// getOpenAPI answers GET /openapi.json.
func getOpenAPI(*request) (any, error) { return openAPI, nil }

// deprecated adds headers to every response of next that say when the operation is removed (RFC
// 8594), and what replaces it.
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
		return nil, newError(http.StatusMethodNotAllowed, "this path allows only %s", allowed)
	}
}

// unknownPath answers a request for an unknown path.
func unknownPath(*request) (any, error) {
	return nil, newError(http.StatusNotFound, "there is nothing at this path")
}

// parseListOptions parses the query of a list. It refuses what it does not know, so that a typo
// cannot list other pets.
func parseListOptions(query url.Values) (listOptions, error) {
	o := listOptions{limit: defaultLimit}
	var v validator
	for _, name := range slices.Sorted(maps.Keys(query)) {
		v.check(len(query[name]) == 1, "%.64q must not be repeated", name)
		value := query[name][0]

		switch name {
		case "limit":
			n, ok := parseInt(value)
			v.check(ok && n >= 1 && n <= maxLimit, "limit must be an integer from 1 to %d", maxLimit)
			o.limit = int(n)
		case "status":
			o.status = value
			v.checkStatus(value)
		case "after":
			n, ok := parseInt(value)
			v.check(ok && n >= 0,
				"after must be the last id of a page, an integer from 0 to %d", int64(math.MaxInt64))
			o.after = n
		default:
			v.check(false, "unknown parameter %.64q", name)
		}
	}
	return o, v.err()
}

// parseInt parses a decimal int64. It refuses forms such as +1, 01 and -0.
func parseInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// checkContentType accepts one Content-Type of application/json, or no such header.
func checkContentType(values []string) error {
	if len(values) == 0 {
		return nil
	}
	value := strings.Join(values, ", ")
	mediaType, _, err := mime.ParseMediaType(value)
	if err != nil || mediaType != "application/json" {
		return newError(http.StatusUnsupportedMediaType,
			"Content-Type must be application/json, not %.64q", value)
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
		return "", newError(http.StatusBadRequest,
			"Idempotency-Key must be one value of 1 to %d visible ASCII characters", maxIdempotencyKey)
	}
	return key, nil
}

// readBody returns the body of the request, or an apiError: 413, 408 or 400.
func readBody(r *request) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	switch {
	case len(body) > maxBody:
		return nil, newError(http.StatusRequestEntityTooLarge,
			"the request body is larger than %d bytes", maxBody)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, newError(http.StatusRequestTimeout,
			"the request did not arrive within %.0f seconds", readTimeout.Seconds())
	case err != nil:
		return nil, newError(http.StatusBadRequest, "the request body could not be read to its end")
	}
	return body, nil
}

// parseNewPet parses body as a NewPet. Its error lists everything that is wrong.
//
// Decoding into a NewPet would accept repeated members, null, and names in another case, and would
// replace invalid Unicode.
func parseNewPet(body []byte) (NewPet, error) {
	p := NewPet{Status: "available"}
	if !utf8.Valid(body) {
		return p, newError(http.StatusBadRequest, "the body must be UTF-8")
	}
	err := json.Unmarshal(body, new(json.RawMessage)) // checks all of body; a Decoder would not
	if err != nil {
		return p, newError(http.StatusBadRequest, "the body must be one JSON object: %v", err)
	}
	d := json.NewDecoder(bytes.NewReader(body)) // cannot fail: body is valid
	if first, _ := d.Token(); first != json.Delim('{') {
		return p, newError(http.StatusBadRequest, "the body must be one JSON object")
	}

	var v validator
	seen := map[string]bool{}
	for d.More() {
		token, _ := d.Token()
		name := token.(string)
		var value json.RawMessage
		d.Decode(&value)

		v.check(!seen[name], "%.64q must not be repeated", name)
		seen[name] = true

		var ok bool
		switch name {
		case "name":
			p.Name, ok = parseName(value)
			v.check(ok, "name must be a string of 1 to %d characters, not all white space, "+
				"without U+0000, U+FFFD or unpaired surrogates", maxName)
		case "categoryId":
			p.CategoryID, ok = parseInt(string(value))
			v.check(ok, "categoryId must be an integer from %d to %d, "+
				"with no fraction, exponent or quotes", int64(math.MinInt64), int64(math.MaxInt64))
		case "status":
			p.Status = unquote(value)
			v.checkStatus(p.Status)
		default:
			v.check(false, "unknown member %.64q", name)
		}
	}

	v.check(seen["name"], "name is required")
	v.check(seen["categoryId"], "categoryId is required")
	return p, v.err()
}

// unquote returns the string that a valid JSON value stands for, or "" if it is not a string.
func unquote(value []byte) (s string) {
	json.Unmarshal(value, &s) // an error leaves s empty
	return s
}

// parseName returns the name in a valid JSON value, and whether it is a valid name.
//
// U+FFFD is not valid, because it stands for a character that was lost: encoding/json returns it
// for an unpaired surrogate, and other programs for what they cannot decode.
func parseName(value []byte) (name string, ok bool) {
	name = unquote(value)
	blank := strings.TrimSpace(name) == ""
	tooLong := utf8.RuneCountInString(name) > maxName
	return name, !blank && !tooLong && !strings.ContainsAny(name, "\x00\ufffd")
}

// validator collects everything that is wrong with a request, so that the client can correct it all
// at once.
type validator struct {
	faults []string // the first maxFaults
	more   int      // the others
}

// check adds a fault unless ok is true.
func (v *validator) check(ok bool, format string, args ...any) {
	switch {
	case ok:
	case len(v.faults) == maxFaults:
		v.more++
	default:
		v.faults = append(v.faults, fmt.Sprintf(format, args...))
	}
}

// checkStatus adds a fault unless status is one of petStatuses.
func (v *validator) checkStatus(status string) {
	v.check(slices.Contains(petStatuses, status),
		"status must be one of %s", strings.Join(petStatuses, ", "))
}

// err returns nil if there are no faults, else a 400 that lists them.
func (v *validator) err() error {
	if len(v.faults) == 0 {
		return nil
	}
	message := strings.Join(v.faults, "; ")
	if v.more > 0 {
		message += fmt.Sprintf("; and %d more", v.more)
	}
	return newError(http.StatusBadRequest, "%s", message)
}
