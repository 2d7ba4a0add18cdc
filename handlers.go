package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	defaultLimit = 20       // animals on a page
	maxLimit     = 100      // animals on a page
	maxName      = 255      // characters
	maxKey       = 255      // bytes of an Idempotency-Key
	maxBody      = 64 << 10 // bytes
)

// petStatuses are the values of PetStatus.
var petStatuses = []string{"available", "pending", "sold"}

const statusRule = "status must be available, pending or sold"

// listPets answers GET /v1/pets with a page of animals, and with a Link to the next page if there is one (RFC 8288).
func (s *server) listPets(c *call, r *http.Request) error {
	query, page, err := parsePage(r.URL.RawQuery)
	if err != nil {
		return err
	}
	pets, more, err := s.store.list(page)
	if err != nil {
		return err
	}
	if more {
		query.Set("after", strconv.FormatInt(pets[len(pets)-1].ID, 10))
		c.Header().Set("Link", "</v1/pets?"+query.Encode()+`>; rel="next"`)
	}
	return c.sendJSON(http.StatusOK, pets)
}

// createPet answers POST /v1/pets: it stores the animal in the body, and answers with the animal and its id.
func (s *server) createPet(c *call, r *http.Request) error {
	if err := checkContentType(r.Header["Content-Type"]); err != nil {
		return err
	}
	key, err := idempotencyKey(r.Header["Idempotency-Key"])
	if err != nil {
		return err
	}
	r.Header = nil // to free memory while the body arrives, as in answer
	body, err := readBody(c, r)
	if err != nil {
		return err
	}
	animal, err := parseNewPet(body)
	if err != nil {
		return err
	}
	created, replayed, err := s.store.create(c.caller, key, animal)
	if err != nil {
		return err
	}
	c.Header().Set("Location", "/v1/pets/"+strconv.FormatInt(created.ID, 10))
	if replayed {
		c.Header().Set("Idempotency-Replayed", "true")
	}
	return c.sendJSON(http.StatusCreated, created)
}

// getPet answers GET /v1/pets/{petId} with the animal that has this id.
func (s *server) getPet(c *call, r *http.Request) error {
	id, ok := parseInt(r.PathValue("petId"))
	if !ok {
		return errNotFound
	}
	found, err := s.store.get(id)
	if err != nil {
		return err
	}
	return c.sendJSON(http.StatusOK, found)
}

// healthz answers GET /healthz: 200 if the store can be read, else 503.
func (s *server) healthz(c *call, r *http.Request) error {
	err := s.store.inPlace()
	if err == nil {
		_, _, err = s.store.list(page{limit: 1})
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	c.send(http.StatusOK, []byte(`{"status":"ok"}`+"\n"))
	return nil
}

//go:embed openapi.json
var openAPI []byte

// sendOpenAPI answers GET /openapi.json.
func sendOpenAPI(c *call, r *http.Request) error {
	c.send(http.StatusOK, openAPI)
	return nil
}

// methodNotAllowed answers a request for a known path with a method other than the allowed ones.
func methodNotAllowed(allowed string) handler {
	return func(c *call, r *http.Request) error {
		c.Header().Set("Allow", allowed)
		return newError(http.StatusMethodNotAllowed, "the methods here are %s", allowed)
	}
}

// notFound answers a request for an unknown path.
func notFound(c *call, r *http.Request) error {
	return newError(http.StatusNotFound, "there is nothing at this path")
}

// parsePage parses the query of a list, and returns it both as it is and as a page. It refuses everything that it does
// not know: a typo that silently lists other animals would be worse than an error.
func parsePage(rawQuery string) (url.Values, page, error) {
	p := page{limit: defaultLimit}
	var f faults
	query, err := url.ParseQuery(rawQuery)
	if err != nil {
		f.add("the query string is malformed")
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		value := query[name][0]
		n, isInt := parseInt(value)
		switch {
		case name == "limit" && isInt && n >= 1 && n <= maxLimit:
			p.limit = int(n)
		case name == "limit":
			f.add("limit must be an integer from 1 to %d", maxLimit)
		case name == "status" && slices.Contains(petStatuses, value):
			p.status = value
		case name == "status":
			f.add(statusRule)
		case name == "after" && isInt && n >= 0:
			p.after = n
		case name == "after":
			f.add("after must be an integer from 0 to 9223372036854775807, the last id of the page before")
		default:
			f.add("unknown parameter %.64q", name)
			continue
		}
		if len(query[name]) > 1 {
			f.add("%s must be given once", name)
		}
	}
	return query, p, f.err()
}

// parseInt parses an int64 in its canonical form: as strconv.FormatInt writes it.
func parseInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// checkContentType refuses a Content-Type other than application/json. There may be none.
func checkContentType(values []string) error {
	for _, value := range values {
		mediaType, _, err := mime.ParseMediaType(value)
		if err != nil || mediaType != "application/json" || len(values) > 1 {
			return newError(http.StatusUnsupportedMediaType, "Content-Type must be application/json, not %.64q", strings.Join(values, ", "))
		}
	}
	return nil
}

// idempotencyKey returns the value of the Idempotency-Key header, or "" if there is none.
func idempotencyKey(values []string) (string, error) {
	if values == nil {
		return "", nil
	}
	key := values[0]
	if len(values) > 1 || key == "" || len(key) > maxKey || !isVisible(key) {
		return "", newError(http.StatusBadRequest, "Idempotency-Key must be given once, as 1 to %d visible ASCII characters", maxKey)
	}
	return key, nil
}

// readBody returns the body of the request, which may have up to maxBody bytes.
func readBody(c *call, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(c.ResponseWriter, r.Body, maxBody))
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooLarge:
		return nil, newError(http.StatusRequestEntityTooLarge, "the request body is larger than %d bytes", maxBody)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, newError(http.StatusRequestTimeout, "the request body did not arrive in time")
	case err != nil:
		return nil, newError(http.StatusBadRequest, "the request body could not be read to its end")
	}
	c.unread = false
	return body, nil
}

// parseNewPet parses body as a NewPet. Its error names every fault. json.Unmarshal alone would accept repeated members,
// null, and names in another case, and would replace invalid Unicode.
func parseNewPet(body []byte) (newPet, error) {
	p := newPet{Status: "available"}
	if err := checkObject(body); err != nil {
		return p, err
	}
	var f faults
	seen := map[string]bool{}
	parts := split(body)
	for i := 0; i+1 < len(parts); i += 2 {
		name, value := unquote(parts[i]), parts[i+1]
		if seen[name] {
			f.add("%.64q must be given once", name)
			continue
		}
		seen[name] = true
		var ok bool
		switch name {
		case "name":
			p.Name, ok = parseName(value)
			if !ok {
				f.add("name must be a string of 1 to %d characters, not all white space, without U+0000 or unpaired surrogates", maxName)
			}
		case "categoryId":
			p.CategoryID, ok = parseInt(string(value))
			if !ok {
				f.add("categoryId must be an integer from -9223372036854775808 to 9223372036854775807, with no fraction, exponent or quotes")
			}
		case "status":
			p.Status = unquote(value)
			if !slices.Contains(petStatuses, p.Status) {
				f.add(statusRule)
			}
		default:
			f.add("unknown member %.64q", name)
		}
	}
	for _, name := range []string{"name", "categoryId"} {
		if !seen[name] {
			f.add("%s is required", name)
		}
	}
	return p, f.err()
}

// checkObject returns an error unless body is one JSON object in UTF-8.
func checkObject(body []byte) error {
	if !utf8.Valid(body) {
		return newError(http.StatusBadRequest, "the body must be UTF-8")
	}
	if !json.Valid(body) {
		syntax, _ := errors.AsType[*json.SyntaxError](json.Unmarshal(body, new(any)))
		return newError(http.StatusBadRequest, "the body must be one JSON object: %v, at byte %d", syntax, syntax.Offset)
	}
	if bytes.TrimSpace(body)[0] != '{' {
		return newError(http.StatusBadRequest, "the body must be one JSON object")
	}
	return nil
}

// split returns the names and the values of the members of a JSON object in turn, as raw JSON, or one empty part for an
// empty object. The object must be valid. A json.Decoder would add a tenth to the CPU time of a create.
func split(object []byte) (parts [][]byte) {
	start, depth := 0, 0
	for i := 0; i < len(object); i++ {
		switch object[i] {
		case '"': // skip the string
			for i++; object[i] != '"'; i++ {
				if object[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
			if depth == 1 {
				start = i + 1
			}
		case ':', ',', '}', ']':
			if depth == 1 {
				parts = append(parts, bytes.TrimSpace(object[start:i]))
				start = i + 1
			}
			if object[i] == '}' || object[i] == ']' {
				depth--
			}
		}
	}
	return parts
}

// unquote returns the string that a valid JSON value stands for, or "" if it is not a string.
func unquote(value []byte) (s string) {
	if value[0] == '"' && !bytes.Contains(value, []byte(`\`)) {
		return string(value[1 : len(value)-1])
	}
	json.Unmarshal(value, &s) // an error leaves s empty
	return s
}

// wholeEscape matches every escape in a JSON string except an unpaired surrogate. That stands for no character, and
// encoding/json would replace it with U+FFFD.
var wholeEscape = regexp.MustCompile(`(?i)\\([^u]|u[^d]...|ud[0-7]..|ud[89ab]..\\ud[c-f]..)`)

// parseName returns the name in a JSON value, and whether it is valid.
func parseName(value []byte) (name string, ok bool) {
	if bytes.Contains(value, []byte(`\u`)) && bytes.Contains(wholeEscape.ReplaceAll(value, nil), []byte(`\`)) {
		return "", false
	}
	name = unquote(value)
	length := utf8.RuneCountInString(name)
	blank := strings.TrimFunc(name, unicode.IsSpace) == ""
	return name, length >= 1 && length <= maxName && !blank && !strings.ContainsRune(name, 0)
}
