package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The limits on what one client can hold of the server.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 10 * time.Second // of a whole request
	writeTimeout      = 20 * time.Second // from the end of the header to the end of the response: 10 s for the body, 8 s for a create
	idleTimeout       = 60 * time.Second
	maxHeader         = 12 << 10  // bytes; net/http allows 4 KiB more, which makes 16 KiB
	maxUnread         = 256 << 10 // bytes of a body that are read and dropped after an early response

	goodbyeTime  = 250 * time.Millisecond // on a stop, for clients to close the connections that they keep alive
	drainTimeout = 10 * time.Second       // for the requests that are being handled then
	cutOffTime   = time.Second            // for all other connections
)

// server is the service as an http.Handler.
type server struct {
	store    *store
	keys     keys
	log      *slog.Logger
	mux      *http.ServeMux
	draining atomic.Bool  // no connection is to be kept alive
	handling atomic.Int64 // requests with a valid key
	cache    atomic.Pointer[generation]
}

// newServer returns the service on an open store.
func newServer(st *store, k keys, log *slog.Logger) *server {
	s := &server{store: st, keys: k, log: log, mux: http.NewServeMux()}
	s.cache.Store(&generation{})
	handle := func(pattern string, h handlerFunc) { s.mux.Handle(pattern, h) }

	handle("GET /healthz", s.healthz)
	handle("GET /openapi.json", sendOpenAPI)
	handle("GET /v1/pets", s.requireKey(s.cached(s.listPets)))
	handle("POST /v1/pets", s.requireKey(s.createPet))
	handle("GET /v1/pets/{petId}", deprecated(s.requireKey(s.cached(s.getPet))))

	handle("/healthz", s.requireKey(methodNotAllowed("GET, HEAD")))
	handle("/openapi.json", s.requireKey(methodNotAllowed("GET, HEAD")))
	handle("/v1/pets", s.requireKey(methodNotAllowed("GET, HEAD, POST")))
	handle("/v1/pets/{petId}", s.requireKey(methodNotAllowed("GET, HEAD")))
	handle("/", s.requireKey(notFound))
	return s
}

// ServeHTTP answers a request and writes its line to the log.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	c := &call{ResponseWriter: w, server: s, id: rand.Text(), unread: r.ContentLength != 0}
	maps.Copy(w.Header(), everyHeader)
	w.Header().Set("X-Request-Id", c.id)
	if p := r.URL.EscapedPath(); p == "" || p[0] != '/' || path.Clean(p) != p {
		s.requireKey(notFound).ServeHTTP(c, r) // where ServeMux would redirect
	} else {
		s.mux.ServeHTTP(c, r)
	}
	r.Header = nil // can hold many times what was sent, and net/http keeps r until the body has arrived
	c.log(r, start)
	if c.unread {
		// If the client does not keep its connection, net/http would close it with the rest of the body unread. That resets
		// the connection, and the response may be lost.
		http.NewResponseController(w).Flush()
		io.CopyN(io.Discard, r.Body, maxUnread)
	}
}

// What each answer, and each answer of the deprecated operation, says of itself.
var (
	everyHeader = http.Header{
		"Cache-Control":          {"no-store"},
		"Content-Type":           {"application/json"},
		"X-Content-Type-Options": {"nosniff"},
	}
	deprecatedHeader = http.Header{
		"Deprecation": {"@1795132800"},                   // RFC 9745: 20 November 2026, when version 1.0.0 was published
		"Sunset":      {"Thu, 05 Dec 2030 00:00:00 GMT"}, // RFC 8594
		"Link":        {`</v1/pets>; rel="successor-version"`},
	}
)

// handlerFunc is a handler that leaves it to ServeHTTP to answer with the error that it returns.
type handlerFunc func(w *call, r *http.Request) error

// ServeHTTP makes an http.Handler of h; w must be a *call. An error or a panic of h is answered in the Error shape.
func (h handlerFunc) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := w.(*call)
	defer func() {
		if p := recover(); p != nil {
			c.sendError(fmt.Errorf("panic: %v\n%s", p, debug.Stack()))
		}
	}()
	if err := h(c, r); err != nil {
		c.sendError(err)
	}
}

// requireKey lets only requests with a valid API key pass to next; others it answers with 401, whatever else is
// wrong with them.
func (s *server) requireKey(next handlerFunc) handlerFunc {
	return func(w *call, r *http.Request) error {
		caller, challenge := s.keys.authenticate(r.Header)
		if challenge != "" {
			w.Header().Set("WWW-Authenticate", challenge)
			return newError(http.StatusUnauthorized, "a valid API key is required, in one header Authorization: Bearer API_KEY; "+
				"GET /openapi.json describes this interface")
		}
		w.caller = caller
		s.handling.Add(1)
		defer s.handling.Add(-1)
		return next(w, r)
	}
}

// deprecated marks every answer of next as that of a deprecated operation.
func deprecated(next handlerFunc) handlerFunc {
	return func(w *call, r *http.Request) error {
		maps.Copy(w.Header(), deprecatedHeader)
		return next(w, r)
	}
}

// generation is the content of the cache: successful responses to GET requests, all made from the same version of the
// store or a later one.
type generation struct {
	version   int64
	size      atomic.Int64 // bytes that the responses take, roughly
	responses sync.Map     // from URL to *cachedResponse
}

// cachedResponse is a 200.
type cachedResponse struct {
	link []string // the Link header, nil if there is none
	body []byte
}

// maxCache is the size in bytes at which the cache is emptied: what clients request often soon returns.
const maxCache = 8 << 20

// cached answers from the cache if it can. Otherwise it calls next and keeps the response.
//
// The generation is chosen before next reads the store. If the store changes in between, the old response goes into
// a generation that is no longer used.
func (s *server) cached(next handlerFunc) handlerFunc {
	return func(w *call, r *http.Request) error {
		url, version := r.URL.RequestURI(), s.store.version()
		g := s.cache.Load()
		if g.version < version || g.size.Load() > maxCache {
			g = &generation{version: version}
			s.cache.Store(g)
		}
		if v, ok := g.responses.Load(url); ok {
			response := v.(*cachedResponse)
			w.Header()["Link"] = response.link
			w.send(http.StatusOK, response.body)
			return nil
		}
		if err := next(w, r); err != nil {
			return err
		}
		g.size.Add(int64(len(url) + len(w.body) + 300)) // 300 for the entry itself
		// The URL may be part of a longer string, which would stay in memory with it.
		g.responses.Store(strings.Clone(url), &cachedResponse{w.Header()["Link"], w.body})
		return nil
	}
}

// call is one request on its way: the ResponseWriter of its answer, and what its log line tells.
type call struct {
	http.ResponseWriter
	server *server
	id     string // X-Request-Id
	unread bool   // whether there is a body that was not read to its end
	caller caller // once the key is accepted
	status int    // 0 until the answer is sent
	body   []byte // of the answer
	err    error  // that it reports, if any
}

// send answers with body, which is JSON and must not change afterwards.
func (c *call) send(status int, body []byte) {
	c.status, c.body = status, body
	c.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if c.unread || c.server.draining.Load() { // or net/http would wait for the rest of the body before it sends this
		c.Header().Set("Connection", "close")
	}
	c.WriteHeader(status)
	c.Write(body) // an error means that the client is gone
}

// sendJSON answers with v.
func (c *call) sendJSON(status int, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	c.send(status, b.Bytes())
	return nil
}

// sendError answers with what toAPIError makes of err.
func (c *call) sendError(err error) {
	c.err = err
	e := toAPIError(err)
	if e.Status == http.StatusServiceUnavailable {
		c.Header().Set("Retry-After", "1") // seconds
	}
	c.sendJSON(e.Status, e)
}

// log writes the line of a call that has ended. It bypasses slog.Logger, which would look up for each line where in
// the source it was logged.
func (c *call) log(r *http.Request, start time.Time) {
	now := time.Now()
	sent := len(c.body)
	if r.Method == http.MethodHead {
		sent = 0
	}
	line := slog.NewRecord(now, slog.LevelInfo, "request", 0)
	line.AddAttrs(
		slog.String("id", c.id),
		slog.String("method", r.Method),
		slog.String("path", r.URL.Path),
		slog.Int("status", c.status),
		slog.Int("bytes", sent),
		slog.Duration("duration", now.Sub(start)))
	if c.err != nil {
		e := toAPIError(c.err)
		line.AddAttrs(slog.String("code", e.Code))
		if e.Status >= http.StatusInternalServerError {
			line.Level = slog.LevelError
			line.AddAttrs(slog.Any("error", c.err))
		}
	}
	if c.caller != (caller{}) {
		line.AddAttrs(slog.String("key", c.caller.String())) // last, where no client can forge it
	}
	c.server.log.Handler().Handle(context.Background(), line)
}

// serve serves s on ln until ctx ends, and then finishes what is in flight.
func (s *server) serve(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            readHeaderTimeout,
		ReadTimeout:                  readTimeout,
		WriteTimeout:                 writeTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader,
		DisableGeneralOptionsHandler: true, // OPTIONS * needs a key as all else does
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	s.log.Info("stopping", "cause", context.Cause(ctx))
	if err := s.drain(srv, ln); err != nil {
		s.log.Warn("connections were cut off", "error", err)
	}
	s.log.Info("stopped")
	return nil
}

// drain stops srv, which serves ln. http.Server.Shutdown alone would close idle connections at once, even if a request is
// on its way, and would wait as long for a stranger as for a client with a valid key.
func (s *server) drain(srv *http.Server, ln net.Listener) error {
	deadline := time.Now().Add(drainTimeout)
	s.draining.Store(true)
	ln.Close()
	time.Sleep(goodbyeTime)
	for s.handling.Load() > 0 && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(context.Background(), cutOffTime)
	defer cancel()
	defer srv.Close()
	return srv.Shutdown(ctx)
}
