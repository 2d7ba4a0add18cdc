package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
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
	// readTimeout is for the whole request, readHeaderTimeout for its headers.
	readTimeout       = 10 * time.Second
	readHeaderTimeout = 5 * time.Second

	// writeTimeout counts from the end of the headers. It leaves time to read the body, to store the
	// creates before this one, and this one, in a database that is locked, and to send the response.
	writeTimeout = readTimeout + 2*(retryTime+busyTimeout) + time.Second

	// idleTimeout is longer than that of common proxies (nginx 60 seconds, Caddy 120), so that they
	// close first: a proxy could send a request just when the service closes the connection.
	idleTimeout = 150 * time.Second

	// maxHeader is for the request line and all headers, in bytes.
	maxHeader = 16 << 10

	// After a stop signal, the server accepts requests for drainTime. Those in progress then have
	// shutdownTime to end. A connection that has sent nothing counts as one, and ends within
	// readHeaderTimeout.
	drainTime    = 250 * time.Millisecond
	shutdownTime = readHeaderTimeout + time.Second

	// maxUnread is how much is read of a body that no handler wants, in bytes. It is net/http's limit.
	maxUnread = 256 << 10

	// maxLogged is the longest method, path or report of net/http in the log, in bytes.
	maxLogged = 1 << 10
)

// serviceHeader is in every response of the service.
var serviceHeader = http.Header{
	"Cache-Control":          {"no-store"},
	"Content-Type":           {"application/json"},
	"X-Content-Type-Options": {"nosniff"},
}

// handler answers a request. It returns a response, or an error, which errorResponse turns into
// one.
//
// It is not an http.Handler, so that it can return an error, and cannot send two responses.
type handler func(r *request) (response, error)

// request is an HTTP request, and what the service knows about it.
type request struct {
	*http.Request
	id     string // the X-Request-Id of the response
	caller caller // nobody until the API key is accepted

	// responseHeader is the header of the http.ResponseWriter. What a handler sets here is sent
	// with its response, or with the error that it returns, and is never cached.
	responseHeader http.Header
}

// response is what to send. Do not change its header and body in place: they may be in the cache.
type response struct {
	status int
	header http.Header // beside request.responseHeader; nil for none
	body   []byte      // JSON
}

// server answers requests with its handlers. It is an http.Handler.
type server struct {
	mux      *http.ServeMux
	fallback handler // for unknown paths
	logger   *slog.Logger
	draining atomic.Bool // set during a stop: every response closes its connection
}

// newServer returns a server with these handlers, by pattern of ServeMux. There must be one for /,
// which answers the requests for unknown paths.
func newServer(handlers map[string]handler, logger *slog.Logger) *server {
	s := &server{mux: http.NewServeMux(), fallback: handlers["/"], logger: logger}
	for pattern, h := range handlers {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
	}
	return s
}

// ServeHTTP answers a request with the handler of its route.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// ServeMux would redirect //v1/pets to /v1/pets. Such paths are unknown here, as is *.
	if p := r.URL.EscapedPath(); p != path.Clean("/"+p) {
		s.answer(w, r, s.fallback)
		return
	}
	s.mux.ServeHTTP(w, r)
}

// answer answers a request with h, and logs it.
func (s *server) answer(w http.ResponseWriter, httpRequest *http.Request, h handler) {
	start := time.Now()
	r := &request{Request: httpRequest, id: rand.Text(), responseHeader: w.Header()}
	maps.Copy(r.responseHeader, serviceHeader)
	r.responseHeader.Set("X-Request-Id", r.id)

	resp, err := callHandler(h, r)
	if err != nil {
		resp = errorResponse(err)
	}
	size := s.send(w, r, resp)
	s.logRequest(r, resp.status, size, time.Since(start), err)
}

// callHandler calls h. It returns a panic as an error with the stack: a 500 for this request alone.
// A panic in the store ends the program instead: see exitOnPanic.
func callHandler(h handler, r *request) (resp response, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(r)
}

// errorResponse returns the response to a request that failed with err. The client sees an apiError
// in it, and of all other errors nothing: they are for the log.
func errorResponse(err error) response {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = newError(http.StatusInternalServerError, "internal error")
	}

	resp := response{status: e.Status, body: encode(e)}
	if e.Status == http.StatusServiceUnavailable {
		resp.header = http.Header{"Retry-After": {"1"}} // seconds
	}
	return resp
}

// send sends a response, and returns the number of bytes of its body that were sent.
func (s *server) send(w http.ResponseWriter, r *request, resp response) (size int) {
	maps.Copy(w.Header(), resp.header)
	w.Header().Set("Content-Length", strconv.Itoa(len(resp.body)))
	if r.Close || s.draining.Load() {
		w.Header().Set("Connection", "close")
		readUnread(r)
	}

	w.WriteHeader(resp.status)
	if r.Method == http.MethodHead {
		return 0
	}
	size, _ = w.Write(resp.body) // an error means that the client is gone
	return size
}

// readUnread reads what the handler has left of a body that is not too large. net/http does so
// before a response, but not if it closes the connection afterwards, as for nginx and Python's
// urllib: unread bytes would reset the connection, and the client might not see the response.
func readUnread(r *request) {
	waits := r.Header.Get("Expect") != "" // for 100 Continue: it has sent no body yet
	if !waits && r.ContentLength <= maxUnread {
		io.CopyN(io.Discard, r.Body, maxUnread)
	}
}

// encode returns v as JSON and a line break, with <, > and & as they are. v must be of a type
// that can be encoded.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // a mistake in the code
	}
	return b.Bytes()
}

// logRequest logs a request, its response, and the error of its handler unless that is nil.
func (s *server) logRequest(r *request, status, size int, duration time.Duration, err error) {
	attrs := []slog.Attr{
		slog.String("id", r.id),
		slog.String("client", r.RemoteAddr),
		slog.String("method", truncate(r.Method)),
		slog.String("path", truncate(r.URL.Path)),
		slog.Int("status", status),
		slog.Int("bytes", size),
		slog.Duration("duration", duration),
	}
	if r.caller != (caller{}) {
		attrs = append(attrs, slog.String("key_sha256", hex.EncodeToString(r.caller[:4])))
	}
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}

	level := slog.LevelInfo
	if status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	s.logger.LogAttrs(r.Context(), level, "request", attrs...)
}

// truncate returns at most the first maxLogged bytes of text.
func truncate(text string) string { return text[:min(len(text), maxLogged)] }

// serve answers requests from ln until ctx is cancelled. Then it lets requests end, within
// drainTime and shutdownTime, and returns nil. It returns an error if it cannot accept
// connections.
func (s *server) serve(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:           s,
		ReadTimeout:       readTimeout,
		ReadHeaderTimeout: readHeaderTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader - (4 << 10), // net/http allows 4 KiB more than it is told
		ErrorLog:          log.New(httpLog{s.logger}, "", 0),

		DisableGeneralOptionsHandler: true, // so that OPTIONS * needs a key
	}

	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	s.logger.Info("stopping", "cause", context.Cause(ctx))

	// Shutdown closes idle connections at once, and so cuts off requests that are on their way. So
	// go on for a moment, and close each connection with its response.
	s.draining.Store(true)
	time.Sleep(drainTime)

	grace, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	if err := srv.Shutdown(grace); err != nil {
		s.logger.Warn("connections were cut off", "error", err)
		srv.Close()
	}
	return nil
}

// httpLog is an io.Writer that logs what net/http reports, one line for each Write: a panic outside
// of a handler at ERROR, all else at INFO.
//
// Unlike slog.NewLogLogger, it cuts a line before slog quotes it, which takes several times its
// size in memory. With TLS handshakes, anyone can cause many lines of 64 KB at once.
type httpLog struct{ logger *slog.Logger }

func (l httpLog) Write(line []byte) (int, error) {
	level := slog.LevelInfo
	if bytes.HasPrefix(line, []byte("http: panic")) {
		level = slog.LevelError
	}
	text := string(bytes.TrimSpace(line[:min(len(line), maxLogged)]))
	l.logger.Log(context.Background(), level, text)
	return len(line), nil
}
