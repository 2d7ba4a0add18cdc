package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	_ "embed"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// The limits on what one client can hold of the server.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 10 * time.Second // of a whole request
	writeTimeout      = 15 * time.Second // from the end of a request's header to the end of the answer
	idleTimeout       = 60 * time.Second
	drainTimeout      = 10 * time.Second
	lingerTimeout     = time.Second             // of drainTimeout, for clients to close the connections they keep alive
	maxHeader         = 16<<10 - 4<<10          // bytes; net/http allows 4 KiB more, which makes 16 KiB
	healthTimeout     = 1500 * time.Millisecond // for the store to answer; healthz is to answer within 2 s
)

//go:embed openapi.json
var openAPI []byte

// server is the service as an http.Handler.
type server struct {
	store    *store
	log      *slog.Logger
	mux      *http.ServeMux
	notFound http.Handler
	draining atomic.Bool // set before drain
}

// handlerFunc is a handler that leaves it to answer, which makes an http.Handler of it, to write an error.
type handlerFunc func(w *call, r *http.Request) error

// newServer returns the service on an open store.
func newServer(st *store, k keys, log *slog.Logger) *server {
	s := &server{store: st, log: log, mux: http.NewServeMux()}
	cached := newAnswerCache(&st.version).wrap
	handle := func(pattern string, h handlerFunc) { s.mux.Handle(pattern, answer(h)) }

	handle("GET /healthz", s.healthz)
	handle("GET /openapi.json", s.openAPI)
	handle("GET /v1/pets", k.requireKey(cached(s.listPets)))
	handle("POST /v1/pets", k.requireKey(s.createPet))
	handle("GET /v1/pets/{petId}", deprecated(k.requireKey(cached(s.getPet))))

	handle("/healthz", k.requireKey(methodNotAllowed("GET, HEAD")))
	handle("/openapi.json", k.requireKey(methodNotAllowed("GET, HEAD")))
	handle("/v1/pets", k.requireKey(methodNotAllowed("GET, HEAD, POST")))
	handle("/v1/pets/{petId}", k.requireKey(methodNotAllowed("GET, HEAD")))
	handle("GET /v1/pets/{$}", deprecated(k.requireKey(s.getPet))) // a petId of %2F; /v1/pets/ itself is not clean
	handle("/v1/pets/{$}", k.requireKey(methodNotAllowed("GET, HEAD")))
	handle("/", k.requireKey(notFound))
	s.notFound = answer(k.requireKey(notFound))
	return s
}

// call is the ResponseWriter of one request, and notes what the request's log line tells.
type call struct {
	http.ResponseWriter
	draining *atomic.Bool // the server's
	id       string       // X-Request-Id
	caller   caller       // once the key is accepted
	status   int          // 0 until the answer begins
	body     []byte       // of the answer
	err      error        // the cause, if the answer is an error
}

func (c *call) WriteHeader(status int) {
	if c.draining.Load() {
		c.Header().Set("Connection", "close")
	}
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

// Write takes the whole body, which must not change afterwards.
func (c *call) Write(body []byte) (int, error) {
	c.body = body
	return c.ResponseWriter.Write(body)
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

// ServeHTTP answers a request and writes its line to the log.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	c := &call{ResponseWriter: w, draining: &s.draining, id: rand.Text()}
	maps.Copy(w.Header(), everyHeader)
	w.Header().Set("X-Request-Id", c.id)
	defer s.logCall(c, r, start)
	defer recoverPanic(c)
	if p := r.URL.EscapedPath(); p == "" || p[0] != '/' || path.Clean(p) != p {
		s.notFound.ServeHTTP(c, r) // where ServeMux would redirect
		return
	}
	s.mux.ServeHTTP(c, r)
}

// recoverPanic answers a panic of c's handler with a 500. It is to be deferred.
func recoverPanic(c *call) {
	p := recover()
	if p == nil {
		return
	}
	err := fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	if c.status == 0 {
		writeError(c, err)
	}
	c.status, c.err = http.StatusInternalServerError, err
}

// logCall writes the log line of a call that has ended. It spares the slog.Logger, which would find out for each
// line where in the source it was logged.
func (s *server) logCall(c *call, r *http.Request, start time.Time) {
	now := time.Now()
	line := slog.NewRecord(now, slog.LevelInfo, "request", 0)
	line.AddAttrs(
		slog.String("id", c.id),
		slog.String("method", r.Method),
		slog.String("path", r.URL.Path),
		slog.Int("status", c.status),
		slog.Int("bytes", len(c.body)),
		slog.Duration("duration", now.Sub(start)))
	if c.caller != (caller{}) {
		line.AddAttrs(slog.String("key", c.caller.String()))
	}
	if c.status >= http.StatusInternalServerError {
		line.Level = slog.LevelError
		line.AddAttrs(slog.Any("error", c.err))
	}
	s.log.Handler().Handle(context.Background(), line)
}

// answer makes an http.Handler of h, for ServeHTTP to call.
func answer(h handlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := w.(*call)
		if c.err = h(c, r); c.err != nil {
			writeError(c, c.err)
		}
	})
}

// deprecated marks every answer of next as that of a deprecated operation.
func deprecated(next handlerFunc) handlerFunc {
	return func(w *call, r *http.Request) error {
		maps.Copy(w.Header(), deprecatedHeader)
		return next(w, r)
	}
}

// methodNotAllowed answers a known path whose method is not among those allowed.
func methodNotAllowed(allowed string) handlerFunc {
	return func(w *call, r *http.Request) error {
		w.Header().Set("Allow", allowed)
		return newError(http.StatusMethodNotAllowed, "the methods here are %s", allowed)
	}
}

// notFound answers a path that leads nowhere.
func notFound(w *call, r *http.Request) error {
	return newError(http.StatusNotFound, "there is nothing at this path")
}

// healthz tells whether the store can be read.
func (s *server) healthz(w *call, r *http.Request) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), healthTimeout) // a cancelled read costs a connection
	defer cancel()
	if err := s.store.check(ctx); err != nil {
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	writeBody(w, http.StatusOK, []byte(`{"status":"ok"}`+"\n"))
	return nil
}

// openAPI sends the description of the interface for programs.
func (s *server) openAPI(w *call, r *http.Request) error {
	writeBody(w, http.StatusOK, openAPI)
	return nil
}

// serve serves s on ln, as HTTPS if tlsConfig is not nil, until ctx ends, and then finishes what is in flight.
func (s *server) serve(ctx context.Context, ln net.Listener, tlsConfig *tls.Config) error {
	var conns atomic.Int64 // open ones
	srv := &http.Server{
		Handler:                      s,
		TLSConfig:                    tlsConfig,
		ReadHeaderTimeout:            readHeaderTimeout,
		ReadTimeout:                  readTimeout,
		WriteTimeout:                 writeTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader,
		DisableGeneralOptionsHandler: true, // OPTIONS * needs a key as all else does
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				conns.Add(1)
			case http.StateClosed:
				conns.Add(-1)
			}
		},
	}
	failed := make(chan error, 1)
	go func() {
		if tlsConfig != nil {
			failed <- srv.ServeTLS(ln, "", "")
		} else {
			failed <- srv.Serve(ln)
		}
	}()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	start := time.Now()
	s.draining.Store(true)
	ln.Close()
	<-failed // then no connection comes any more
	if err := drain(srv, &conns); err != nil {
		s.log.Warn("requests were cut off", "error", err)
	}
	s.log.Info("stopped", "signal", context.Cause(ctx), "draining", time.Since(start))
	return nil
}

// drain stops srv, which no longer accepts connections, once it has answered the requests in flight, or after
// drainTimeout.
//
// To close a connection that is kept alive may cut off a request that is just coming in. So clients are told to
// close theirs, with each answer from now on, and given lingerTimeout to do so. One that connects anew finds the
// next process, if that has the same socket.
func drain(srv *http.Server, conns *atomic.Int64) error {
	start := time.Now()
	for conns.Load() > 0 && time.Since(start) < lingerTimeout {
		time.Sleep(5 * time.Millisecond)
	}
	ctx, cancel := context.WithDeadline(context.Background(), start.Add(drainTimeout))
	defer cancel()
	err := srv.Shutdown(ctx)
	if err != nil {
		srv.Close()
	}
	return err
}

// answerCache keeps answers to GET requests for as long as the store is as it was when they were made.
type answerCache struct {
	version *atomic.Int64 // the store's

	mu      sync.RWMutex
	made    int64 // the version that all of answers were made from
	size    int   // bytes that answers hold
	answers map[string]cachedAnswer
}

// maxCache bounds the bytes of the answers in a cache. A full one is emptied: those in demand soon return.
const maxCache = 8 << 20

// cachedAnswer is a 200.
type cachedAnswer struct {
	link []string // the Link header
	body []byte
}

func newAnswerCache(version *atomic.Int64) *answerCache {
	return &answerCache{version: version, answers: map[string]cachedAnswer{}}
}

// wrap answers what is in the cache and leaves the rest to next, the answers of which it keeps.
func (c *answerCache) wrap(next handlerFunc) handlerFunc {
	return func(w *call, r *http.Request) error {
		url := r.URL.RequestURI()
		version := c.version.Load() // before next reads the store, so that it is never too new
		if a, ok := c.get(url, version); ok {
			if a.link != nil {
				w.Header()["Link"] = a.link
			}
			writeBody(w, http.StatusOK, a.body)
			return nil
		}
		if err := next(w, r); err != nil {
			return err
		}
		c.put(url, version, cachedAnswer{w.Header()["Link"], w.body})
		return nil
	}
}

func (c *answerCache) get(url string, version int64) (cachedAnswer, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.made != version {
		return cachedAnswer{}, false
	}
	a, ok := c.answers[url]
	return a, ok
}

func (c *answerCache) put(url string, version int64, a cachedAnswer) {
	const overhead = 200 // bytes of an entry beside its strings, roughly
	size := len(url) + len(a.body) + overhead
	c.mu.Lock()
	defer c.mu.Unlock()
	if version < c.made {
		return
	}
	if version > c.made || c.size+size > maxCache {
		c.made, c.size = version, 0
		clear(c.answers)
	}
	c.size += size
	c.answers[url] = a
}
