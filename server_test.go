package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestRequestID lists animals twice. Each response must have an X-Request-Id of its own, although
// the client sends one.
func TestRequestID(t *testing.T) {
	t.Parallel()
	s := newService(t)
	first, second := s.get("/v1/pets", "X-Request-Id: a"), s.get("/v1/pets", "X-Request-Id: a")
	if id := first.header.Get("X-Request-Id"); id == second.header.Get("X-Request-Id") {
		t.Fatalf("two responses have the X-Request-Id %s", id)
	}
}

// TestLog sends requests, and checks the line that each of them logs.
func TestLog(t *testing.T) {
	t.Parallel()
	s := newService(t)
	// The first 8 digits of: printf %s test-key | sha256sum
	const keySum = "key_sha256=62af8704"

	s.wantLine(t, s.get("/v1/pets?after=7").want(t, 200), "INFO",
		"method=GET path=/v1/pets status=200 duration_ms=D "+keySum)
	s.wantLine(t, s.get("/v1/pets?limit=0"), "INFO",
		"method=GET path=/v1/pets status=400 duration_ms=D "+keySum+` error="`+limitRule+`"`)

	// Only 20 characters of the method and 1000 of the path are logged, and no wrong API key.
	long := strings.Repeat("x", 2000)
	s.wantLine(t, s.do(long+" /"+long, "", "Authorization: Bearer secret"), "INFO",
		"method="+long[:20]+" path=/"+long[:999]+" status=401 duration_ms=D"+
			` error="`+unauthorized+`"`)

	execSQL(t, s.file, "DROP TABLE pets")
	s.wantLine(t, s.get("/v1/pets/1"), "ERROR",
		"method=GET path=/v1/pets/1 status=500 duration_ms=D "+keySum+
			` error="SQL logic error: no such table: pets (1)"`)
}

// wantLine checks the last line of the log, which must be of the request that got r. want is what
// follows the id and the client. In it, D stands for a duration.
func (s *service) wantLine(t *testing.T, r reply, level, want string) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(s.log.String()), "\n")
	_, got, _ := strings.Cut(lines[len(lines)-1], " ") // after the time
	got = regexp.MustCompile(`duration_ms=[0-9.]+`).ReplaceAllString(got, "duration_ms=D")

	want = "level=" + level + " msg=request id=" + r.header.Get("X-Request-Id") +
		" client=192.0.2.1:1234 " + want // the address is that of httptest.NewRequest
	if got != want {
		t.Fatalf("%s logged\n%s, want\n%s", r.request(), got, want)
	}
}

// TestPanicInAHandler makes a handler panic: the request gets 500, and the next one is answered.
func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	s := newService(t)
	handlers := map[string]handler{"/": func(*request) (any, error) { panic("a mistake") }}
	s.server = newServer(handlers, s.server.logger)

	s.get("/first").wantError(t, 500, "internal", "internal error")
	s.get("/second").wantError(t, 500, "internal", "internal error")
	s.log.wantText(t, "level=ERROR", "status=500", `error="panic: a mistake`, "server_test.go:")
}

// All but one of the tests of connections run on a service in memory, under the fake clock of
// testing/synctest (see inMemory). The clock stands still while anything runs, and otherwise goes
// on to what happens next: a test that lets hours pass takes no time. The connections are pipes,
// which hold nothing: a write returns when the other end has read it.

// Requests as they are sent. rawCreate lacks its body, rex.
var (
	rawList   = "GET /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\n\r\n"
	rawCreate = "POST /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey +
		"\r\nContent-Length: " + strconv.Itoa(len(rex)) + "\r\n\r\n"
)

// TestSlowRequests lets a client send slowly. The service must close its connection after 5 seconds
// without the whole headers, after 10 seconds without the whole body, or after 150 seconds without
// another request. (net/http answers a first line that is cut off with 400, and slow headers not at
// all.)
func TestSlowRequests(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		sent        string
		eachSecond  string // is sent after that, each second
		closedAfter int    // seconds
		received    string // by the client, as a regular expression
	}{
		{name: "nothing is sent", closedAfter: 5, received: "^$"},
		{name: "the first line is cut off", sent: "GET /v1/pets HT", closedAfter: 5,
			received: "^HTTP/1.1 400 "},
		{name: "the headers are slow", sent: "GET / HTTP/1.1\r\n", eachSecond: "X: x\r\n",
			closedAfter: 5, received: "^$"},
		{name: "the body is slow", sent: rawCreate, eachSecond: " ", closedAfter: 10,
			received: "(?s)^HTTP/1.1 408 .*the request did not arrive within 10 seconds"},
		{name: "no other request follows", sent: rawList, closedAfter: 150, received: `\[\]\n$`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			inMemory(t, func(t *testing.T, s *service) {
				begun := time.Now()
				conn := s.dial(t)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					for err == nil && c.eachSecond != "" {
						time.Sleep(time.Second)
						_, err = io.WriteString(conn, c.eachSecond)
					}
				}()
				got := conn.receiveAll()

				// net/http may wait for a fraction of a second before it closes the connection.
				if took := int(time.Since(begun).Seconds()); took != c.closedAfter {
					t.Errorf("the connection was closed after %ds, want %ds", took, c.closedAfter)
				}
				if !regexp.MustCompile(c.received).MatchString(got) {
					t.Errorf("the client received %q, want %s", got, c.received)
				}
			})
		})
	}
}

// TestLateReading lets a client read a response late. The response must be read within 25 seconds:
// after 24 seconds, it must still be there, and after 26 no more.
func TestLateReading(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]string{
		24 * time.Second: string(encode(openAPI)),
		26 * time.Second: "",
	} {
		t.Run(wait.String(), func(t *testing.T) {
			t.Parallel()
			inMemory(t, func(t *testing.T, s *service) {
				conn := s.dial(t)
				conn.send(t, "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
				time.Sleep(wait)
				_, body, _ := strings.Cut(conn.receiveAll(), "\r\n\r\n")
				if body != want {
					t.Fatalf("the client received %.1000q, want %.1000q", body, want)
				}
			})
		})
	}
}

// TestInvalidHTTP sends requests that net/http itself refuses: these errors must have the form of
// the others, and be logged.
func TestInvalidHTTP(t *testing.T) {
	t.Parallel()
	t.Cleanup(func() { // after the subtests
		if serviceHeader.Get("X-Request-Id") != "" {
			t.Error("a response has changed serviceHeader, which all responses share")
		}
	})

	tooLarge := strings.Repeat("x", 17<<10) // the limit is 16 KiB
	for _, c := range []struct{ name, request, message string }{
		{"an invalid path", "GET /v1/pets/%zz HTTP/1.1\r\nHost: x\r\n\r\n", "400 Bad Request"},
		{"an invalid header", "GET / HTTP/1.1\r\nHost: x\r\na b: c\r\n\r\n",
			"400 Bad Request: invalid header name"},
		{"an expectation", "GET / HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n",
			"417 Expectation Failed"},
		{"large headers", "GET / HTTP/1.1\r\nHost: x\r\nX: " + tooLarge + "\r\n\r\n",
			"431 Request Header Fields Too Large"},
		{"an encoding", "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
			"501 Not Implemented"},
		{"a version", "GET / HTTP/3.0\r\nHost: x\r\n\r\n",
			"505 HTTP Version Not Supported: unsupported protocol version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			inMemory(t, func(t *testing.T, s *service) {
				conn := s.dial(t)
				go io.WriteString(conn, c.request) // the service may not read all of it

				status, err := strconv.Atoi(c.message[:3])
				must(t, err)
				resp := conn.receive(t).wantError(t, status, "invalid_http", c.message).
					wantHeader(t, "Connection", "close")
				s.log.wantText(t, "level=INFO msg=request id="+resp.header.Get("X-Request-Id")+
					" client=pipe ", c.message)
				conn.wantClosed(t)
			})
		})
	}
}

// TestRawRequests sends requests as bytes. Each proves the rule that its name states. Most have no
// API key, and so get 401. Some have a body that no handler reads: the client must be able to send
// all of it.
func TestRawRequests(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, request, received string }{
		{"OPTIONS * needs an API key",
			"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
			"HTTP/1.1 401 "},
		{"15 KiB of headers are accepted",
			"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 15<<10) + "\r\n\r\n",
			"HTTP/1.1 200 "},
		{"a body of 1 MiB is read",
			"PUT /v1/pets HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n" +
				strings.Repeat("x", 1048576),
			"HTTP/1.1 401 "},
		{"a body in HTTP/1.0 is read",
			"PUT /v1/pets HTTP/1.0\r\nContent-Length: 1048576\r\n\r\n" +
				strings.Repeat("x", 1048576),
			"HTTP/1.0 401 "},
		{"a body in chunks is read",
			"PUT /v1/pets HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" +
				// The size of a chunk is in hexadecimal. That of the last one is 0.
				"80000\r\n" + strings.Repeat("x", 0x80000) + "\r\n0\r\n\r\n",
			"HTTP/1.1 401 "},
		{"a body that is declared to be larger than 1 MiB is not waited for",
			"PUT /v1/pets HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n",
			"HTTP/1.1 401 "},
		{"a client that expects 100 Continue gets that, and its refusal",
			"POST /v1/pets HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" +
				"Authorization: Bearer " + testKey + "\r\nExpect: 100-continue\r\n" +
				"Content-Length: 500000\r\n\r\n" + strings.Repeat("x", 500000), // more than 64 KiB
			"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 "},
		{"a client that expects 100 Continue for more than 1 MiB gets only its refusal",
			"POST /v1/pets HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" +
				"Authorization: Bearer " + testKey + "\r\nExpect: 100-continue\r\n" +
				"Content-Length: 1048577\r\n\r\n",
			"HTTP/1.1 413 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			inMemory(t, func(t *testing.T, s *service) {
				if sentAll := s.dial(t).wantExchange(t, c.request, c.received); !sentAll {
					t.Fatal("the service has not read the whole request")
				}
			})
		})
	}
}

// TestChunkTooLarge sends a chunk of 3 MiB. The service must not read all of it.
func TestChunkTooLarge(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, s *service) {
		request := "PUT /v1/pets HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" +
			"300000\r\n" + strings.Repeat("x", 0x300000) // the size is in hexadecimal
		if sentAll := s.dial(t).wantExchange(t, request, "HTTP/1.1 401 "); sentAll {
			t.Fatal("the service has read the whole chunk")
		}
	})
}

// wantExchange sends a request, and reads until the service closes the connection, which it must do
// within a second. What the client receives must begin with want. wantExchange reports whether the
// service has read the whole request.
func (c *clientConn) wantExchange(t *testing.T, request, want string) (sentAll bool) {
	t.Helper()
	begun := time.Now()
	sent := make(chan error, 1)
	go func() {
		_, err := io.WriteString(c, request)
		sent <- err
	}()
	got := c.receiveAll()

	// net/http waits for half a second before it closes a connection.
	if took := time.Since(begun); took > time.Second {
		t.Errorf("the connection was closed after %v, want at most 1s", took)
	}
	if !strings.HasPrefix(got, want) {
		t.Errorf("the client received %.1000q, want %q", got, want)
	}
	return <-sent == nil
}

// TestLargeHeaders sends large headers over TCP, which the service does not read to their end:
// after the response, the connection must end, and not be reset, or the client could miss the
// response.
func TestLargeHeaders(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), withAPIKey)
	conn, err := net.Dial("tcp", p.addr)
	must(t, err)
	defer conn.Close()

	io.WriteString(conn, "GET / HTTP/1.1\r\nX: "+strings.Repeat("x", 40<<10)) // more than 16 KiB
	got, err := io.ReadAll(conn)
	must(t, err)
	if !strings.HasPrefix(string(got), "HTTP/1.1 431 ") {
		t.Fatalf("the client received %q, want 431", got)
	}
}

// TestStopAnswersOnAnOpenConnection sends a request while the service stops: it must be answered. A
// connection without a request must be closed.
func TestStopAnswersOnAnOpenConnection(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, s *service) {
		busy, idle := s.dial(t), s.dial(t)
		busy.send(t, rawList)
		busy.receive(t).want(t, 200).wantHeader(t, "Connection", "")
		idle.send(t, rawList)
		idle.receive(t).want(t, 200)

		begun := s.beginStop(t)
		time.Sleep(drainTime - time.Millisecond) // almost too late
		busy.send(t, rawList)
		busy.receive(t).want(t, 200).wantHeader(t, "Connection", "close")
		s.wantStopped(t, begun, drainTime)
		busy.wantClosed(t)
		idle.wantClosed(t)
	})
}

// TestStopWaitsForARequest stops the service while a request arrives: it must be answered.
func TestStopWaitsForARequest(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, s *service) {
		conn := s.dial(t)
		conn.send(t, rawCreate) // without its body

		begun := s.beginStop(t)
		time.Sleep(4 * time.Second) // less than drainTime + shutdownTime
		conn.send(t, rex)
		conn.receive(t).want(t, 201).wantHeader(t, "Connection", "close")
		s.wantStopped(t, begun, 4*time.Second)
		s.log.wantText(t, "duration_ms=4000")
	})
}

// TestStopCutsOffARequest stops the service while a request arrives that never ends: the service
// must not wait for it for ever.
func TestStopCutsOffARequest(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, s *service) {
		conn := s.dial(t)
		conn.send(t, rawCreate) // its body never comes

		begun := s.beginStop(t)
		s.wantStopped(t, begun, drainTime+shutdownTime)
		conn.wantClosed(t)
		s.log.wantText(t, `WARN msg="connections were cut off"`)
	})
}

// TestStopClosesASilentConnection stops the service beside a connection on which nothing was sent.
func TestStopClosesASilentConnection(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, s *service) {
		conn := s.dial(t)

		begun := s.beginStop(t)
		s.wantStopped(t, begun, readHeaderTimeout)
		conn.wantClosed(t)
		s.log.wantNoText(t, "cut off")
	})
}

// TestFailedAccept makes the listener fail once, as without file descriptors: the service must log
// that as a warning, and go on.
func TestFailedAccept(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, s *service) {
		s.listener.failAccept()
		conn := s.dial(t)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200)
		s.log.wantText(t, "level=WARN", "too many open files")
	})
}

// TestClosedListener makes the listener fail for good: serve must return its error.
func TestClosedListener(t *testing.T) {
	t.Parallel()
	closed := &memoryListener{conns: make(chan net.Conn)}
	must(t, closed.Close())
	if err := newService(t).server.serve(t.Context(), closed); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("serve = %v, want %v", err, net.ErrClosed)
	}
}

// inMemory runs a test under a fake clock, with a service that serves connections in memory: see
// dial.
func inMemory(t *testing.T, test func(t *testing.T, s *service)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.listener = &memoryListener{conns: make(chan net.Conn)}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := s.server.serve(ctx, s.listener); err != nil {
				t.Errorf("serve = %v", err)
			}
		}()
		s.stop = func() {
			cancel()
			<-ended
		}
		t.Cleanup(func() {
			s.stop() // again, if the test has stopped it: that changes nothing
			// synctest fails if a goroutine is left. net/http ends the last ones of its connections
			// some seconds after the stop. A minute is more than enough, and takes no time.
			time.Sleep(time.Minute)
		})

		test(t, s)
	})
}

// beginStop begins to stop the service, which must then refuse new connections. It returns the
// time.
func (s *service) beginStop(t *testing.T) time.Time {
	t.Helper()
	go s.stop()
	synctest.Wait()
	if !s.listener.closed.Load() {
		t.Fatal("the service accepts connections during the stop")
	}
	return time.Now()
}

// wantStopped waits for the end of a stop, and checks how long it took. It may take some 500 ms
// more, because net/http looks at the connections only now and then.
func (s *service) wantStopped(t *testing.T, begun time.Time, want time.Duration) {
	t.Helper()
	s.stop()
	if took := time.Since(begun); took < want || took > want+600*time.Millisecond {
		t.Fatalf("the stop took %v, want %v", took, want)
	}
}

// dial opens a connection, which is closed at the end of the test.
func (s *service) dial(t *testing.T) *clientConn {
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close() })
	s.listener.conns <- theirs
	return &clientConn{ours, bufio.NewReader(ours)}
}

// clientConn is a client's end of a connection. A Write returns when the service has read all of
// it.
type clientConn struct {
	net.Conn
	reader *bufio.Reader
}

func (c *clientConn) send(t *testing.T, text string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	must(t, err)
}

// receive reads a response. It does not know the request, so want does not look into openapi.json.
func (c *clientConn) receive(t *testing.T) reply {
	t.Helper()
	resp, err := http.ReadResponse(c.reader, nil)
	must(t, err)
	if resp.Close { // http.ReadResponse has taken the header away
		resp.Header.Set("Connection", "close")
	}
	return newReply("", "a request on a connection", resp, nil)
}

// receiveAll reads until the service closes the connection.
func (c *clientConn) receiveAll() string {
	received, _ := io.ReadAll(c.reader)
	return string(received)
}

// wantClosed checks that the service has closed the connection.
func (c *clientConn) wantClosed(t *testing.T) {
	t.Helper()
	begun := time.Now()
	if got := c.receiveAll(); got != "" || time.Since(begun) > time.Second {
		t.Fatalf("received %q after %v, want a closed connection", got, time.Since(begun))
	}
}

// memoryListener is a net.Listener for connections in memory, which work under a fake clock.
type memoryListener struct {
	conns  chan net.Conn // what Accept returns; for nil, it returns an error
	closed atomic.Bool
}

// failAccept makes Accept fail once, and returns when it has.
func (l *memoryListener) failAccept() { l.conns <- nil }

func (l *memoryListener) Accept() (net.Conn, error) {
	conn, ok := <-l.conns
	if !ok {
		return nil, net.ErrClosed
	}
	if conn == nil {
		return nil, syscall.EMFILE
	}
	return conn, nil
}

func (l *memoryListener) Close() error {
	if !l.closed.Swap(true) {
		close(l.conns)
	}
	return nil
}

func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{} }
