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

	// In the log, what a client can choose is cut to this many bytes.
	maxLoggedField = 1 << 10 // of a path or a method
	maxLoggedLine  = 256     // of a line of net/http
)

// Headers of every response, and those that every response of the deprecated operation adds.
var (
	commonHeader = http.Header{
		"Cache-Control":          {"no-store"},
		"Content-Type":           {"application/json"},
		"X-Content-Type-Options": {"nosniff"},
	}
	deprecatedHeader = http.Header{
		"Deprecation": {"@1795132800"},                   // RFC 9745: 20 November 2026
		"Sunset":      {"Thu, 05 Dec 2030 00:00:00 GMT"}, // RFC 8594
		"Link":        {`</v1/pets>; rel="successor-version"`},
	}
)

// handler answers the request of x with x.send, and returns nil, or it returns the error to answer
// with.
type handler func(x *exchange) error

// exchange is one request with its response, and what the log will say about them.
type exchange struct {
	http.ResponseWriter
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
	routes   map[string]handler // by pattern of ServeMux
	mux      *http.ServeMux     // of all routes
	logger   *slog.Logger
	draining atomic.Bool // set during a stop: every response closes its connection
}

// newServer returns a server with these routes. One of them must be "/", which answers whatever
// the others do not match.
func newServer(routes map[string]handler, logger *slog.Logger) *server {
	s := &server{routes: routes, mux: http.NewServeMux(), logger: logger}
	for pattern, h := range routes {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			s.answer(w, r, h)
		})
	}
	return s
}

// ServeHTTP answers a request with the handler of its route.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// ServeMux would redirect //v1/pets to /v1/pets. Such paths are unknown here.
	p := r.URL.EscapedPath()
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p {
		s.answer(w, r, s.routes["/"])
		return
	}
	s.mux.ServeHTTP(w, r)
}

// answer answers a request with h, or with the error that h returns, and logs it.
func (s *server) answer(w http.ResponseWriter, r *http.Request, h handler) {
	x := &exchange{ResponseWriter: w, r: r, server: s, start: time.Now(), id: rand.Text()}
	maps.Copy(x.Header(), commonHeader)
	x.Header().Set("X-Request-Id", x.id)

	err := callHandler(h, x)
	if err != nil {
		x.sendError(err)
	}
	x.log(err)
}

// callHandler calls h. It returns a panic as an error with the stack.
//
// A panic of the store never comes this far: see exitOnPanic.
func callHandler(h handler, x *exchange) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(x)
}

// deprecated marks every response of next as one of a deprecated operation, which will be removed.
func deprecated(next handler) handler {
	return func(x *exchange) error {
		maps.Copy(x.Header(), deprecatedHeader)
		return next(x)
	}
}

// send sends a response, whose body is JSON.
func (x *exchange) send(status int, body []byte) {
	x.status = status
	x.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if x.server.draining.Load() {
		x.Header().Set("Connection", "close")
	}

	x.WriteHeader(status)
	if x.r.Method != http.MethodHead {
		x.size = len(body)
		x.Write(body) // an error means that the client is gone
	}
}

// sendError sends err if it is an apiError, else a 500 that does not reveal it.
func (x *exchange) sendError(err error) {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = newError(http.StatusInternalServerError, "internal error")
	}
	if e.Status == http.StatusServiceUnavailable {
		x.Header().Set("Retry-After", "1") // seconds
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
	line := slog.NewRecord(time.Now(), slog.LevelInfo, "request", 0)
	line.AddAttrs(
		slog.String("id", x.id),
		slog.String("client", x.r.RemoteAddr),
		slog.String("method", cut(x.r.Method, maxLoggedField)),
		slog.String("path", cut(x.r.URL.Path, maxLoggedField)),
		slog.Int("status", x.status),
		slog.Int("bytes", x.size),
		slog.Duration("duration", time.Since(x.start)),
	)
	if x.caller != (caller{}) {
		line.AddAttrs(slog.String("key", hex.EncodeToString(x.caller[:4])))
	}
	if err != nil {
		line.AddAttrs(slog.Any("error", err))
	}
	if x.status >= http.StatusInternalServerError {
		line.Level = slog.LevelError
	}

	// A method of Logger would also look up the line of the source: 2 us of the 19 of a GET.
	x.server.logger.Handler().Handle(context.Background(), line)
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

// httpLog is an io.Writer that logs what net/http reports, one line for each Write. It cuts the
// lines, because clients can choose most of what they quote.
type httpLog struct{ logger *slog.Logger }

func (l httpLog) Write(line []byte) (int, error) {
	start := line[:min(len(line), maxLoggedLine)]
	l.logger.Info(string(bytes.TrimSpace(start)))
	return len(line), nil
}
