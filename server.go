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
	readTimeout       = 10 * time.Second // for the whole request
	writeTimeout      = 25 * time.Second // from the end of the headers to the end of the response

	// idleTimeout is longer than that of common proxies (nginx 60 seconds, Caddy 120), so that they
	// close first. Otherwise, one could send a request just when the service closes the connection.
	idleTimeout = 150 * time.Second

	// After a stop signal, open connections may send another request for drainTime. Requests in
	// progress then have shutdownTime to end, which is longer than a create may take (see create),
	// and longer than net/http waits for a connection that has sent nothing, 5 seconds.
	drainTime    = 250 * time.Millisecond
	shutdownTime = 6 * time.Second

	maxHeader = 16 << 10 // bytes of the request line and all headers
	maxUnread = 1 << 20  // bytes that are read of a body that no handler wants (nginx passes on as many)
)

// serviceHeader is in every response.
var serviceHeader = http.Header{
	"Cache-Control":          {"no-store"},
	"Content-Type":           {"application/json"},
	"X-Content-Type-Options": {"nosniff"},
}

// handler answers a request. It returns the body of the response, which is sent as JSON (a []byte as
// it is), or an error: an apiError for the client, or any other one, which becomes a 500.
//
// It is not an http.Handler, so that it can return an error, and cannot send two responses.
type handler func(r *request) (body any, err error)

// request is an HTTP request, and what the service knows about it.
type request struct {
	*http.Request
	id     string // the X-Request-Id of the response
	caller []byte // the SHA-256 sum of the API key, nil until that is accepted

	// A handler may set the status of the response, which is 200, and add to its header. If it
	// returns an error, status is that of the error; responseHeader is sent all the same.
	status         int
	responseHeader http.Header
}

// server answers requests with its handlers. It is an http.Handler.
type server struct {
	mux      *http.ServeMux
	fallback handler // for unknown paths
	logger   *slog.Logger
	draining atomic.Bool // set during a stop: every response closes its connection
}

// newServer returns a server with these handlers, by pattern of ServeMux. fallback answers the
// requests for all other paths.
func newServer(handlers map[string]handler, fallback handler, logger *slog.Logger) *server {
	s := &server{mux: http.NewServeMux(), fallback: fallback, logger: logger}
	s.handle("/", fallback)
	for pattern, h := range handlers {
		s.handle(pattern, h)
	}
	return s
}

// handle makes h answer the requests that match pattern.
func (s *server) handle(pattern string, h handler) {
	s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
}

// ServeHTTP answers a request with the handler of its route.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// A path that is not clean, such as //v1/pets, is unknown. ServeMux would redirect it.
	if p := r.URL.EscapedPath(); p != path.Clean("/"+p) {
		s.answer(w, r, s.fallback)
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
		e := clientError(err)
		r.status, body = e.Status, e
	}
	if r.status == http.StatusServiceUnavailable {
		r.responseHeader.Set("Retry-After", "1") // seconds
	}
	if s.draining.Load() {
		r.responseHeader.Set("Connection", "close")
	}
	readUnread(r)

	content, isJSON := body.([]byte)
	if !isJSON {
		content = encode(body)
	}
	r.responseHeader.Set("Content-Length", strconv.Itoa(len(content)))
	w.WriteHeader(r.status)
	w.Write(content) // an error means that the client is gone
	s.log(r, time.Since(start), err)
}

// callHandler calls h. It returns a panic as an error with the stack: a 500 for this request alone.
func callHandler(h handler, r *request) (body any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(r)
}

// clientError returns the apiError in err. If there is none, the client sees nothing of err.
func clientError(err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	return newError(http.StatusInternalServerError, "internal error")
}

// readUnread reads up to maxUnread of what the handler has left of the body: a client that sends
// all of it first would be reset otherwise, and miss the response. net/http reads 256 KB at most,
// and nothing if the client asks to close the connection, as nginx and Python's urllib do.
func readUnread(r *request) {
	// A client that waits for 100 Continue sends its body only if the handler has begun to read it.
	waits := r.Header.Get("Expect") != "" && r.status != http.StatusRequestEntityTooLarge
	if !waits && r.ContentLength <= maxUnread {
		io.CopyN(io.Discard, r.Body, maxUnread)
	}
}

// encode returns v as JSON and a line break, with <, > and & as they are. v must be of a type that
// can be encoded.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // a mistake in the code
	}
	return b.Bytes()
}

// log logs a request, the status of its response, and the error of its handler unless that is nil.
func (s *server) log(r *request, duration time.Duration, err error) {
	attrs := []slog.Attr{
		slog.String("id", r.id),
		slog.String("client", r.RemoteAddr),
		slog.String("method", fmt.Sprintf("%.20s", r.Method)),
		slog.String("path", fmt.Sprintf("%.1000s", r.URL.Path)),
		slog.Int("status", r.status),
		slog.Duration("duration", duration),
	}
	if r.caller != nil {
		attrs = append(attrs, slog.String("key_sha256", hex.EncodeToString(r.caller[:4])))
	}
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}

	level := slog.LevelInfo
	if r.status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	s.logger.LogAttrs(r.Context(), level, "request", attrs...)
}

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
		ErrorLog:          slog.NewLogLogger(s.logger.Handler(), slog.LevelInfo),

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

	// Shutdown may cut off a request that is just arriving. So first refuse new connections (a
	// client can safely try again), and answer on open ones for a moment, closing each.
	ln.Close()
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
