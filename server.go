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
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	maxLogged  = 1 << 10 // bytes of a path or a method in the log
	maxCache   = 8 << 20 // bytes of cached responses; a full cache is emptied
	maxDiscard = 1 << 20 // bytes of a request body that are read after the response
)

// server is the service as an http.Handler.
type server struct {
	store    *store
	keys     keys
	logger   *slog.Logger
	mux      *http.ServeMux
	cache    cache
	draining atomic.Bool // set by a stop: every response closes its connection
}

// newServer returns the service on an open store.
func newServer(st *store, k keys, logger *slog.Logger) *server {
	s := &server{store: st, keys: k, logger: logger, mux: http.NewServeMux()}
	handle := func(pattern string, h handler) {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
	}
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

// ServeHTTP routes a request to its handler.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if p := r.URL.EscapedPath(); !strings.HasPrefix(p, "/") || path.Clean(p) != p {
		s.answer(w, r, s.requireKey(notFound)) // ServeMux would redirect the client
		return
	}
	s.mux.ServeHTTP(w, r)
}

// handler answers a request, or returns an error for finish to answer with.
type handler func(x *exchange, r *http.Request) error

// exchange is one HTTP exchange: the ResponseWriter of its response, and what the log will say about it.
type exchange struct {
	http.ResponseWriter
	server *server
	start  time.Time
	id     string // X-Request-Id
	method string // of the request
	caller caller // nobody until the key is accepted
	status int    // of the response, 0 until it is sent
	size   int    // of the body of the response, in bytes; 0 for HEAD
	err    error  // of the handler, or nil
}

// Headers of every response, and those that every response of the deprecated operation adds.
var (
	commonHeader = http.Header{
		"Cache-Control":          {"no-store"},
		"Content-Type":           {"application/json"},
		"X-Content-Type-Options": {"nosniff"},
	}
	deprecatedHeader = http.Header{
		"Deprecation": {"@1795132800"},                   // RFC 9745: 20 November 2026, the date of version 1.0.0
		"Sunset":      {"Thu, 05 Dec 2030 00:00:00 GMT"}, // RFC 8594
		"Link":        {`</v1/pets>; rel="successor-version"`},
	}
)

// answer answers a request with h, and logs it.
func (s *server) answer(w http.ResponseWriter, r *http.Request, h handler) {
	x := &exchange{ResponseWriter: w, server: s, start: time.Now(), id: rand.Text(), method: r.Method}
	maps.Copy(w.Header(), commonHeader)
	w.Header().Set("X-Request-Id", x.id)
	defer x.finish(r)
	x.err = h(x, r)
}

// requireKey passes requests with a valid API key to next, and answers all others with 401, before any other check.
func (s *server) requireKey(next handler) handler {
	return func(x *exchange, r *http.Request) error {
		who, challenge := s.keys.authenticate(r.Header)
		if challenge != "" {
			x.Header().Set("WWW-Authenticate", challenge)
			return newError(http.StatusUnauthorized, "a valid API key is required, in one header "+
				"Authorization: Bearer API_KEY; GET /openapi.json describes this interface")
		}
		x.caller = who
		return next(x, r)
	}
}

// deprecated marks every response of next as one of a deprecated operation.
func deprecated(next handler) handler {
	return func(x *exchange, r *http.Request) error {
		maps.Copy(x.Header(), deprecatedHeader)
		return next(x, r)
	}
}

// response is a response with status 200 to a GET request.
type response struct {
	body []byte // JSON
	link string // the Link header, "" for none
}

// cache holds the responses to GET requests since the last change.
type cache struct {
	sync.Mutex
	version   int64                               // of store.changes, loaded before the responses were read
	size      int                                 // bytes that the responses take, roughly
	responses map[string]func() (response, error) // by URL; the first call reads the response, and others wait for it
}

// cached answers with what read returns, which must depend on the URL alone: all requests for it share one read, with
// the first of them, until a change, an error or a full cache.
func (s *server) cached(read func(r *http.Request) (response, error)) handler {
	return func(x *exchange, r *http.Request) error {
		url, c := r.URL.RequestURI(), &s.cache
		c.Lock()
		if version := s.store.changes.Load(); c.responses == nil || c.version != version || c.size > maxCache {
			c.version, c.size, c.responses = version, 0, map[string]func() (response, error){}
		}
		responses := c.responses
		shared, found := responses[url]
		if !found {
			url = strings.Clone(url) // it may be part of a longer string, which would stay in memory
			shared = sync.OnceValues(func() (response, error) {
				resp, err := read(r)
				c.Lock()
				defer c.Unlock()
				if err != nil {
					delete(responses, url) // the next request reads again
				} else {
					c.size += len(url) + len(resp.body) + 300 // 300 for the entry itself
				}
				return resp, err
			})
			responses[url] = shared
		}
		c.Unlock()
		resp, err := shared()
		if err != nil {
			return err
		}
		if resp.link != "" {
			x.Header().Set("Link", resp.link)
		}
		return x.send(http.StatusOK, resp.body)
	}
}

// send sends the response, whose body is JSON. It returns nil, so that a handler can end with it.
func (x *exchange) send(status int, body []byte) error {
	x.status = status
	x.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if x.server.draining.Load() {
		x.Header().Set("Connection", "close")
	}
	x.WriteHeader(status)
	if x.method != http.MethodHead {
		x.size = len(body)
		x.Write(body) // an error means that the client is gone
	}
	return nil
}

// encode returns v as JSON and a line break, with <, > and & as they are. v must be of a type that can be encoded.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(v)
	return b.Bytes()
}

// finish answers with the error of the handler, or a 500 if it panicked, and logs the request. (See crash, too.)
func (x *exchange) finish(r *http.Request) {
	if p := recover(); p != nil {
		x.err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
	if x.err != nil {
		e, ok := errors.AsType[*apiError](x.err)
		if !ok {
			e = newError(http.StatusInternalServerError, "internal error")
		}
		if e.Status == http.StatusServiceUnavailable {
			x.Header().Set("Retry-After", "1") // seconds
		}
		x.send(e.Status, encode(e))
	}
	x.logRequest(r)
	// Many clients read the response only after they have sent the body. (After 201 and 408 there is no more to read.)
	if r.ContentLength != 0 && x.status != http.StatusCreated && x.status != http.StatusRequestTimeout {
		connection := http.NewResponseController(x.ResponseWriter)
		connection.SetReadDeadline(time.Now().Add(2 * time.Second)) // before Flush, which reads up to 256 KiB
		connection.Flush()
		io.CopyN(io.Discard, r.Body, maxDiscard)
	}
}

// logRequest logs an answered request. (A method of slog.Logger would also look up the line of the source, slowly.)
func (x *exchange) logRequest(r *http.Request) {
	line := slog.NewRecord(time.Now(), slog.LevelInfo, "request", 0)
	line.AddAttrs(
		slog.String("id", x.id),
		slog.String("client", r.RemoteAddr),
		slog.String("method", x.method[:min(len(x.method), maxLogged)]),
		slog.String("path", r.URL.Path[:min(len(r.URL.Path), maxLogged)]),
		slog.Int("status", x.status),
		slog.Int("bytes", x.size),
		slog.Duration("duration", time.Since(x.start)))
	if x.caller != (caller{}) {
		line.AddAttrs(slog.String("key", hex.EncodeToString(x.caller[:4])))
	}
	if x.err != nil {
		line.AddAttrs(slog.Any("error", x.err))
	}
	if x.status >= http.StatusInternalServerError {
		line.Level = slog.LevelError
	}
	x.server.logger.Handler().Handle(context.Background(), line)
}

// serve answers requests from ln until 250 ms after ctx is cancelled, gives those in progress 5 s, and returns nil.
func (s *server) serve(ctx context.Context, ln net.Listener) error {
	var silent sync.Map // the connections that have not sent the header of a request yet
	srv := &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            5 * time.Second,
		ReadTimeout:                  10 * time.Second, // for the whole request
		WriteTimeout:                 20 * time.Second, // 10 s to read the body, 5 s to wait for a lock, 5 s to send
		IdleTimeout:                  75 * time.Second, // longer than that of proxies (60 s), so that they close first
		MaxHeaderBytes:               12 << 10,         // net/http allows 4 KiB more, which makes 16 KiB
		DisableGeneralOptionsHandler: true,             // so that OPTIONS * gets 401 without a key
		ErrorLog:                     log.New(warnings{s.logger}, "", 0),
		ConnState: func(c net.Conn, state http.ConnState) {
			if state == http.StateNew {
				silent.Store(c, nil)
			} else {
				silent.Delete(c)
			}
		},
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	s.logger.Info("stopping", "cause", context.Cause(ctx))
	s.draining.Store(true)
	// Answer requests that are on their way: Shutdown closes idle connections at once.
	time.Sleep(250 * time.Millisecond)
	ln.Close()
	<-served // no connection is new from here on
	// Shutdown would wait 5 s for silent connections. To close them instead could cut off a request just read.
	for c := range silent.Range {
		c.(net.Conn).SetReadDeadline(time.Now())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	defer srv.Close()
	if err := srv.Shutdown(ctx); err != nil {
		s.logger.Warn("connections were cut off", "error", err)
	}
	return nil
}

// warnings is an io.Writer that logs what net/http reports, cut to 256 bytes, because clients can choose most of it.
type warnings struct{ logger *slog.Logger }

func (w warnings) Write(line []byte) (int, error) {
	w.logger.Warn(string(bytes.TrimSpace(line[:min(len(line), 256)])))
	return len(line), nil
}

// logWriter is an io.Writer that never blocks, so that a stalled log cannot hold up a request: a goroutine does the
// writing. Lines that find the queue full are dropped, and their number is logged later.
type logWriter struct {
	lines   chan []byte
	dropped atomic.Int64
	closing chan struct{} // closed by close
	done    chan struct{} // closed when all is written
}

func newLogWriter(w io.Writer) *logWriter {
	l := &logWriter{lines: make(chan []byte, 1024), closing: make(chan struct{}), done: make(chan struct{})}
	go l.run(w)
	return l
}

// Write queues a line, or drops it if the queue is full.
func (l *logWriter) Write(line []byte) (int, error) {
	select {
	case l.lines <- bytes.Clone(line):
	default:
		l.dropped.Add(1)
	}
	return len(line), nil
}

// run writes the queued lines in batches, at most one per millisecond: a system call for each would slow requests.
func (l *logWriter) run(w io.Writer) {
	defer close(l.done)
	var batch bytes.Buffer
	for open := true; open; time.Sleep(time.Millisecond) {
		select {
		case line := <-l.lines:
			batch.Write(line)
		case <-l.closing:
			open = false
		}
		for range len(l.lines) {
			batch.Write(<-l.lines)
		}
		if dropped := l.dropped.Swap(0); dropped > 0 {
			slog.New(slog.NewTextHandler(&batch, nil)).Warn("log lines were dropped", "lines", dropped)
		}
		batch.WriteTo(w)
		batch.Reset() // after an error: the rest is lost
	}
}

// close waits until the queued lines are written, but no longer than a second. Lines that are written later are lost.
func (l *logWriter) close() {
	close(l.closing)
	select {
	case <-l.done:
	case <-time.After(time.Second):
	}
}
