package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// apiError is an error that is shown to the client: the Error object of the API. Other errors are only logged.
type apiError struct {
	Code    string `json:"code"`    // one of errorCodes
	Message string `json:"message"` // for people
	Status  int    `json:"status"`  // the HTTP status of the response
}

func (e *apiError) Error() string { return e.Message }

// errorCodes maps each status of an error to its machine-readable code. Clients rely on the codes.
var errorCodes = map[int]string{
	http.StatusBadRequest:            "invalid_request",
	http.StatusUnauthorized:          "unauthorized",
	http.StatusNotFound:              "not_found",
	http.StatusMethodNotAllowed:      "method_not_allowed",
	http.StatusRequestTimeout:        "request_timeout",
	http.StatusRequestEntityTooLarge: "body_too_large",
	http.StatusUnsupportedMediaType:  "unsupported_media_type",
	http.StatusUnprocessableEntity:   "idempotency_key_reused",
	http.StatusInternalServerError:   "internal",
	http.StatusServiceUnavailable:    "unavailable",
}

// newError returns an apiError with a status from errorCodes.
func newError(status int, format string, args ...any) *apiError {
	return &apiError{Code: errorCodes[status], Message: fmt.Sprintf(format, args...), Status: status}
}

// Errors that the store and the handlers return, and that are shown to the client. errUnavailable means: nothing was stored.
var (
	errNotFound    = newError(http.StatusNotFound, "there is no animal with this id")
	errKeyReused   = newError(http.StatusUnprocessableEntity, "this Idempotency-Key was used for another animal")
	errUnavailable = newError(http.StatusServiceUnavailable, "the database is unavailable; try again")
)

// faults collects everything that is wrong with a request, so that the client can fix it all at once.
type faults []string

// check adds a fault unless ok is true.
func (f *faults) check(ok bool, format string, args ...any) {
	if !ok {
		*f = append(*f, fmt.Sprintf(format, args...))
	}
}

// err returns nil if there are no faults, else a 400 that lists them: if there are many, the first few and a count.
func (f faults) err() error {
	const most = 10
	if len(f) == 0 {
		return nil
	}
	if more := len(f) - most; more > 0 {
		f = append(f[:most], fmt.Sprintf("and %d more", more))
	}
	return newError(http.StatusBadRequest, "%s", strings.Join(f, "; "))
}

// dbError wraps err in errUnavailable if it is an error of SQLite that may be temporary and after which nothing is stored.
func dbError(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return err
}

// sqliteCode returns the primary result code of an SQLite error, or 0 for any other error.
func sqliteCode(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code() & 0xff
	}
	return 0
}

// explain adds to an error of SQLite what the operator can do.
func explain(err error) error {
	hint := ""
	switch sqliteCode(err) {
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		hint = "it must be a file in an existing folder, and this user must be allowed to write to both"
	case sqlite3.SQLITE_BUSY:
		hint = "another program is using it"
	case sqlite3.SQLITE_IOERR:
		hint = "end all other programs that use it; if there are none, the disk may be failing"
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		hint = "it is damaged: put a backup in with -restore or, if that fails, move its files elsewhere and copy a backup into their place"
	default:
		return err
	}
	return fmt.Errorf("%w: %s", err, hint)
}
