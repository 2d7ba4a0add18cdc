package main

import (
	"fmt"
	"net/http"
)

// apiError is an error that is shown to the client: the Error object of the API.
type apiError struct {
	Code    string `json:"code"`    // for programs: names the cause of the error
	Message string `json:"message"` // for people
	Status  int    `json:"status"`  // the HTTP status of the response
}

func (e *apiError) Error() string { return e.Message }

// statusByCode has the codes of the errors, each with the status of its responses. Never change a
// code: clients may rely on it.
//
// One code is not here: invalid_http is the code of all errors of net/http itself, which chooses
// their statuses (see jsonErrorConn).
var statusByCode = map[string]int{
	"invalid_request":        http.StatusBadRequest,
	"refused":                http.StatusBadRequest,
	"unauthorized":           http.StatusUnauthorized,
	"not_found":              http.StatusNotFound,
	"unknown_path":           http.StatusNotFound,
	"method_not_allowed":     http.StatusMethodNotAllowed,
	"request_timeout":        http.StatusRequestTimeout,
	"body_too_large":         http.StatusRequestEntityTooLarge,
	"unsupported_media_type": http.StatusUnsupportedMediaType,
	"idempotency_key_reused": http.StatusUnprocessableEntity,
	"internal":               http.StatusInternalServerError,
	"unavailable":            http.StatusServiceUnavailable,
}

// The errors that have a name, because the store returns them. errRefused and errUnavailable are
// wrapped together with their cause, which is for the log: the client never sees it.
var (
	errNotFound             = newError("not_found", "there is no animal with this id")
	errIdempotencyKeyReused = newError("idempotency_key_reused",
		"this Idempotency-Key was used for another animal")

	// errRefused means that the pet breaks a rule that the operator has added to the database, such
	// as a unique index.
	errRefused = newError("refused", "a rule in the database of the shop refuses this animal")

	// errUnavailable means that the request may succeed later. For a create, it also means that
	// nothing was stored.
	errUnavailable = newError("unavailable", "the database is temporarily unavailable")
)

// newError returns an apiError with a code of statusByCode. It panics if the code is not there.
func newError(code, format string, args ...any) *apiError {
	status, ok := statusByCode[code]
	if !ok {
		panic("unknown code " + code) // a mistake in the code
	}
	return &apiError{Code: code, Message: fmt.Sprintf(format, args...), Status: status}
}
