package main

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
)

// caller identifies whoever holds an API key, by the key's SHA-256 sum. Keys themselves are not kept.
// The zero caller is nobody.
type caller [sha256.Size]byte

// callerOf returns the caller that has the API key.
func callerOf(apiKey string) caller { return sha256.Sum256([]byte(apiKey)) }

// String returns the fingerprint that stands for the caller in the log: the first 8 hex digits.
func (c caller) String() string { return hex.EncodeToString(c[:4]) }

// keys holds the callers whose API keys are valid.
type keys []caller

// newKeys returns the keys among items, trimmed of white space. It skips blank items. Each key must be visible ASCII,
// which includes every token of RFC 6750. Errors name the source and the number of the item, and never quote a key.
func newKeys(source, unit string, items []string) (k keys, err error) {
	for i, item := range items {
		item = strings.TrimSpace(item)
		if item != "" && !isVisible(item) {
			return nil, fmt.Errorf("%s, %s %d: an API key must consist of visible ASCII characters, without spaces", source, unit, i+1)
		}
		if item != "" {
			k = append(k, callerOf(item))
		}
	}
	if len(k) == 0 {
		return nil, fmt.Errorf("%s contains no API key; add one, or leave it out", source)
	}
	return k, nil
}

// isVisible reports whether s consists of visible ASCII characters.
func isVisible(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < '!' || r > '~' })
}

// authenticate returns the caller that the request's one Authorization header names (RFC 6750 section 2.1), or
// else the challenge to answer with (section 3).
func (k keys) authenticate(header http.Header) (c caller, challenge string) {
	challenge = `Bearer realm="animalstore"`
	values := header["Authorization"]
	for _, value := range values {
		scheme, token, _ := strings.Cut(value, " ")
		if token = strings.TrimLeft(token, " "); !strings.EqualFold(scheme, "Bearer") || token == "" {
			continue
		}
		if c := callerOf(token); k.contain(c) && len(values) == 1 {
			return c, ""
		}
		challenge = `Bearer realm="animalstore", error="invalid_token"`
	}
	return caller{}, challenge
}

// contain reports whether c is valid. It takes the same time whatever the keys are.
func (k keys) contain(c caller) bool {
	found := 0
	for _, valid := range k {
		found |= subtle.ConstantTimeCompare(valid[:], c[:])
	}
	return found == 1
}

// comments matches the comment lines of a file with keys.
var comments = regexp.MustCompile(`(?m)^[ \t]*#.*`)

// loadKeys returns the keys in the environment variable API_KEYS (comma-separated) and in the file (one per line; lines
// that begin with # are comments), unless its name is empty. If neither is given, there are no keys; if one is given, it
// must contain a key.
func loadKeys(lookupEnv func(string) (string, bool), file string) (k keys, err error) {
	if list, given := lookupEnv("API_KEYS"); given {
		k, err = newKeys("API_KEYS", "item", strings.Split(list, ","))
		if err != nil {
			return nil, err
		}
	}
	if file == "" {
		return k, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("-keys: %w", err)
	}
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // a byte order mark, from Windows editors
	lines := strings.Split(comments.ReplaceAllString(string(text), ""), "\n")
	inFile, err := newKeys(fmt.Sprintf("-keys %q", file), "line", lines)
	return append(k, inFile...), err
}
