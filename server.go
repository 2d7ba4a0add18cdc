package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// readTimeout is for the whole request, readHeaderTimeout for its headers.
	readTimeout       = 10 * time.Second
	readHeaderTimeout = 5 * time.Second

	// writeTimeout counts from the end of the headers. It leaves time to read the body, to wait for
	// a database that is locked, and to send the response.
	writeTimeout = readTimeout + busyTimeout + 5*time.Second

	// idleTimeout is longer than the 60 seconds of common proxies, so that they close first: a
	// proxy could send a request just when the service closes the connection.
	idleTimeout = 75 * time.Second

	// maxHeader is in bytes.
	maxHeader = 16 << 10

	// After a stop signal, the server accepts requests for drainTime. Those in progress then have
	// shutdownTime to end.
	drainTime    = 250 * time.Millisecond
	shutdownTime = 5 * time.Second

	// maxLogged is the longest path, method or report of net/http in the log, in bytes.
	maxLogged = 1 << 10
)

// commonHeader is in every response.
var commonHeader = http.Header{
	"Cache-Control":          {"no-store"},
	"Content-Type":           {"application/json"},
	"X-Content-Type-Options": {"nosniff"},
}

// handler answers the request of x with x.send, and returns nil, or it returns the error to answer
// with.
type handler func(x *exchange) error

// exchange is one request with its response, and what the log will say about them.
type exchange struct {
	w      http.ResponseWriter // for headers; send writes the response
	r      *http.Request
	server *server

	start  time.Time
	id     string // X-Request-Id
	caller caller // nobody until the key is accepted
	status int    // of the response, 0 until it is sent
	size   int    // of the body of the response, in bytes; 0 for HEAD
}

// server answers requests with its handlers. It is an http.Handler.
type server struct {
	mux      *http.ServeMux
	fallback handler // for requests that no route matches
	logger   *slog.Logger
	draining atomic.Bool // set during a stop: every response closes its connection
}

// newServer returns a server with these routes, by pattern of ServeMux. The fallback answers the
// requests that no route matches, because ServeMux's own 404 would not be JSON.
func newServer(routes map[string]handler, fallback handler, logger *slog.Logger) *server {
	s := &server{mux: http.NewServeMux(), fallback: fallback, logger: logger}
	handle := func(pattern string, h handler) {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
	}

	for pattern, h := range routes {
		handle(pattern, h)
	}
	handle("/", fallback)
	return s
}

// ServeHTTP answers a request with the handler of its route.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// ServeMux would redirect //v1/pets to /v1/pets. Such paths are unknown here.
	p := r.URL.EscapedPath()
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p {
		s.answer(w, r, s.fallback)
		return
	}
	s.mux.ServeHTTP(w, r)
}

// answer answers a request with h, or with the error that h returns, and logs it.
func (s *server) answer(w http.ResponseWriter, r *http.Request, h handler) {
	x := &exchange{w: w, r: r, server: s, start: time.Now(), id: rand.Text()}
	maps.Copy(x.w.Header(), commonHeader)
	x.w.Header().Set("X-Request-Id", x.id)

	err := callHandler(h, x)
	if err != nil {
		x.sendError(err)
	}
	x.log(err)
}

// callHandler calls h. It returns a panic as an error with the stack. A panic while the database is
// in use ends the program instead: see exitOnPanic.
func callHandler(h handler, x *exchange) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(x)
}

// send sends a response, whose body is JSON.
func (x *exchange) send(status int, body []byte) {
	x.status = status
	x.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if x.server.draining.Load() {
		x.w.Header().Set("Connection", "close")
	}

	x.w.WriteHeader(status)
	if x.r.Method != http.MethodHead {
		x.size, _ = x.w.Write(body) // an error means that the client is gone
	}
}

// sendError sends err if it is an apiError, else a 500 that does not reveal it.
func (x *exchange) sendError(err error) {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = newError(http.StatusInternalServerError, "internal error")
	}
	if e.Status == http.StatusServiceUnavailable {
		x.w.Header().Set("Retry-After", "1") // seconds
	}
	x.send(e.Status, encode(e))
}

// encode returns v as JSON and a line break, with <, > and & as they are. v must be of a type
// that can be encoded.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(v)
	return b.Bytes()
}

// log logs the exchange, and the error of its handler unless it is nil.
func (x *exchange) log(err error) {
	attrs := []slog.Attr{
		slog.String("id", x.id),
		slog.String("client", x.r.RemoteAddr),
		slog.String("method", cut(x.r.Method, maxLogged)),
		slog.String("path", cut(x.r.URL.Path, maxLogged)),
		slog.Int("status", x.status),
		slog.Int("bytes", x.size),
		slog.Duration("duration", time.Since(x.start)),
	}
	if x.caller != (caller{}) {
		attrs = append(attrs, slog.String("key_sha256", hex.EncodeToString(x.caller[:4])))
	}
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}

	level := slog.LevelInfo
	if x.status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	x.server.logger.LogAttrs(context.Background(), level, "request", attrs...)
}

// cut returns at most the first n bytes of text.
func cut(text string, n int) string {
	return text[:min(len(text), n)]
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

	// Shutdown closes idle connections at once, and would cut off requests that are on their way.
	// So go on for a moment, and close each connection with its response.
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

// httpLog is an io.Writer that logs what net/http reports, one line for each Write.
//
// It cuts long lines before slog quotes them, which would take several times their size in memory:
// anyone who can connect can cause one of 64 KB, with a TLS handshake.
type httpLog struct{ logger *slog.Logger }

func (l httpLog) Write(line []byte) (int, error) {
	l.logger.Info(string(bytes.TrimSpace(line[:min(len(line), maxLogged)])))
	return len(line), nil
}
