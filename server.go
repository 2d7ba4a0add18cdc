package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
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
	maxLogged = 1 << 10 // bytes of a path or a method in the log
	maxCache  = 8 << 20 // bytes of cached responses; a full cache is emptied
)

// server is the service as an http.Handler.
type server struct {
	store      *store
	keys       keys
	log        *slog.Logger
	mux        *http.ServeMux
	cache      cache
	draining   atomic.Bool  // set by a stop: every response closes its connection
	discarding atomic.Int64 // the number of bodies that finish is reading
}

// newServer returns the service on an open store.
func newServer(st *store, k keys, log *slog.Logger) *server {
	s := &server{store: st, keys: k, log: log, mux: http.NewServeMux(), cache: cache{version: -1}}
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
type handler func(c *call, r *http.Request) error

// call is one request being served: the ResponseWriter of its response, and what the log will say about it.
type call struct {
	http.ResponseWriter
	server *server
	start  time.Time
	id     string // X-Request-Id
	method string // of the request
	unread bool   // whether there is a body that has not been read to its end
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
		"Deprecation": {"@1795132800"},                   // RFC 9745: 20 November 2026, when version 1.0.0 was published
		"Sunset":      {"Thu, 05 Dec 2030 00:00:00 GMT"}, // RFC 8594
		"Link":        {`</v1/pets>; rel="successor-version"`},
	}
)

// answer answers a request with h, and logs it.
func (s *server) answer(w http.ResponseWriter, r *http.Request, h handler) {
	c := &call{ResponseWriter: w, server: s, start: time.Now(), id: rand.Text(), method: r.Method, unread: r.ContentLength != 0}
	maps.Copy(w.Header(), commonHeader)
	w.Header().Set("X-Request-Id", c.id)
	defer c.finish(r)
	c.err = h(c, r)
}

// requireKey passes requests with a valid API key to next, and answers all others with 401, before any other check.
func (s *server) requireKey(next handler) handler {
	return func(c *call, r *http.Request) error {
		who, challenge := s.keys.authenticate(r.Header)
		if challenge != "" {
			c.Header().Set("WWW-Authenticate", challenge)
			return newError(http.StatusUnauthorized, "a valid API key is required, in one header Authorization: Bearer API_KEY; "+
				"GET /openapi.json describes this interface")
		}
		c.caller = who
		return next(c, r)
	}
}

// deprecated marks every response of next as one of a deprecated operation.
func deprecated(next handler) handler {
	return func(c *call, r *http.Request) error {
		maps.Copy(c.Header(), deprecatedHeader)
		return next(c, r)
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
	version   int64                               // of store.changes, loaded before the responses were read; -1 at first
	size      int                                 // bytes that the responses take, roughly
	responses map[string]func() (response, error) // by URL; the first call reads the response, and others wait for it
}

// cached answers with what read returns. Requests for a URL share one read until a change, an error or a full cache.
func (s *server) cached(read func(r *http.Request) (response, error)) handler {
	return func(c *call, r *http.Request) error {
		url := r.URL.RequestURI()
		s.cache.Lock()
		if version := s.store.changes.Load(); version != s.cache.version || s.cache.size > maxCache {
			s.cache.version, s.cache.size, s.cache.responses = version, 0, map[string]func() (response, error){}
		}
		responses := s.cache.responses
		shared, found := responses[url]
		if !found {
			url = strings.Clone(url) // it may be part of a longer string, which would stay in memory
			shared = sync.OnceValues(func() (response, error) { return read(r) })
			responses[url] = shared
		}
		s.cache.Unlock()
		resp, err := shared()
		if !found {
			s.cache.Lock()
			if err != nil {
				delete(responses, url) // the next request reads again
			} else {
				s.cache.size += len(url) + len(resp.body) + 300 // 300 for the entry itself
			}
			s.cache.Unlock()
		}
		if err != nil {
			return err
		}
		if resp.link != "" {
			c.Header().Set("Link", resp.link)
		}
		c.send(http.StatusOK, resp.body)
		return nil
	}
}

// send sends the response, whose body is JSON.
func (c *call) send(status int, body []byte) {
	c.status = status
	c.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if c.unread || c.server.draining.Load() { // unread: net/http would otherwise first read some of the body
		c.Header().Set("Connection", "close")
	}
	c.WriteHeader(status)
	if c.method != http.MethodHead {
		c.size = len(body)
		c.Write(body) // an error means that the client is gone
	}
}

// encode returns v as JSON and a line break, with <, > and & as they are. v must be of a type that can be encoded.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(v)
	return b.Bytes()
}

// finish answers with the error that the handler returned, or with a 500 if it panicked, and logs the request.
func (c *call) finish(r *http.Request) {
	if p := recover(); p != nil {
		c.err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
	if c.err != nil {
		e, ok := errors.AsType[*apiError](c.err)
		if !ok {
			e = newError(http.StatusInternalServerError, "internal error")
		}
		if e.Status == http.StatusServiceUnavailable {
			c.Header().Set("Retry-After", "1") // seconds
		}
		c.send(e.Status, encode(e))
	}
	c.log(r)
	if c.unread {
		// Many clients read the response only after they have sent the whole body, and lose it if the connection is closed
		// before. So this reads the rest until ReadTimeout or a stop; its pauses limit it to 400 MB/s for all clients together.
		http.NewResponseController(c.ResponseWriter).Flush()
		c.server.discarding.Add(1)
		defer c.server.discarding.Add(-1)
		for buf := make([]byte, 8<<10); !c.server.draining.Load(); {
			if _, err := r.Body.Read(buf); err != nil {
				return
			}
			time.Sleep(time.Duration(c.server.discarding.Load()) * 20 * time.Microsecond)
		}
	}
}

// log logs an answered request. (slog.Logger would also look up the line of the source: a tenth of the time of a GET.)
func (c *call) log(r *http.Request) {
	line := slog.NewRecord(time.Now(), slog.LevelInfo, "request", 0)
	line.AddAttrs(
		slog.String("id", c.id),
		slog.String("client", r.RemoteAddr),
		slog.String("method", c.method[:min(len(c.method), maxLogged)]),
		slog.String("path", r.URL.Path[:min(len(r.URL.Path), maxLogged)]),
		slog.Int("status", c.status),
		slog.Int("bytes", c.size),
		slog.Duration("duration", time.Since(c.start)))
	if c.caller != (caller{}) {
		line.AddAttrs(slog.String("key", hex.EncodeToString(c.caller[:4])))
	}
	if c.err != nil {
		line.AddAttrs(slog.Any("error", c.err))
	}
	if c.status >= http.StatusInternalServerError {
		line.Level = slog.LevelError
	}
	c.server.log.Handler().Handle(context.Background(), line)
}

// serve serves requests from ln until ctx is cancelled, and then gives those in progress 5 s.
func (s *server) serve(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:                      s,
		ReadHeaderTimeout:            5 * time.Second,
		ReadTimeout:                  10 * time.Second, // for the whole request
		WriteTimeout:                 20 * time.Second, // from the end of the header: 10 s for the body, 5 s for a lock, 5 s to send
		IdleTimeout:                  75 * time.Second, // longer than the 60 s of common proxies, so that they close first
		MaxHeaderBytes:               12 << 10,         // net/http allows 4 KiB more, which makes 16 KiB
		DisableGeneralOptionsHandler: true,             // so that OPTIONS * gets 401 without a key
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
	s.draining.Store(true)
	ln.Close()
	// Wait for requests that are on their way: Shutdown closes idle connections at once, as SetKeepAlivesEnabled(false) would.
	time.Sleep(250 * time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	defer srv.Close()
	if err := srv.Shutdown(ctx); err != nil {
		s.log.Warn("connections were cut off", "error", err)
	}
	return nil
}
