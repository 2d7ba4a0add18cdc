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
	"sync"
	"unicode/utf8"
)

const (
	defaultLimit = 20       // animals on a page
	maxLimit     = 100      // animals on a page
	maxBody      = 64 << 10 // bytes
	maxFaults    = 10       // faults that an error message names
	maxCache     = 8 << 20  // bytes of cached responses

	maxIdempotencyKey = 255 // bytes

	// maxName is in characters. The schema has it, too: see migrations.
	maxName = 255
)

// petStatuses are the values of PetStatus. The schema has them, too: see migrations.
var petStatuses = []string{"available", "pending", "sold"}

// Parts of error messages.
const (
	statusRule = "status must be available, pending or sold"
	quotedVerb = "%.64q" // for what the client sent: the first 64 characters, in quotes
)

// api has the handlers of the service.
type api struct {
	store *store
	cache cache
}

// routes returns the handler for each pattern of ServeMux. st must be open.
func routes(st *store, k keys) map[string]handler {
	a := &api{store: st}
	return map[string]handler{
		"GET /healthz":         a.getHealth,
		"GET /openapi.json":    getOpenAPI,
		"GET /v1/pets":         k.requireKey(a.cached(a.listPets)),
		"POST /v1/pets":        k.requireKey(a.createPet),
		"GET /v1/pets/{petId}": deprecated(k.requireKey(a.cached(a.getPet))),

		// ServeMux's own 404 and 405 would not be JSON, and would come without a key.
		"/healthz":         k.requireKey(methodNotAllowed("GET, HEAD")),
		"/openapi.json":    k.requireKey(methodNotAllowed("GET, HEAD")),
		"/v1/pets":         k.requireKey(methodNotAllowed("GET, HEAD, POST")),
		"/v1/pets/{petId}": k.requireKey(methodNotAllowed("GET, HEAD")),
		"/":                k.requireKey(notFound),
	}
}

// listPets reads a page of animals for GET /v1/pets, with a Link to the next page if there is
// one (RFC 8288).
func (a *api) listPets(r *http.Request) (response, error) {
	query, f, err := parseFilter(r.URL.RawQuery)
	if err != nil {
		return response{}, err
	}
	pets, more, err := a.store.list(f)
	if err != nil {
		return response{}, err
	}

	resp := response{body: encode(pets)}
	if more {
		last := pets[len(pets)-1]
		query.Set("after", strconv.FormatInt(last.ID, 10))
		resp.link = "</v1/pets?" + query.Encode() + `>; rel="next"`
	}
	return resp, nil
}

// createPet answers POST /v1/pets: it stores the animal that the body describes, and answers
// with it and its id.
func (a *api) createPet(x *exchange) error {
	if err := checkContentType(x.r.Header["Content-Type"]); err != nil {
		return err
	}
	idempotencyKey, err := parseIdempotencyKey(x.r.Header["Idempotency-Key"])
	if err != nil {
		return err
	}
	body, err := readBody(x)
	if err != nil {
		return err
	}
	animal, err := parseNewPet(body)
	if err != nil {
		return err
	}

	stored, replayed, err := a.store.create(x.caller, idempotencyKey, animal)
	if err != nil {
		return err
	}

	// RFC 9110 wants the URL of what a 201 has created, although its operation is deprecated.
	x.Header().Set("Location", "/v1/pets/"+strconv.FormatInt(stored.ID, 10))
	if replayed {
		x.Header().Set("Idempotency-Replayed", "true")
	}
	x.send(http.StatusCreated, encode(stored))
	return nil
}

// getPet reads the animal for GET /v1/pets/{petId}.
func (a *api) getPet(r *http.Request) (response, error) {
	id, ok := parseInt(r.PathValue("petId"))
	if !ok {
		return response{}, errNotFound
	}
	animal, err := a.store.get(id)
	if err != nil {
		return response{}, err
	}
	return response{body: encode(animal)}, nil
}

// getHealth answers GET /healthz: 200 if the files of the database are in their places and it can
// be read, else 503.
func (a *api) getHealth(x *exchange) error {
	if err := a.store.checkHealth(); err != nil {
		return err
	}
	x.send(http.StatusOK, encode(map[string]string{"status": "ok"}))
	return nil
}

//go:embed openapi.json
var openAPI []byte

// getOpenAPI answers GET /openapi.json.
func getOpenAPI(x *exchange) error {
	x.send(http.StatusOK, openAPI)
	return nil
}

// methodNotAllowed answers a request for a known path with a method other than the allowed
// ones.
func methodNotAllowed(allowed string) handler {
	return func(x *exchange) error {
		x.Header().Set("Allow", allowed)
		return newError(http.StatusMethodNotAllowed, "this path allows only %s", allowed)
	}
}

// notFound answers a request for an unknown path.
func notFound(x *exchange) error {
	return newError(http.StatusNotFound, "there is nothing at this path")
}

// response is the part of a response to a GET request that the cache keeps. Its status is 200.
type response struct {
	body []byte // JSON
	link string // the Link header, "" for none
}

// cached answers with what read returns, and keeps it until the database changes. (The watcher
// notices changes by other programs within watchInterval.) The response must depend on the URL
// alone.
func (a *api) cached(read func(r *http.Request) (response, error)) handler {
	return func(x *exchange) error {
		// Counted before the read, so that the response may be newer than its count, but never older.
		changes := a.store.changes()
		resp, err := a.cache.get(x.r.URL.RequestURI(), changes, func() (response, error) {
			return read(x.r)
		})
		if err != nil {
			return err
		}
		if resp.link != "" {
			x.Header().Set("Link", resp.link)
		}
		x.send(http.StatusOK, resp.body)
		return nil
	}
}

// cache holds the responses that were read since the last change of the database. It makes repeated
// requests for a page twice as fast. Its zero value is an empty cache.
type cache struct {
	mu      sync.Mutex
	changes int64                  // of the database, as counted before the responses were read
	size    int                    // of the entries, in bytes, roughly
	entries map[string]*cacheEntry // by URL
}

// cacheEntry is a response, or the error of the attempt to read it, once that has ended.
type cacheEntry struct {
	read sync.Once
	resp response
	err  error
}

// get returns the response for url if it was read when there had been this many changes of the
// database, or more. Otherwise, it calls read. Concurrent calls for one url share one read, also
// its error; later calls read again after an error.
func (c *cache) get(url string, changes int64, read func() (response, error)) (response, error) {
	e := c.entry(url, changes)
	e.read.Do(func() {
		e.err = errors.New("the read has panicked") // unless it returns
		defer c.settle(url, e)
		e.resp, e.err = read()
	})
	return e.resp, e.err
}

// entry returns the entry for url, which may be a new one. It empties the cache if the database has
// changed, or if the cache is full.
func (c *cache) entry(url string, changes int64) *cacheEntry {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.entries == nil || c.changes < changes || c.size > maxCache {
		c.entries = map[string]*cacheEntry{}
		c.changes = changes
		c.size = 0
	}
	e, found := c.entries[url]
	if !found {
		e = &cacheEntry{}
		c.entries[strings.Clone(url)] = e // url may be part of a longer string in memory
	}
	return e
}

// settle counts the size of e, or, after an error, removes it, so that the next request reads again.
func (c *cache) settle(url string, e *cacheEntry) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.entries[url] != e {
		return // the cache was emptied meanwhile
	}
	if e.err != nil {
		delete(c.entries, url)
		return
	}
	const overhead = 300 // bytes that an entry takes beside its texts
	c.size += overhead + len(url) + len(e.resp.body)
}

// parseFilter parses the query of a list. It refuses what it does not know, so that a typo
// cannot list other animals.
func parseFilter(rawQuery string) (query url.Values, f filter, err error) {
	var wrong faults
	f.limit = defaultLimit

	query, err = url.ParseQuery(rawQuery)
	wrong.require(err == nil, "the query string is malformed")

	for _, name := range slices.Sorted(maps.Keys(query)) {
		wrong.require(len(query[name]) == 1, quotedVerb+" must not be repeated", name)
		value := query[name][0]
		n, isInt := parseInt(value)

		switch name {
		case "limit":
			f.limit = int(n)
			wrong.require(isInt && n >= 1 && n <= maxLimit,
				"limit must be an integer from 1 to %d", maxLimit)
		case "status":
			f.status = value
			wrong.require(slices.Contains(petStatuses, value), statusRule)
		case "after":
			f.after = n
			wrong.require(isInt && n >= 0,
				"after must be the last id of a page, an integer from 0 to %d", int64(math.MaxInt64))
		default:
			wrong.add("unknown parameter "+quotedVerb, name)
		}
	}
	return query, f, wrong.err()
}

// parseInt parses a decimal int64. It refuses forms such as +1, 01 and -0.
func parseInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// checkContentType accepts one Content-Type of application/json, or no such header.
func checkContentType(values []string) error {
	if values == nil {
		return nil
	}
	value := strings.Join(values, ", ")
	mediaType, _, err := mime.ParseMediaType(value)
	if len(values) > 1 || err != nil || mediaType != "application/json" {
		return newError(http.StatusUnsupportedMediaType,
			"Content-Type must be application/json, not "+quotedVerb, value)
	}
	return nil
}

// parseIdempotencyKey returns the value of the Idempotency-Key header, or "" if there is none.
func parseIdempotencyKey(values []string) (string, error) {
	if values == nil {
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
func readBody(x *exchange) ([]byte, error) {
	// MaxBytesReader must get the ResponseWriter of net/http, not x, to close the connection
	// after too large a body.
	body, err := io.ReadAll(http.MaxBytesReader(x.ResponseWriter, x.r.Body, maxBody))
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooLarge:
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
// json.Unmarshal alone would accept repeated members, null, and names in another case, and would
// replace invalid Unicode.
func parseNewPet(body []byte) (newPet, error) {
	p := newPet{Status: "available"}
	members, err := openObject(body)
	if err != nil {
		return p, err
	}

	var wrong faults
	seen := map[string]bool{}
	for members.More() {
		name, value := nextMember(members)
		wrong.require(!seen[name], quotedVerb+" must not be repeated", name)
		seen[name] = true

		var ok bool
		switch name {
		case "name":
			p.Name, ok = parseName(value)
			wrong.require(ok, "name must be a string of 1 to %d characters, not all white space, "+
				"without U+0000, U+FFFD or unpaired surrogates", maxName)
		case "categoryId":
			p.CategoryID, ok = parseInt(string(value))
			wrong.require(ok, "categoryId must be an integer from %d to %d, "+
				"with no fraction, exponent or quotes", int64(math.MinInt64), int64(math.MaxInt64))
		case "status":
			p.Status = unquote(value)
			wrong.require(slices.Contains(petStatuses, p.Status), statusRule)
		default:
			wrong.add("unknown member "+quotedVerb, name)
		}
	}

	wrong.require(seen["name"], "name is required")
	wrong.require(seen["categoryId"], "categoryId is required")
	return p, wrong.err()
}

// openObject returns a Decoder that has read the opening brace of the one JSON object in body.
// All that it reads later is valid.
func openObject(body []byte) (*json.Decoder, error) {
	if !utf8.Valid(body) {
		return nil, newError(http.StatusBadRequest, "the body must be UTF-8")
	}
	err := json.Unmarshal(body, new(json.RawMessage)) // a Decoder would stop after one value
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return nil, newError(http.StatusBadRequest,
			"the body must be one JSON object: %v, at byte %d", syntax, syntax.Offset)
	}

	d := json.NewDecoder(bytes.NewReader(body))
	if first, _ := d.Token(); first != json.Delim('{') {
		return nil, newError(http.StatusBadRequest, "the body must be one JSON object")
	}
	return d, nil
}

// nextMember returns the next member of an object of valid JSON.
func nextMember(d *json.Decoder) (name string, value json.RawMessage) {
	token, _ := d.Token()
	name, _ = token.(string)
	d.Decode(&value)
	return name, value
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

// faults collects everything that is wrong with a request, so that the client can correct it all
// at once.
type faults []string

// add adds a fault.
func (f *faults) add(format string, args ...any) {
	*f = append(*f, fmt.Sprintf(format, args...))
}

// require adds a fault unless ok is true.
func (f *faults) require(ok bool, format string, args ...any) {
	if !ok {
		f.add(format, args...)
	}
}

// err returns nil if there are no faults, else a 400 that lists them: if there are many, the
// first maxFaults and a count.
func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	if more := len(f) - maxFaults; more > 0 {
		f = append(f[:maxFaults], fmt.Sprintf("and %d more", more))
	}
	return newError(http.StatusBadRequest, "%s", strings.Join(f, "; "))
}
