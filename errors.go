package main

import (
	"fmt"
	"net/http"
)

// apiError is an error that is shown to the client: the Error object of the API.
type apiError struct {
	Code    string `json:"code"`    // one of errorCodes
	Message string `json:"message"` // for people
	Status  int    `json:"status"`  // the HTTP status of the response
}

func (e *apiError) Error() string { return e.Message }

// errorCodes maps each status of an error to its machine-readable code. Never change a code:
// clients may rely on it.
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

	// These come from net/http: see jsonErrorListener.
	http.StatusExpectationFailed:           "expectation_failed",
	http.StatusRequestHeaderFieldsTooLarge: "headers_too_large",
	http.StatusNotImplemented:              "not_implemented",
	http.StatusHTTPVersionNotSupported:     "http_version_not_supported",
}

// The errors that have a name, because the store returns them. errRefused and errUnavailable are
// wrapped together with their cause, which is for the log: the client never sees it.
var (
	errNotFound = newError(http.StatusNotFound,
		"there is no animal with this id")
	errIdempotencyKeyReused = newError(http.StatusUnprocessableEntity,
		"this Idempotency-Key was used for another animal")

	// errRefused means that the pet breaks a rule that the operator has added to the database, such
	// as a unique index.
	errRefused = newError(http.StatusBadRequest,
		"a rule in the database of the shop refuses this animal")

	// errUnavailable means that the request may succeed later. For a create, it also means that
	// nothing was stored.
	errUnavailable = newError(http.StatusServiceUnavailable,
		"the database is temporarily unavailable")
)

// newError returns an apiError with a status from errorCodes.
func newError(status int, format string, args ...any) *apiError {
	return &apiError{
		Code:    errorCodes[status],
		Message: fmt.Sprintf(format, args...),
		Status:  status,
	}
}
