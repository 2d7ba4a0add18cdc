package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
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

// TestLog sends requests, and checks the lines that they log.
func TestLog(t *testing.T) {
	t.Parallel()
	s := newService(t)
	wantLine := func(r reply, level, rest string) {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(s.log.String()), "\n")
		_, got, _ := strings.Cut(lines[len(lines)-1], " ") // after the time
		got = regexp.MustCompile(`duration_ms=[0-9.]+`).ReplaceAllString(got, "duration_ms=D")
		want := "level=" + level + " msg=request id=" + r.header.Get("X-Request-Id") +
			" client=192.0.2.1:1234 " + rest
		if got != want {
			t.Fatalf("%.50s logged\n%s, want\n%s", r.request(), got, want)
		}
	}

	first, second := s.get("/v1/pets").header, s.get("/v1/pets").header
	if id := "X-Request-Id"; first.Get(id) == second.Get(id) {
		t.Fatal("two responses have the same X-Request-Id")
	}
	const ofKey = "key_sha256=62af8704" // printf %s test-key | sha256sum
	wantLine(s.get("/v1/pets?after=7", "X-Request-Id: mine").want(t, 200), "INFO",
		"method=GET path=/v1/pets status=200 duration_ms=D "+ofKey)
	wantLine(s.get("/v1/pets?limit=0"), "INFO",
		"method=GET path=/v1/pets status=400 duration_ms=D "+ofKey+` error="`+limitRule+`"`)
	long := strings.Repeat("x", 2000)
	wantLine(s.do(long+" /"+long, "", "Authorization: Bearer secret"), "INFO",
		"method="+long[:20]+" path=/"+long[:999]+` status=401 duration_ms=D error="`+unauthorized+`"`)
	execSQL(t, s.file, "DROP TABLE pets")
	wantLine(s.get("/v1/pets/1"), "ERROR", "method=GET path=/v1/pets/1 status=500 duration_ms=D "+
		ofKey+` error="SQL logic error: no such table: pets (1)"`)
}

// TestPanicInAHandler lets a handler panic: the request gets 500, and the next one is answered.
func TestPanicInAHandler(t *testing.T) {
	t.Parallel()
	log := &logBuffer{}
	handlers := map[string]handler{"/": func(*request) (any, error) { panic("a mistake") }}
	c := client{transport: inProcess{newServer(handlers, log.logger()), t.Name()}}

	for range 2 {
		c.get("/").wantError(t, 500, "internal", "internal error")
	}
	log.wantText(t, "level=ERROR", "status=500", `error="panic: a mistake`, "server_test.go:")
}

// The tests of connections run on a service that serves in memory, under the fake clock of
// testing/synctest (see inMemory). The clock stands still while anything runs, and otherwise goes
// on to what happens next: a test that lets hours pass takes no time. The connections are pipes,
// which hold nothing: a write returns when the other end has read it.

// Requests as they are sent. rawCreate lacks its body, rex.
var (
	rawList   = "GET /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\n\r\n"
	rawCreate = "POST /v1/pets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey +
		"\r\nContent-Length: " + strconv.Itoa(len(rex)) + "\r\n\r\n"
)

// TestSlowRequests lets a client send slowly: the service must close its connection after so many
// seconds. (net/http answers a first line that is cut off with 400, and slow headers not at all.)
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
			inMemory(t, func(t *testing.T, s *memoryService) {
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

				took := int(time.Since(begun).Seconds()) // without fractions: net/http may wait a little
				if took != c.closedAfter {
					t.Errorf("the connection was closed after %d seconds, want %d", took, c.closedAfter)
				}
				if !regexp.MustCompile(c.received).MatchString(got) {
					t.Errorf("the client received %q, want %s", got, c.received)
				}
			})
		})
	}
}

// TestLateReading lets a client read a response late: after 24 seconds, it must still be there, and
// after 26 no more.
func TestLateReading(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]string{
		24 * time.Second: string(encode(openAPI)),
		26 * time.Second: "",
	} {
		t.Run(wait.String(), func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
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
	t.Cleanup(func() { // when all cases have ended
		if serviceHeader.Get("X-Request-Id") != "" {
			t.Error("a response has changed serviceHeader, which all responses share")
		}
	})
	for _, c := range []struct {
		name, request string
		status        int
		message       string
	}{
		{"an invalid path", "GET /v1/pets/%zz HTTP/1.1\r\nHost: x\r\n\r\n",
			400, "400 Bad Request"},
		{"an invalid header", "GET / HTTP/1.1\r\nHost: x\r\na b: c\r\n\r\n",
			400, "400 Bad Request: invalid header name"},
		{"an expectation", "GET / HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n",
			417, "417 Expectation Failed"},
		{"large headers", "GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 17<<10) + "\r\n\r\n",
			431, "431 Request Header Fields Too Large"},
		{"an encoding", "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
			501, "501 Not Implemented"},
		{"a version", "GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505,
			"505 HTTP Version Not Supported: unsupported protocol version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
				conn := s.dial(t)
				go io.WriteString(conn, c.request)
				want := fmt.Sprintf(`{"code":"invalid_http","message":%q,"status":%d}`,
					c.message, c.status)
				resp := conn.receive(t).want(t, c.status).wantBody(t, want+"\n").
					wantHeader(t, "Connection", "close")
				s.log.wantText(t, "level=INFO msg=request id="+resp.header.Get("X-Request-Id")+
					" client=pipe ", c.message)
				conn.wantClosed(t)
			})
		})
	}
}

// TestRawRequests sends requests that only a connection can show. Each proves the rule that its
// name states. In most, no handler reads the body to its end. The client must be able to send all
// of it, unless cutOff is set, and receive the response without delay.
func TestRawRequests(t *testing.T) {
	t.Parallel()
	request := func(line string, headers ...string) string {
		headers = append(headers, "Host: x", "Connection: close")
		return line + "\r\n" + strings.Join(headers, "\r\n") + "\r\n\r\n"
	}
	body := func(size int) string { return strings.Repeat("x", size) }
	// chunk begins a chunk of so many bytes (RFC 9112).
	chunk := func(size int) string { return fmt.Sprintf("%x\r\n", size) }
	const put, chunked = "PUT /v1/pets HTTP/1.1", "Transfer-Encoding: chunked"
	// expecting is a create that expects 100 Continue before a body of so many bytes.
	expecting := func(size int) string {
		return request("POST /v1/pets HTTP/1.1", "Authorization: Bearer "+testKey,
			"Expect: 100-continue", fmt.Sprint("Content-Length: ", size))
	}

	for _, c := range []struct {
		name, sent string
		want       string // the begin of what the client receives
		cutOff     bool   // the connection is closed before the client has sent all
	}{
		{name: "OPTIONS * needs an API key",
			sent: request("OPTIONS * HTTP/1.1"), want: "HTTP/1.1 401 "},
		{name: "15 KiB of headers are accepted",
			sent: request("GET /healthz HTTP/1.1", "X: "+body(15<<10)), want: "HTTP/1.1 200 "},
		{name: "a body of up to 1 MiB is read",
			sent: request(put, "Content-Length: 1000000") + body(1000000), want: "HTTP/1.1 401 "},
		{name: "a body in HTTP/1.0 is read",
			sent: request("PUT / HTTP/1.0", "Content-Length: 1000000") + body(1000000),
			want: "HTTP/1.0 401 "},
		{name: "a body in chunks is read",
			sent: request(put, chunked) + chunk(500000) + body(500000) + "\r\n" + chunk(0) + "\r\n",
			want: "HTTP/1.1 401 "},
		{name: "a body that is declared to be larger than 1 MiB is not waited for",
			sent: request(put, "Content-Length: 2000000"), want: "HTTP/1.1 401 "},
		{name: "no more than 1 MiB of a larger chunk is read",
			sent: request(put, chunked) + chunk(3<<20) + body(3<<20), want: "HTTP/1.1 401 ", cutOff: true},
		{name: "a client that expects 100 gets it, and its refusal",
			sent: expecting(500000) + body(500000),
			want: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 "},
		{name: "a client that expects 100 for more than 1 MiB gets only its refusal",
			sent: expecting(3000000), want: "HTTP/1.1 413 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *memoryService) {
				begun, conn := time.Now(), s.dial(t)
				sent := make(chan error, 1)
				go func() {
					_, err := io.WriteString(conn, c.sent)
					sent <- err
				}()
				got := conn.receiveAll()

				if took := time.Since(begun); took > time.Second {
					t.Errorf("the connection was closed after %v, want no delay", took)
				}
				if !strings.HasPrefix(got, c.want) {
					t.Errorf("the client received %.1000q, want %q", got, c.want)
				}
				if err := <-sent; (err != nil) != c.cutOff {
					t.Errorf("sending the request failed: %v, want a failure: %v", err, c.cutOff)
				}
			})
		})
	}
}

// TestLargeHeaders sends large headers over TCP, which the service does not read to their end:
// after the response, the connection must end, and not be reset, or the client could miss the
// response.
func TestLargeHeaders(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), withAPIKey)
	conn, err := net.Dial("tcp", p.host)
	must(t, err)
	defer conn.Close()
	io.WriteString(conn, "GET / HTTP/1.1\r\nX: "+strings.Repeat("x", 40<<10))
	got, err := io.ReadAll(conn)
	if must(t, err); !strings.HasPrefix(string(got), "HTTP/1.1 431 ") {
		t.Fatalf("the client received %q, want 431", got)
	}
}

// TestStopAnswersOnAnOpenConnection sends a request while the service stops: it must be answered. A
// connection without a request must be closed.
func TestStopAnswersOnAnOpenConnection(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn, idle := s.dial(t), s.dial(t)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200).wantHeader(t, "Connection", "")
		idle.send(t, rawList)
		idle.receive(t).want(t, 200)

		begun := s.beginStop(t)
		time.Sleep(drainTime - time.Millisecond)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200).wantHeader(t, "Connection", "close")
		s.wantStopped(t, begun, drainTime)
		conn.wantClosed(t)
		idle.wantClosed(t)
	})
}

// TestStopWaitsForARequest stops the service while a request arrives: it must be answered.
func TestStopWaitsForARequest(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn := s.dial(t)
		conn.send(t, rawCreate) // without its body

		begun := s.beginStop(t)
		time.Sleep(4 * time.Second)
		conn.send(t, rex)
		conn.receive(t).want(t, 201).wantHeader(t, "Connection", "close")
		s.wantStopped(t, begun, 4*time.Second)
		s.log.wantText(t, "duration_ms=4000")
	})
}

// TestStopCutsOffARequest stops the service while a request arrives that never ends: the service
// must not wait for it for ever.
func TestStopCutsOffARequest(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
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
	inMemory(t, func(t *testing.T, s *memoryService) {
		conn := s.dial(t)

		begun := s.beginStop(t)
		s.wantStopped(t, begun, readHeaderTimeout)
		conn.wantClosed(t)
		s.log.wantNoText(t, "cut off")
	})
}

// TestFailedAccept lets the listener fail once, as without file descriptors: the service must log
// that as a warning, and go on. If a listener fails for good, serve must return the error.
func TestFailedAccept(t *testing.T) {
	inMemory(t, func(t *testing.T, s *memoryService) {
		s.listener.failAccept()
		conn := s.dial(t)
		conn.send(t, rawList)
		conn.receive(t).want(t, 200)
		s.log.wantText(t, "level=WARN", "too many open files")

		closed := &memoryListener{conns: make(chan net.Conn)}
		must(t, closed.Close())
		if err := s.serve(t.Context(), closed); !errors.Is(err, net.ErrClosed) {
			t.Errorf("on a closed listener, serve = %v, want %v", err, net.ErrClosed)
		}
	})
}

// memoryService is a service that serves connections in memory.
type memoryService struct {
	*service
	listener *memoryListener
	stop     func() // stops the service, and returns when it has ended
}

// inMemory calls t.Parallel, and runs a test on a service that serves connections in memory, under
// a fake clock.
func inMemory(t *testing.T, test func(t *testing.T, s *memoryService)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &memoryService{
			service:  newService(t),
			listener: &memoryListener{conns: make(chan net.Conn)},
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := s.serve(ctx, s.listener); err != nil {
				t.Errorf("serve = %v", err)
			}
		}()
		s.stop = func() {
			cancel()
			<-ended
		}
		t.Cleanup(func() {
			s.stop() // again, if the test has stopped it: that changes nothing
			// synctest fails if a goroutine is left. Some seconds after the stop, net/http ends the
			// last ones of its connections.
			time.Sleep(time.Minute)
		})

		test(t, s)
	})
}

// beginStop begins to stop the service, which must then refuse new connections. It returns the
// time.
func (s *memoryService) beginStop(t *testing.T) time.Time {
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
func (s *memoryService) wantStopped(t *testing.T, begun time.Time, want time.Duration) {
	t.Helper()
	s.stop()
	if took := time.Since(begun); took < want || took > want+600*time.Millisecond {
		t.Fatalf("the stop took %v, want %v", took, want)
	}
}

// dial opens a connection, which is closed at the end of the test.
func (s *memoryService) dial(t *testing.T) *clientConn {
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

// failAccept lets Accept fail once, and returns when it has.
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
