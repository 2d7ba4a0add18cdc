package main

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
)

// caller identifies a client by the SHA-256 sum of its API key. The key itself is not kept. The zero caller is nobody.
type caller [sha256.Size]byte

// callerOf returns the caller that has the API key.
func callerOf(apiKey string) caller { return sha256.Sum256([]byte(apiKey)) }

// keys lists the callers whose API keys are valid.
type keys []caller

// newKeys returns the keys in items, trimmed of white space. It skips blank items, but at least one must hold a key. A key is
// visible ASCII (a superset of RFC 6750's tokens). Errors name source and the number of a bad item, but never quote a key.
func newKeys(source, unit string, items []string) (k keys, err error) {
	for i, item := range items {
		item = strings.TrimSpace(item)
		if !isVisibleASCII(item) {
			return nil, fmt.Errorf("%s, %s %d: an API key must consist of visible ASCII characters, without spaces", source, unit, i+1)
		}
		if item != "" {
			k = append(k, callerOf(item))
		}
	}
	if len(k) == 0 {
		return nil, fmt.Errorf("%s contains no API key; add one, or leave this setting out", source)
	}
	return k, nil
}

// isVisibleASCII reports whether all characters of s are visible ASCII characters.
func isVisibleASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < '!' || r > '~' })
}

// authenticate returns the caller whose key the only Authorization header carries (RFC 6750 section 2.1), or else the
// challenge to answer with (section 3).
func (k keys) authenticate(header http.Header) (c caller, challenge string) {
	challenge = `Bearer realm="animalstore"`
	values := header["Authorization"]
	for _, value := range values {
		scheme, token, _ := strings.Cut(value, " ")
		token = strings.TrimLeft(token, " ")
		if strings.EqualFold(scheme, "Bearer") && token != "" {
			c = callerOf(token)
			challenge = `Bearer realm="animalstore", error="invalid_token"`
		}
	}
	if len(values) == 1 && k.contains(c) {
		return c, ""
	}
	return caller{}, challenge
}

// contains reports whether c is one of k, in a time that does not depend on the keys.
func (k keys) contains(c caller) bool {
	found := 0
	for _, valid := range k {
		found |= subtle.ConstantTimeCompare(valid[:], c[:])
	}
	return found == 1
}

// loadKeys returns the keys in the environment variable API_KEYS (comma-separated) and in the file (one per line; lines
// that begin with # are comments), unless its name is empty. Each that is given must contain a key.
func loadKeys(lookupEnv func(string) (string, bool), file string) (k keys, err error) {
	if list, given := lookupEnv("API_KEYS"); given {
		k, err = newKeys("API_KEYS", "item", strings.Split(list, ","))
	}
	if err != nil || file == "" {
		return k, err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("-keys: %w", err)
	}
	text := strings.TrimPrefix(string(content), "\ufeff") // a byte order mark, from Windows editors
	text = regexp.MustCompile(`(?m)^[ \t]*#.*`).ReplaceAllString(text, "")
	inFile, err := newKeys(fmt.Sprintf("-keys %q", file), "line", strings.Split(text, "\n"))
	return append(k, inFile...), err
}
