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
	defaultLimit      = 20       // animals on a page
	maxLimit          = 100      // animals on a page
	maxName           = 255      // characters
	maxIdempotencyKey = 255      // bytes
	maxBody           = 64 << 10 // bytes
	statusRule        = "status must be available, pending or sold"
)

var petStatuses = []string{"available", "pending", "sold"} // the values of PetStatus

// listPets reads a page of animals for GET /v1/pets, with a Link to the next page if there is one (RFC 8288).
func (s *server) listPets(r *http.Request) (response, error) {
	query, fl, err := parseFilter(r.URL.RawQuery)
	if err != nil {
		return response{}, err
	}
	pets, more, err := s.store.list(fl)
	if err != nil {
		return response{}, err
	}
	link := ""
	if more {
		query.Set("after", strconv.FormatInt(pets[len(pets)-1].ID, 10))
		link = "</v1/pets?" + query.Encode() + `>; rel="next"`
	}
	return response{encode(pets), link}, nil
}

// createPet answers POST /v1/pets: it stores the animal that the body describes, and answers with it and its id.
func (s *server) createPet(x *exchange, r *http.Request) error {
	if err := checkContentType(r.Header["Content-Type"]); err != nil {
		return err
	}
	key, err := idempotencyKey(r.Header["Idempotency-Key"])
	if err != nil {
		return err
	}
	body, err := readBody(x, r)
	if err != nil {
		return err
	}
	animal, err := parseNewPet(body)
	if err != nil {
		return err
	}
	created, replayed, err := s.store.create(x.caller, key, animal)
	if err != nil {
		return err
	}
	x.Header().Set("Location", "/v1/pets/"+strconv.FormatInt(created.ID, 10))
	if replayed {
		x.Header().Set("Idempotency-Replayed", "true")
	}
	return x.send(http.StatusCreated, encode(created))
}

// getPet reads the animal for GET /v1/pets/{petId}, as the first of the page that begins with its id.
func (s *server) getPet(r *http.Request) (response, error) {
	id, ok := parseInt(r.PathValue("petId"))
	if !ok || id < 1 {
		return response{}, errNotFound
	}
	pets, _, err := s.store.list(filter{after: id - 1, limit: 1})
	if err != nil {
		return response{}, err
	}
	if len(pets) == 0 || pets[0].ID != id {
		return response{}, errNotFound
	}
	return response{body: encode(pets[0])}, nil
}

// healthz answers GET /healthz: 200 if the database is in its place and can be read, else 503.
func (s *server) healthz(x *exchange, r *http.Request) error {
	if err := s.store.requireInPlace(); err != nil {
		return err
	}
	if _, _, err := s.store.list(filter{limit: 1}); err != nil {
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return x.send(http.StatusOK, encode(map[string]string{"status": "ok"}))
}

//go:embed openapi.json
var openAPI []byte

// sendOpenAPI answers GET /openapi.json.
func sendOpenAPI(x *exchange, r *http.Request) error {
	return x.send(http.StatusOK, openAPI)
}

// methodNotAllowed answers a request for a known path with a method other than the allowed ones.
func methodNotAllowed(allowed string) handler {
	return func(x *exchange, r *http.Request) error {
		x.Header().Set("Allow", allowed)
		return newError(http.StatusMethodNotAllowed, "this path allows only %s", allowed)
	}
}

// notFound answers a request for an unknown path.
func notFound(x *exchange, r *http.Request) error {
	return newError(http.StatusNotFound, "there is nothing at this path")
}

// parseFilter parses the query of a list. It refuses what it does not know, so that a typo cannot list other animals.
func parseFilter(rawQuery string) (url.Values, filter, error) {
	fl := filter{limit: defaultLimit}
	var f faults
	query, err := url.ParseQuery(rawQuery)
	f.check(err == nil, "the query string is malformed")
	for _, name := range slices.Sorted(maps.Keys(query)) {
		value := query[name][0]
		n, isInt := parseInt(value)
		switch name {
		case "limit":
			fl.limit = int(n)
			f.check(isInt && n >= 1 && n <= maxLimit, "limit must be an integer from 1 to %d", maxLimit)
		case "status":
			fl.status = value
			f.check(slices.Contains(petStatuses, value), statusRule)
		case "after":
			fl.after = n
			f.check(isInt && n >= 0, "after must be the last id of a page, an integer from 0 to %d", math.MaxInt64)
		default:
			f.add("unknown parameter %.64q", name)
		}
		f.check(len(query[name]) == 1, "%.64q must not be repeated", name)
	}
	return query, fl, f.err()
}

// parseInt parses a decimal int64. It refuses forms such as +1, 01 and -0.
func parseInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// checkContentType accepts one Content-Type of application/json, or no such header.
func checkContentType(values []string) error {
	value := strings.Join(values, ", ")
	mediaType, _, err := mime.ParseMediaType(value)
	if values != nil && (len(values) > 1 || err != nil || mediaType != "application/json") {
		return newError(http.StatusUnsupportedMediaType, "Content-Type must be application/json, not %.64q", value)
	}
	return nil
}

// idempotencyKey returns the value of the Idempotency-Key header, or "" if there is none.
func idempotencyKey(values []string) (string, error) {
	key := strings.Join(values, ", ")
	if values != nil && (len(values) > 1 || key == "" || len(key) > maxIdempotencyKey || !isVisibleASCII(key)) {
		return "", newError(http.StatusBadRequest,
			"Idempotency-Key must be one value of 1 to %d visible ASCII characters", maxIdempotencyKey)
	}
	return key, nil
}

// readBody returns the body of the request, or an apiError: 413, 408 or 400.
func readBody(x *exchange, r *http.Request) ([]byte, error) {
	// MaxBytesReader must get the ResponseWriter of net/http, not x, to close the connection after too large a body.
	body, err := io.ReadAll(http.MaxBytesReader(x.ResponseWriter, r.Body, maxBody))
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooLarge:
		return nil, newError(http.StatusRequestEntityTooLarge, "the request body is larger than %d bytes", maxBody)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, newError(http.StatusRequestTimeout, "the request did not arrive within 10 seconds")
	case err != nil:
		return nil, newError(http.StatusBadRequest, "the request body could not be read to its end")
	}
	return body, nil
}

// parseNewPet parses body as a NewPet. Its error lists the faults. json.Unmarshal alone would accept repeated members,
// null, and names in another case, and would replace invalid Unicode.
func parseNewPet(body []byte) (newPet, error) {
	p := newPet{Status: "available"}
	if !utf8.Valid(body) {
		return p, newError(http.StatusBadRequest, "the body must be UTF-8")
	}
	if !json.Valid(body) { // a Decoder would stop after one value
		e, _ := errors.AsType[*json.SyntaxError](json.Unmarshal(body, new(any))) // always a SyntaxError
		return p, newError(http.StatusBadRequest, "the body must be one JSON object: %v, at byte %d", e, e.Offset)
	}
	var value json.RawMessage
	members := json.NewDecoder(bytes.NewReader(body)) // its errors can be ignored: the JSON is valid
	if first, _ := members.Token(); first != json.Delim('{') {
		return p, newError(http.StatusBadRequest, "the body must be one JSON object")
	}
	var f faults
	seen := map[string]bool{}
	for members.More() {
		token, _ := members.Token()
		name, _ := token.(string)
		members.Decode(&value)
		f.check(!seen[name], "%.64q must not be repeated", name)
		seen[name] = true
		var ok bool
		switch name {
		case "name":
			p.Name, ok = parseName(value)
			f.check(ok, "name must be a string of 1 to %d characters, not all white space, "+
				"without U+0000, U+FFFD or unpaired surrogates", maxName)
		case "categoryId":
			p.CategoryID, ok = parseInt(string(value))
			f.check(ok, "categoryId must be an integer from %d to %d, with no fraction, exponent or quotes",
				math.MinInt64, math.MaxInt64)
		case "status":
			p.Status = unquote(value)
			f.check(slices.Contains(petStatuses, p.Status), statusRule)
		default:
			f.add("unknown member %.64q", name)
		}
	}
	f.check(seen["name"], "name is required")
	f.check(seen["categoryId"], "categoryId is required")
	return p, f.err()
}

// unquote returns the string that a valid JSON value stands for, or "" if it is not a string.
func unquote(value []byte) (s string) {
	json.Unmarshal(value, &s) // an error leaves s empty
	return s
}

// parseName returns the name in a JSON value, and whether it is valid. (U+FFFD stands for a character that was lost.)
func parseName(value []byte) (name string, ok bool) {
	name = unquote(value)
	blank := strings.TrimSpace(name) == ""
	return name, !blank && utf8.RuneCountInString(name) <= maxName && !strings.ContainsAny(name, "\x00\ufffd")
}

// faults collects everything that is wrong with a request, so that the client can fix it all at once.
type faults []string

// add adds a fault.
func (f *faults) add(format string, args ...any) {
	*f = append(*f, fmt.Sprintf(format, args...))
}

// check adds a fault unless ok is true.
func (f *faults) check(ok bool, format string, args ...any) {
	if !ok {
		f.add(format, args...)
	}
}

// err returns nil if there are no faults, else a 400 that lists them: if there are many, the first few and a count.
func (f faults) err() error {
	const most = 10
	if len(f) == 0 {
		return nil
	}
	if more := len(f) - most; more > 0 {
		f = append(f[:most], fmt.Sprintf("and %d more", more))
	}
	return newError(http.StatusBadRequest, "%s", strings.Join(f, "; "))
}
