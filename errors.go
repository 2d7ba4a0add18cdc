package main

import (
	"errors"
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

// storeErrors has the status for each error of the store. The client also sees the text of err, but
// not of what wraps it.
var storeErrors = []struct {
	err    error
	status int
}{
	{errNotFound, http.StatusNotFound},
	{errIdempotencyKeyReused, http.StatusUnprocessableEntity},
	{errRefused, http.StatusBadRequest},
	{errUnavailable, http.StatusServiceUnavailable},
}

// newError returns an apiError with a status from errorCodes.
func newError(status int, format string, args ...any) *apiError {
	return &apiError{
		Code:    errorCodes[status],
		Message: fmt.Sprintf(format, args...),
		Status:  status,
	}
}

// toAPIError returns what the client may know of an error. The log has all of it.
func toAPIError(err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	for _, known := range storeErrors {
		if errors.Is(err, known.err) {
			return newError(known.status, "%v", known.err)
		}
	}
	return newError(http.StatusInternalServerError, "internal error")
}
