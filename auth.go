package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
)

// keys is the set of valid API keys, as SHA-256 sums, so that the duration of a lookup reveals
// nothing useful about a key.
type keys map[caller]bool

// loadKeys returns the API keys in list, the value of the environment variable API_KEYS, and in
// the file, whose name is "" if there is none: one per line, and lines that begin with # are
// comments. listSet says whether API_KEYS is set, perhaps to nothing.
//
// If either is given, there must be at least one key. With neither, loadKeys returns no keys. An
// error names the place of an invalid key, but never quotes it.
func loadKeys(list string, listSet bool, file string) (keys, error) {
	k := keys{}
	for i, item := range strings.Split(list, ",") {
		if err := k.add(item); err != nil {
			return nil, fmt.Errorf("API_KEYS, item %d: %w", i+1, err)
		}
	}

	if file != "" {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("-keys: %w", err)
		}
		text := strings.TrimPrefix(string(content), "\ufeff") // the byte order mark of some editors
		for i, line := range strings.Split(text, "\n") {
			if strings.HasPrefix(strings.TrimSpace(line), "#") {
				continue
			}
			if err := k.add(line); err != nil {
				return nil, fmt.Errorf("-keys %q: line %d: %w", file, i+1, err)
			}
		}
	}

	if len(k) == 0 && (listSet || file != "") {
		return nil, errors.New("API_KEYS and -keys contain no API key; add one, or set neither of them")
	}
	return k, nil
}

// add adds an API key, without the white space around it. A blank key is skipped. A key must
// consist of visible ASCII characters other than the comma.
func (k keys) add(key string) error {
	key = strings.TrimSpace(key)
	if key == "" {
		return nil
	}
	if !isVisibleASCII(key) || strings.Contains(key, ",") {
		return errors.New("an API key must consist of visible ASCII characters, without spaces or commas")
	}
	k[sha256.Sum256([]byte(key))] = true
	return nil
}

// isVisibleASCII reports whether all characters of s are visible ASCII characters.
func isVisibleASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < '!' || r > '~' })
}

// requireKey passes requests with a valid API key to next. It answers all others with 401 and a
// challenge (RFC 6750).
func (k keys) requireKey(next handler) handler {
	return func(r *request) (response, error) {
		token, given := bearerToken(r.Header)
		who := caller(sha256.Sum256([]byte(token)))
		if given && k[who] {
			r.caller = who
			return next(r)
		}

		challenge := `Bearer realm="animalstore"`
		if given {
			challenge += `, error="invalid_token"`
		}
		r.responseHeader.Set("WWW-Authenticate", challenge)
		return response{}, newError(http.StatusUnauthorized, "a valid API key is required, in one "+
			"header Authorization: Bearer API_KEY; GET /openapi.json describes this interface")
	}
}

// bearerToken returns the token of the Bearer scheme. given is false if there is none, or more
// than one Authorization header.
func bearerToken(header http.Header) (token string, given bool) {
	values := header.Values("Authorization")
	if len(values) != 1 {
		return "", false
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	token = strings.TrimLeft(token, " ")
	return token, strings.EqualFold(scheme, "Bearer") && token != ""
}
