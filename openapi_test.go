package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// TestDocument compares openapi.json with the constants of the code, and with what the interface
// fixes. (want compares it with the responses of the operations.)
func TestDocument(t *testing.T) {
	t.Parallel()
	list := document().Paths["/pets"]["get"]
	create := document().Paths["/pets"]["post"]
	getPet := document().Paths["/pets/{petId}"]["get"]
	newPet := create.RequestBody.Content[jsonType].Schema

	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"the greatest limit", list.parameter("limit").Maximum, maxLimit},
		{"the smallest limit", list.parameter("limit").Minimum, 1},
		{"the default limit", list.parameter("limit").Default, defaultLimit},
		{"a deprecated getPet", getPet.Deprecated, true},
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
		{"the format of petId", getPet.parameter("petId").Format, "int64"},
		{"the format of after", list.parameter("after").Format, "int64"},
		{"the smallest after", list.parameter("after").Minimum, 0},
		{"the statuses of getPet", slices.Sorted(maps.Keys(getPet.Responses)), "[200 401 404 500 503]"},
		{"the place of the Idempotency-Key", create.Parameters[0].In, "header"},
		{"a required Idempotency-Key", create.Parameters[0].Required, false},
		{"the pattern of an Idempotency-Key", create.Parameters[0].Schema.Pattern, "^[!-~]+$"},
		{"unknown members of a new animal", newPet.AdditionalProperties, false},
		{"the statuses of listPets", slices.Sorted(maps.Keys(list.Responses)), "[200 400 401 500 503]"},
		{"the statuses of createPet", slices.Sorted(maps.Keys(create.Responses)),
			"[201 400 401 408 413 415 422 500 503]"},
		{"the members of an animal", create.Responses["201"].Content[jsonType].Schema.Required,
			"[id name categoryId status]"},
		{"the server", document().Servers[0].URL, "/v1"},
		{"the security", document().Security, "[map[bearerAuth:[]]]"},
		{"the scheme", document().Components.SecuritySchemes["bearerAuth"].Scheme, "bearer"},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Errorf("openapi.json has %s = %v, want %v", c.name, c.got, c.want)
		}
	}

	sentences := []string{
		fmt.Sprintf("until %v hours after the first", idempotencyKeyLifetime.Hours()),
		fmt.Sprintf("for %v hours and across restarts", idempotencyKeyLifetime.Hours()),
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
	text := document().Info.Description + create.Description + create.Parameters[0].Description
	for _, sentence := range sentences {
		if !strings.Contains(text, sentence) {
			t.Errorf("openapi.json has no %q", sentence)
		}
	}
}

// wantDocumented checks that openapi.json describes a response of an operation: its status, its
// headers, and the members of its body, or of the items of a list.
func (r reply) wantDocumented(t testing.TB) {
	t.Helper()
	path, _, _ := strings.Cut(r.target, "?")
	path = regexp.MustCompile(`^/v1/pets/[^/]+$`).ReplaceAllString(path, "/v1/pets/{petId}")
	path, inVersion := strings.CutPrefix(path, "/v1")
	method := strings.Replace(strings.ToLower(r.method), "head", "get", 1)
	operation := document().Paths[path][method]
	if operation == nil || !inVersion {
		return
	}
	response, found := operation.Responses[strconv.Itoa(r.status)]
	if !found {
		t.Fatalf("%s = %d, which openapi.json does not describe", r.request(), r.status)
	}

	names := []string{"Cache-Control", "Connection", "Content-Length", "Content-Type", "Date",
		"X-Content-Type-Options"}
	for name, header := range response.Headers {
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
			t.Fatalf("%s = %d has %s, which openapi.json does not describe", r.request(), r.status, name)
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
				t.Fatalf("openapi.json has no %s %s of %s = %s", want, name, r.request(), r.body)
			}
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
		Name, In, Description string
		Required              bool
		Schema                schema
	}
	RequestBody struct{ Content content }
	Responses   map[string]struct { // by status
		Headers map[string]struct {
			Required bool
			Schema   schema
		}
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
	Type, Format, Pattern                          string
	Default, Minimum, Maximum, MaxItems, MaxLength int
	Enum, Required                                 []string
	Items                                          *schema
	AdditionalProperties                           any
	Properties                                     map[string]schema
}

// document returns openapi.json, with each reference replaced by what it refers to.
var document = sync.OnceValue(func() (d openAPIDocument) {
	var root any
	err := json.Unmarshal(openAPI, &root)
	text, _ := json.Marshal(resolve(root, root))
	if err := errors.Join(err, json.Unmarshal(text, &d)); err != nil {
		panic(err)
	}
	return d
})

// resolve returns a value of a JSON document, root, in which each reference, such as {"$ref":
// "#/components/schemas/Pet"}, is replaced by what it refers to. (It does not end if that refers to
// itself.)
func resolve(root, value any) any {
	switch v := value.(type) {
	case []any:
		for i := range v {
			v[i] = resolve(root, v[i])
		}
	case map[string]any:
		if reference, isReference := v["$ref"].(string); isReference {
			target := root
			for _, name := range strings.Split(reference, "/")[1:] { // after the #
				target = target.(map[string]any)[name]
			}
			return resolve(root, target)
		}
		for name := range v {
			v[name] = resolve(root, v[name])
		}
	}
	return value
}
