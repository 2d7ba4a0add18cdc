package main

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
)

// caller identifies whoever holds an API key, by the key's SHA-256 sum. Keys themselves are not kept.
// The zero caller is nobody.
type caller [sha256.Size]byte

// String returns the fingerprint that stands for the caller in the log: the first 8 hex digits.
func (c caller) String() string { return hex.EncodeToString(c[:4]) }

// keys holds the callers whose API keys are valid.
type keys []caller

// newKeys returns the keys among items, which it trims. It skips blank items.
func newKeys(items ...string) (k keys) {
	for _, item := range items {
		if item = strings.TrimSpace(item); item != "" {
			k = append(k, sha256.Sum256([]byte(item)))
		}
	}
	return k
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
		if c := caller(sha256.Sum256([]byte(token))); k.contain(c) && len(values) == 1 {
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

// loadKeys returns the keys in the environment variable API_KEYS (comma-separated) and in the file (one a line;
// lines that begin with # are comments; no file if its name is empty). A source that is given must contain a key;
// where none is given, there are no keys. Errors never quote a key.
func loadKeys(lookupEnv func(string) (string, bool), file string) (k keys, err error) {
	if list, given := lookupEnv("API_KEYS"); given {
		if k = newKeys(strings.Split(list, ",")...); len(k) == 0 {
			return nil, errors.New("API_KEYS is set but contains no key: put keys into it, separated by commas, or unset it")
		}
	}
	if file == "" {
		return k, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("-keys: %w", err)
	}
	lines := strings.Split(strings.TrimPrefix(string(text), "\ufeff"), "\n") // Windows editors begin a file so
	isComment := func(line string) bool { return strings.HasPrefix(strings.TrimSpace(line), "#") }
	inFile := newKeys(slices.DeleteFunc(lines, isComment)...)
	if len(inFile) == 0 {
		return nil, fmt.Errorf("-keys %q contains no API key: put one on each line", file)
	}
	return append(k, inFile...), nil
}
