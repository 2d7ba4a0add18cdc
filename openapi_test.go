package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
)

// TestDocument compares openapi.json with the constants of the code, and with what the interface
// fixes. (want compares it with the responses of the operations.)
func TestDocument(t *testing.T) {
	t.Parallel()
	d := document()
	list, create := d.Paths["/pets"]["get"], d.Paths["/pets"]["post"]
	getPet := d.Paths["/pets/{petId}"]["get"]

	limit, after := list.parameter("limit").Schema, list.parameter("after").Schema
	key := create.parameter("Idempotency-Key")
	newPet := create.RequestBody.Content[jsonType].Schema
	pet := create.Responses["201"].Content[jsonType].Schema
	page := list.Responses["200"].Content[jsonType].Schema

	for _, c := range []struct {
		name      string
		got, want any // are compared as text, in which a list is [a b]
	}{
		{"the URL of the server", d.Servers[0].URL, "/v1"},
		{"the security", d.Security, "[map[bearerAuth:[]]]"},
		{"the scheme of bearerAuth", d.Components.SecuritySchemes["bearerAuth"].Scheme, "bearer"},

		{"the statuses of listPets", list.statuses(), "[200 400 401 500 503]"},
		{"the least limit", limit.Minimum, 1},
		{"the greatest limit", limit.Maximum, maxLimit},
		{"the default limit", limit.Default, defaultLimit},
		{"the least after", after.Minimum, 0},
		{"the format of after", after.Format, "int64"},
		{"the statuses of animals", list.parameter("status").Schema.Enum, petStatuses},
		{"the longest page", page.MaxItems, maxLimit},
		{"the required members of an error",
			list.Responses["400"].Content[jsonType].Schema.Required, "[code message status]"},

		{"the statuses of createPet", create.statuses(), "[201 400 401 408 413 415 422 500 503]"},
		{"the place of the Idempotency-Key", key.In, "header"},
		{"a required Idempotency-Key", key.Required, false},
		{"the longest Idempotency-Key", key.Schema.MaxLength, maxIdempotencyKey},
		{"the pattern of an Idempotency-Key", key.Schema.Pattern, "^[!-~]+$"},
		{"the required members of a new animal", newPet.Required, "[name categoryId]"},
		{"other members of a new animal", newPet.AdditionalProperties, false},
		{"the shortest name", newPet.Properties["name"].MinLength, 1},
		{"the longest name", newPet.Properties["name"].MaxLength, maxName},
		{"the type of categoryId", newPet.Properties["categoryId"].Type, "integer"},
		{"the format of categoryId", newPet.Properties["categoryId"].Format, "int64"},
		{"the least categoryId", newPet.Properties["categoryId"].Minimum, nil},
		{"the greatest categoryId", newPet.Properties["categoryId"].Maximum, nil},
		{"the required members of an animal", pet.Required, "[id name categoryId status]"},
		{"the format of an id", pet.Properties["id"].Format, "int64"},

		{"the headers of a 503 of getPet", slices.Sorted(maps.Keys(getPet.Responses["503"].Headers)),
			"[Link Retry-After Sunset X-Request-Id]"},
		{"the statuses of getPet", getPet.statuses(), "[200 401 404 500 503]"},
		{"a deprecated getPet", getPet.Deprecated, true},
		{"the format of petId", getPet.parameter("petId").Schema.Format, "int64"},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Errorf("openapi.json has %s = %v, want %v", c.name, c.got, c.want)
		}
	}
}

// TestDescriptions looks for the constants of the code in the texts of openapi.json.
func TestDescriptions(t *testing.T) {
	t.Parallel()
	sentences := []string{
		fmt.Sprintf("until %v hours after the first", idempotencyKeyLifetime.Hours()),
		fmt.Sprintf("for %v hours and across restarts", idempotencyKeyLifetime.Hours()),
		fmt.Sprintf("%d KiB of headers and %d KiB of body", maxHeader>>10, maxBody>>10),
		fmt.Sprintf("%v seconds to send the headers and %v to send the request",
			readHeaderTimeout.Seconds(), readTimeout.Seconds()),
		fmt.Sprintf("sent and read within %v seconds", writeTimeout.Seconds()),
		fmt.Sprintf("closed %v seconds after its last response", idleTimeout.Seconds()),
		fmt.Sprintf("end within %v seconds", shutdownTime.Seconds()),
		// A create may wait for another create, which waits as long: see create.
		fmt.Sprintf("waits up to %v seconds, or up to %v behind",
			busyTimeout.Seconds(), 2*busyTimeout.Seconds()),
	}
	for code, status := range statusByCode { // each has a row in a table
		sentences = append(sentences, fmt.Sprintf("| %d | `%s` |", status, code))
	}

	create := document().Paths["/pets"]["post"]
	text := document().Info.Description + create.Description +
		create.parameter("Idempotency-Key").Description
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
	Parameters  []parameter
	RequestBody struct{ Content content }
	Responses   map[string]struct { // by status
		Headers map[string]header
		Content content
	}
}

// statuses returns the statuses of the responses.
func (o *operation) statuses() []string { return slices.Sorted(maps.Keys(o.Responses)) }

// parameter returns the parameter with this name.
func (o *operation) parameter(name string) (found parameter) {
	for _, p := range o.Parameters {
		if p.Name == name {
			found = p
		}
	}
	return found
}

type parameter struct {
	Name, In, Description string
	Required              bool
	Schema                schema
}

type header struct {
	Required bool
	Schema   schema
}

// content has the schema of a body, by media type.
type content map[string]struct{ Schema schema }

const jsonType = "application/json"

type schema struct {
	Type, Format, Pattern string
	Enum, Required        []string

	// nil if it is missing
	Default, Minimum, Maximum, MaxItems, MinLength, MaxLength any
	Items                                                     *schema
	AdditionalProperties                                      any
	Properties                                                map[string]schema
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
