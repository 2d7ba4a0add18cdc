package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// apiKeys has the SHA-256 sum of each valid API key. The keys themselves are not kept. A lookup
// compares only sums, so its duration reveals nothing useful about a key.
type apiKeys map[[sha256.Size]byte]bool

// parseAPIKeys parses the value of API_KEYS: one or more API keys, separated by commas. A key
// consists of visible ASCII characters other than the comma. White space around it and blank items
// are ignored. An error names the place of an invalid key, but never quotes it.
func parseAPIKeys(list string) (apiKeys, error) {
	k := apiKeys{}
	for i, key := range strings.Split(list, ",") {
		key = strings.TrimSpace(key)
		if key == "" {
			continue
		}
		if !isVisibleASCII(key) {
			return nil, fmt.Errorf("item %d must consist of visible ASCII characters, without spaces", i+1)
		}
		k[sha256.Sum256([]byte(key))] = true
	}
	if len(k) == 0 {
		return nil, errors.New("the list has no key")
	}
	return k, nil
}

// isVisibleASCII reports whether all characters of s are visible ASCII characters.
func isVisibleASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < '!' || r > '~' })
}

// requireKey passes requests with a valid API key to next. It answers all others with 401 and a
// challenge (RFC 6750).
func (k apiKeys) requireKey(next handler) handler {
	return func(r *request) (any, error) {
		challenge := `Bearer realm="animalstore"`
		if token, given := bearerToken(r.Header); given {
			if sum := sha256.Sum256([]byte(token)); k[sum] {
				r.caller = sum[:]
				return next(r)
			}
			challenge += `, error="invalid_token"`
		}
		r.responseHeader.Set("WWW-Authenticate", challenge)
		return nil, newError("unauthorized", "send a valid API key, in one header "+
			"Authorization: Bearer API_KEY; GET /openapi.json describes this interface")
	}
}

// bearerToken returns the token of the Bearer scheme. given is false if there is no such token, or
// more than one Authorization header.
func bearerToken(header http.Header) (token string, given bool) {
	values := header.Values("Authorization")
	if len(values) != 1 {
		return "", false
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	token = strings.TrimLeft(token, " ")
	return token, strings.EqualFold(scheme, "Bearer") && token != ""
}
