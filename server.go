package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path"
	"runtime/debug"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	readHeaderTimeout = 5 * time.Second  // for the headers of a request
	readTimeout       = 10 * time.Second // for the headers and the body

	// writeTimeout runs from the end of the headers of the request to the end of the response. Of
	// its 25 seconds, the body takes at most 10 (readTimeout), and a create waits at most 4 for
	// locks (twice busyTimeout). The other 11 are for the client to read the response.
	writeTimeout = 25 * time.Second

	// idleTimeout is longer than that of common proxies (nginx 60 seconds, Caddy 120), so that a
	// proxy closes an idle connection first. Otherwise, the proxy could send a request just when
	// the service closes the connection.
	idleTimeout = 150 * time.Second

	// drainTime is how long new requests on open connections are still served after a stop signal.
	// It is longer than a small request is on its way, even from another continent.
	drainTime = 250 * time.Millisecond

	// shutdownTime is how long requests in progress may take after drainTime. It is longer than a
	// create waits for locks (twice busyTimeout), and than readHeaderTimeout, which ends a
	// connection that has sent nothing.
	shutdownTime = 6 * time.Second

	maxHeader = 16 << 10 // bytes of the request line and all headers

	// maxDiscard limits how many bytes of a body are read and discarded after the handler: see
	// answer. By default, nginx passes on no larger body.
	maxDiscard = 1 << 20
)

// serviceHeader has the headers of all responses, also of those that net/http itself sends. Each
// response has an X-Request-Id, too.
var serviceHeader = http.Header{
	"Cache-Control":          {"no-store"},
	"Content-Type":           {"application/json"},
	"X-Content-Type-Options": {"nosniff"},
}

// handler answers a request. Unlike an http.Handler, it can return an error, and cannot send two
// responses.
//
// It returns either the body of the response, which is sent as JSON, or an error. If err is or
// wraps an apiError, the client gets that, otherwise a 500.
type handler func(r *request) (body any, err error)

// request is an HTTP request, and what the service knows about it.
type request struct {
	*http.Request
	id     string // the X-Request-Id of the response
	caller []byte // the SHA-256 sum of the API key, set by requireKey if the key is valid

	// The handler may set status, which is 200 at first, and add to responseHeader. If the handler
	// returns an error, the response has the status of the error, and all of responseHeader.
	status         int
	responseHeader http.Header
}

// server answers requests with its handlers. It is an http.Handler.
type server struct {
	mux         *http.ServeMux
	unknownPath handler
	logger      *slog.Logger
	draining    atomic.Bool // set when a stop begins: responses then close their connections
}

// newServer returns a server with these handlers, by ServeMux pattern. One of the patterns is "/",
// for unknown paths.
func newServer(handlers map[string]handler, logger *slog.Logger) *server {
	s := &server{mux: http.NewServeMux(), unknownPath: handlers["/"], logger: logger}
	for pattern, h := range handlers {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
	}
	return s
}

// ServeHTTP answers a request with the handler of its route.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// A path that is not clean, such as //v1/pets, is unknown. ServeMux would redirect most of
	// them.
	if p := r.URL.EscapedPath(); p != path.Clean("/"+p) {
		s.answer(w, r, s.unknownPath)
		return
	}
	s.mux.ServeHTTP(w, r)
}

// answer answers a request with h, and logs it.
func (s *server) answer(w http.ResponseWriter, httpRequest *http.Request, h handler) {
	start := time.Now()
	r := &request{
		Request:        httpRequest,
		id:             rand.Text(),
		status:         http.StatusOK,
		responseHeader: w.Header(),
	}
	maps.Copy(r.responseHeader, serviceHeader)
	r.responseHeader.Set("X-Request-Id", r.id)

	body, err := callHandler(h, r)
	if err != nil {
		e := errorForClient(err)
		r.status, body = e.Status, e
	}
	if r.status == http.StatusServiceUnavailable {
		r.responseHeader.Set("Retry-After", "1") // seconds
	}
	// Only a client with a valid API key may hold a connection for idleTimeout.
	if r.caller == nil || s.draining.Load() {
		r.responseHeader.Set("Connection", "close")
	}
	// Many clients send the whole body before they read the response. If the connection closed
	// meanwhile, they would miss it. So first read the rest of the body, unless Content-Length,
	// which is -1 for a chunked body, says that it is too large. (A client that waits for 100
	// Continue gets that from this read.)
	//
	// net/http itself would read less, and nothing on a connection that it then closes.
	if r.ContentLength <= maxDiscard {
		io.CopyN(io.Discard, r.Body, maxDiscard)
	}

	content := encode(body)
	r.responseHeader.Set("Content-Length", strconv.Itoa(len(content)))
	w.WriteHeader(r.status)
	w.Write(content) // an error means that the client is gone, or too slow
	s.logRequest(r, time.Since(start), err)
}

// callHandler calls h. It returns a panic as an error with the stack: a 500 for this request alone.
// (A panic in the store ends the program instead: see exitOnPanic.)
func callHandler(h handler, r *request) (body any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(r)
}

// errorForClient returns the apiError that err is or wraps. For any other err, it returns a 500
// that tells nothing of err.
func errorForClient(err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	return newError("internal", "internal error")
}

// encode returns v as JSON, followed by a line break. It does not escape <, > and &. It panics if v
// cannot be encoded.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // a mistake in the code
	}
	return b.Bytes()
}

// logRequest logs a request, the status of its response, and the error of its handler unless that
// is nil.
func (s *server) logRequest(r *request, duration time.Duration, err error) {
	// The method and the path are cut, because clients decide how long they are.
	args := []any{
		"id", r.id,
		"client", r.RemoteAddr,
		"method", fmt.Sprintf("%.20s", r.Method),
		"path", fmt.Sprintf("%.1000s", r.URL.Path),
		"status", r.status,
		"duration_ms", float64(duration.Microseconds()) / 1000,
	}
	if r.caller != nil {
		// Four bytes are enough to tell keys apart.
		args = append(args, "key_sha256", hex.EncodeToString(r.caller[:4]))
	}
	if err != nil {
		args = append(args, "error", err)
	}

	level := slog.LevelInfo
	if r.status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	s.logger.Log(r.Context(), level, "request", args...)
}

// serve accepts connections from ln and answers requests until ctx is cancelled. Then it stops
// within drainTime plus shutdownTime, and returns nil. If ln fails for good, it returns the error.
func (s *server) serve(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:           s,
		ReadTimeout:       readTimeout,
		ReadHeaderTimeout: readHeaderTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader - (4 << 10), // net/http allows 4 KiB more than it is told
		ErrorLog:          slog.NewLogLogger(s.logger.Handler(), slog.LevelWarn),

		DisableGeneralOptionsHandler: true, // so that OPTIONS * needs a key
	}

	served := make(chan error, 1) // with a buffer, so that the goroutine ends in any case
	go func() { served <- srv.Serve(jsonErrorListener{ln, s.logger}) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	s.logger.Info("stopping", "cause", context.Cause(ctx))

	// Shutdown closes idle connections at once, and may cut off a request that is just arriving. So
	// first refuse new connections: a client can safely try again. Then, for drainTime, answer
	// requests on open connections, and close each connection after its response.
	ln.Close()
	s.draining.Store(true)
	time.Sleep(drainTime)

	grace, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		s.logger.Warn("connections were cut off")
		srv.Close()
	}
	return nil
}

// jsonErrorListener is a listener whose connections send the errors of net/http itself as
// apiErrors, because the API promises one form for all errors. net/http answers invalid HTTP in
// plain text, and no handler sees such a request.
type jsonErrorListener struct {
	net.Listener
	logger *slog.Logger
}

func (l jsonErrorListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return jsonErrorConn{conn, l.logger}, nil
}

// jsonErrorConn is a connection of a jsonErrorListener.
type jsonErrorConn struct {
	net.Conn
	logger *slog.Logger
}

// Write sends b. If b is an error of net/http itself, Write logs that, and sends an apiError with
// the same status instead.
//
// net/http sends such an error in one Write: a whole response with a status from 400 on, which is
// not JSON. No other Write looks like that:
//   - A response of answer begins with its headers, all in one Write, because they are shorter than
//     the buffer of net/http (4 KiB). They have application/json.
//   - A later part of its body is not a whole response: that has an empty line after its headers,
//     and the JSON of this service has none.
func (c jsonErrorConn) Write(b []byte) (int, error) {
	if !bytes.HasPrefix(b, []byte("HTTP/")) || bytes.Contains(b, []byte("application/json")) {
		return c.Conn.Write(b)
	}
	response, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), nil)
	if err != nil || response.StatusCode < 400 {
		return c.Conn.Write(b)
	}

	id := rand.Text()
	c.logger.Info("request", // at INFO also from 500 on, because it is the client's fault
		"id", id,
		"client", c.RemoteAddr(),
		"status", response.StatusCode,
		"error", response.Status,
	)

	content := encode(&apiError{"invalid_http", response.Status, response.StatusCode})
	response.Header = serviceHeader.Clone()
	response.Header.Set("X-Request-Id", id)
	response.Body = io.NopCloser(bytes.NewReader(content))
	response.ContentLength = int64(len(content))
	var replacement bytes.Buffer
	response.Write(&replacement) // sends Connection: close again, which ReadResponse has found in b
	_, err = c.Conn.Write(replacement.Bytes())
	return len(b), err // a Writer must not return less than len(b) without an error
}

// CloseWrite lets net/http close the connection in two steps, so that a client that is still
// sending receives the response.
func (c jsonErrorConn) CloseWrite() error {
	if conn, ok := c.Conn.(*net.TCPConn); ok {
		return conn.CloseWrite()
	}
	return nil
}
