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

// add makes key valid.
func (k *keys) add(key string) {
	if c := caller(sha256.Sum256([]byte(key))); !slices.Contains(*k, c) {
		*k = append(*k, c)
	}
}

// find returns the caller whose API key token is. It compares with every key in constant time, so that
// how long it takes tells nothing about the keys.
func (k keys) find(token string) (caller, bool) {
	sum := caller(sha256.Sum256([]byte(token)))
	found := 0
	for i := range k {
		found |= subtle.ConstantTimeCompare(k[i][:], sum[:])
	}
	return sum, found == 1
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
		if c, ok := k.find(token); ok && len(values) == 1 {
			return c, ""
		}
		challenge = `Bearer realm="animalstore", error="invalid_token"`
	}
	return caller{}, challenge
}

// requireKey lets only requests with a valid API key pass to next; others it answers with 401, whatever else is
// wrong with them.
func (k keys) requireKey(next handlerFunc) handlerFunc {
	return func(w *call, r *http.Request) error {
		c, challenge := k.authenticate(r.Header)
		if challenge != "" {
			w.Header().Set("WWW-Authenticate", challenge)
			return newError(http.StatusUnauthorized, "a valid API key is required: Authorization: Bearer API_KEY")
		}
		w.caller = c
		return next(w, r)
	}
}

// loadKeys returns the keys in the environment variable API_KEYS (comma-separated) and in the file (one a line;
// lines that begin with # are comments; no file if its name is empty). A source that is given must hold a key;
// where none is given, there are no keys. Errors never quote a key.
func loadKeys(lookupEnv func(string) (string, bool), file string) (k keys, err error) {
	if list, given := lookupEnv("API_KEYS"); given {
		if !k.addAll(strings.Split(list, ",")) {
			return nil, errors.New("API_KEYS is set but holds no key: put keys into it, separated by commas, or unset it")
		}
	}
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading the API keys: %w", err)
		}
		lines := strings.Split(strings.TrimPrefix(string(text), "\ufeff"), "\n") // Windows editors begin a file so
		isComment := func(line string) bool { return strings.HasPrefix(strings.TrimSpace(line), "#") }
		if !k.addAll(slices.DeleteFunc(lines, isComment)) {
			return nil, fmt.Errorf("%q holds no API key: put one on each line", file)
		}
	}
	return k, nil
}

// addAll makes the items valid keys, trimmed and without blank ones, and reports whether there are any.
func (k *keys) addAll(items []string) (any bool) {
	for _, item := range items {
		if item = strings.TrimSpace(item); item != "" {
			k.add(item)
			any = true
		}
	}
	return any
}
