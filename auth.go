package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
)

// caller identifies a client by the SHA-256 sum of its API key. The key itself is not kept. The zero caller is nobody.
type caller [sha256.Size]byte

// keys holds the callers whose API keys are valid. To time lookups reveals nothing: an attacker cannot choose the sums.
type keys map[caller]bool

// loadKeys returns the API keys in the environment variable API_KEYS and in the file, unless its name is empty. If
// either is given, there must be at least one key. Errors name the place of an invalid key, but never quote it.
func loadKeys(lookupEnv func(string) (string, bool), file string) (keys, error) {
	k := keys{}
	list, given := lookupEnv("API_KEYS")
	for i, item := range strings.Split(list, ",") {
		if err := k.add(item); err != nil {
			return nil, fmt.Errorf("API_KEYS, item %d: %w", i+1, err)
		}
	}
	if file != "" {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("-keys %q: %w", file, err)
		}
		for i, line := range strings.Split(strings.TrimPrefix(string(content), "\ufeff"), "\n") { // a byte order mark
			if strings.HasPrefix(strings.TrimSpace(line), "#") {
				continue
			}
			if err := k.add(line); err != nil {
				return nil, fmt.Errorf("-keys %q, line %d: %w", file, i+1, err)
			}
		}
	}
	if len(k) == 0 && (given || file != "") {
		return nil, errors.New("API_KEYS and -keys contain no API key; add one, or set neither of them")
	}
	return k, nil
}

// add adds an API key, trimmed of white space, unless it is blank. A key is visible ASCII without commas.
func (k keys) add(key string) error {
	key = strings.TrimSpace(key)
	if !isVisibleASCII(key) || strings.Contains(key, ",") {
		return errors.New("an API key must consist of visible ASCII characters, without spaces or commas")
	}
	if key != "" {
		k[sha256.Sum256([]byte(key))] = true
	}
	return nil
}

// isVisibleASCII reports whether all characters of s are visible ASCII characters.
func isVisibleASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < '!' || r > '~' })
}

// authenticate returns the caller whose key is in the one Authorization header, and "", or a challenge (RFC 6750).
func (k keys) authenticate(header http.Header) (c caller, challenge string) {
	const missing, invalid = `Bearer realm="animalstore"`, `Bearer realm="animalstore", error="invalid_token"`
	values := header["Authorization"]
	if len(values) != 1 {
		return caller{}, missing
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	token = strings.TrimLeft(token, " ")
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return caller{}, missing
	}
	c = sha256.Sum256([]byte(token))
	if !k[c] {
		return caller{}, invalid
	}
	return c, ""
}
