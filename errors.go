package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// apiError is an error that the client is told of: the Error object of the interface. Any other error
// stays in the log, see toAPIError.
type apiError struct {
	Code    string `json:"code"`    // one of errorCodes
	Message string `json:"message"` // for a person to read
	Status  int    `json:"status"`  // the HTTP status of the response
}

func (e *apiError) Error() string { return e.Message }

// errorCodes holds the machine-readable code of each status that an error is answered with.
// Clients rely on them.
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

// newError returns an apiError of a status that is in errorCodes.
func newError(status int, format string, args ...any) *apiError {
	return &apiError{Code: errorCodes[status], Message: fmt.Sprintf(format, args...), Status: status}
}

// Errors of the store's methods that callers tell apart, with errors.Is. After errUnavailable nothing is stored.
var (
	errNotFound    = newError(http.StatusNotFound, "there is no animal with this id")
	errKeyReused   = newError(http.StatusUnprocessableEntity, "this Idempotency-Key was used for another animal")
	errUnavailable = newError(http.StatusServiceUnavailable, "the store is not available; try again")
)

// toAPIError returns the apiError in err, or one that only says that there is an internal error.
func toAPIError(err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	return newError(http.StatusInternalServerError, "internal error")
}

// faults gathers all that is wrong with one request, so that the client can mend everything at once.
type faults []string

func (f *faults) add(format string, args ...any) { *f = append(*f, fmt.Sprintf(format, args...)) }

// err returns a 400 that names the faults (the first few and a count where there are very many),
// or nil if there are none.
func (f faults) err() error {
	const most = 10
	if len(f) == 0 {
		return nil
	}
	message := strings.Join(f[:min(len(f), most)], "; ")
	if len(f) > most {
		message += fmt.Sprintf("; and %d more", len(f)-most)
	}
	return newError(http.StatusBadRequest, "%s", message)
}
