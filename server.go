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
	maxWarning = 256     // bytes of a warning of net/http in the log
	maxCache   = 8 << 20 // bytes of cached responses; a full cache is emptied
)

// server is the service as an http.Handler.
type server struct {
	store      *store
	keys       keys
	log        *slog.Logger
	mux        *http.ServeMux
	cache      cache
	draining   atomic.Bool  // set by a stop: every response closes its connection
	discarding atomic.Int64 // the number of bodies that discard is reading
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
type handler func(x *exchange, r *http.Request) error

// exchange is one HTTP exchange: the ResponseWriter of its response, and what the log will say about it.
type exchange struct {
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
	x := &exchange{ResponseWriter: w, server: s, start: time.Now(), id: rand.Text(), method: r.Method, unread: r.ContentLength != 0}
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
			return newError(http.StatusUnauthorized, "a valid API key is required, in one header Authorization: Bearer API_KEY; "+
				"GET /openapi.json describes this interface")
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
	version   int64                               // of store.changes, loaded before the responses were read; -1 at first
	size      int                                 // bytes that the responses take, roughly
	responses map[string]func() (response, error) // by URL; the first call reads the response, and others wait for it
}

// cached answers with what read returns. Requests for a URL share one read until a change, an error or a full cache.
func (s *server) cached(read func(r *http.Request) (response, error)) handler {
	return func(x *exchange, r *http.Request) error {
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
		resp, err := response{}, errors.New("the read has panicked") // until it returns
		if !found {
			defer func() {
				s.cache.Lock()
				defer s.cache.Unlock()
				if err != nil {
					delete(responses, url) // the next request reads again
				} else {
					s.cache.size += len(url) + len(resp.body) + 300 // 300 for the entry itself
				}
			}()
		}
		if resp, err = shared(); err != nil {
			return err
		}
		if resp.link != "" {
			x.Header().Set("Link", resp.link)
		}
		x.send(http.StatusOK, resp.body)
		return nil
	}
}

// send sends the response, whose body is JSON.
func (x *exchange) send(status int, body []byte) {
	x.status = status
	x.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if x.unread || x.server.draining.Load() { // unread: net/http would otherwise first read some of the body
		x.Header().Set("Connection", "close")
	}
	x.WriteHeader(status)
	if x.method != http.MethodHead {
		x.size = len(body)
		x.Write(body) // an error means that the client is gone
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
	x.log(r)
	if x.unread {
		x.discard(r.Body)
	}
}

// discard sends the response at once, and then reads the rest of the body until ReadTimeout or a stop: many clients read the
// response only after they have sent the whole body, and lose it if the connection is closed before. Reads that never wait
// would keep a processor from other requests, so there are pauses, which grow with the number of such clients.
func (x *exchange) discard(body io.Reader) {
	http.NewResponseController(x.ResponseWriter).Flush()
	x.server.discarding.Add(1)
	defer x.server.discarding.Add(-1)
	buf := make([]byte, 8<<10)
	for reads := 1; !x.server.draining.Load(); reads++ {
		if _, err := body.Read(buf); err != nil {
			return
		}
		if reads%8 == 0 { // rarely, because even the shortest pause takes about a millisecond
			time.Sleep(time.Duration(x.server.discarding.Load()) * 640 * time.Microsecond)
		}
	}
}

// log logs an answered request. (slog.Logger would also look up the line of the source, which takes 2 of a GET's 19 us.)
func (x *exchange) log(r *http.Request) {
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
	x.server.log.Handler().Handle(context.Background(), line)
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
		ErrorLog:                     log.New(warnings{s.log}, "", 0),
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

// warnings is an io.Writer that logs what net/http reports, cut short: a client can choose most of it, such as the protocols in
// a TLS handshake.
type warnings struct{ log *slog.Logger }

func (w warnings) Write(line []byte) (int, error) {
	w.log.Warn(string(bytes.TrimSpace(line[:min(len(line), maxWarning)])))
	return len(line), nil
}
