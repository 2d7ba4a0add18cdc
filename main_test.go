package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// TestWrongFlags runs the program with a wrong command line: it must write the usage, too.
func TestWrongFlags(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ arg, message string }{
		{"x", `unexpected argument "x"`},
		{"-keys=x", "flag provided but not defined: -keys"},
		{"-db=", "-db must not be empty"},
		{"-addr=", "-addr must not be empty"},
		{"-backup=", "-backup must not be empty"},
	} {
		wantRefusedSettings(t, withAPIKey, 2, c.message, c.arg).wantText(t, "Usage: API_KEYS=")
	}
}

// TestHelp runs the program with -h.
func TestHelp(t *testing.T) {
	t.Parallel()
	wantRefusedSettings(t, withAPIKey, 0, "Usage: API_KEYS=", "-h").
		wantText(t, `(default "animalstore.db")`, `(default "127.0.0.1:8080")`)
}

// TestRefusedSettings runs the program with settings that it cannot use.
func TestRefusedSettings(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	wantRefusedSettings(t, withAPIKey, 1, "address already in use", "-addr", taken.Addr().String())

	wantRefusedSettings(t, env{}, 1, "API_KEYS is not set", "-addr", ":0")
	wantRefusedSettings(t, env{"API_KEYS": ""}, 1, "API_KEYS: the list has no key")
	wantRefusedSettings(t, env{"API_KEYS": "one, secret key"}, 1,
		"API_KEYS: item 2 must consist of visible ASCII characters, without spaces")
	wantRefusedSettings(t, env{"API_KEYS": ",,sécret"}, 1,
		"API_KEYS: item 3 must consist of visible ASCII")

	dir := t.TempDir()
	wantRefusedSettings(t, withAPIKey, 1, `/none/animals.db": unable to open database file (14)`,
		"-db", dir+"/none/animals.db")
	wantOnly(t, dir) // the program has not created the folder none
	wantRefusedSettings(t, withAPIKey, 1, "SQLite cannot use a write-ahead log here",
		"-db", ":memory:")
}

// wantRefusedSettings runs the program with a database in a new folder and more args: see
// wantRefusal. It must create no file, and write no API key.
func wantRefusedSettings(
	t *testing.T, e env, status int, message string, args ...string,
) (stderr *logBuffer) {
	t.Helper()
	dir := t.TempDir()
	// A flag in args replaces the same one before it.
	args = append([]string{"-addr", "127.0.0.1:0", "-db", dir + "/animals.db"}, args...)
	stderr = wantRefusal(t, dir, e, status, message, args...)
	stderr.wantNoText(t, "secret", "sécret", testKey)
	return stderr
}

// TestSettings starts the program on all addresses, with two keys, and with a database in its
// working directory, as it is by default.
func TestSettings(t *testing.T) {
	t.Parallel()
	p := start(t, "animals.db", env{"API_KEYS": "one,\n" + testKey + "\n"}, "-addr", "0.0.0.0:0")
	wantOnly(t, p.cmd.Dir, ".animals.db.links", "animals.db", "animals.db-shm", "animals.db-wal")
	p.log.wantText(t, "animals.db", " keys=2 version=")
	p.log.wantNoText(t, testKey, "api_key")
	p.get("/v1/pets").want(t, 200)
	p.get("/v1/pets", "Authorization: Bearer one").want(t, 200)
}

// TestMadeKey starts the program without API_KEYS: it must make a key, log it, and accept only
// that.
func TestMadeKey(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), env{})
	p.log.wantText(t,
		"level=WARN", `msg="API_KEYS is not set: made a key for this run"`, " keys=1 ")

	_, made, _ := strings.Cut(p.log.String(), "api_key=")
	made, _, _ = strings.Cut(made, "\n")
	if len(made) < 26 { // 128 bits in base32
		t.Fatalf("the key %q has %d characters, want 26 or more", made, len(made))
	}
	p.get("/v1/pets", "Authorization: Bearer "+made).want(t, 200)
	p.get("/v1/pets").want(t, 401)
}

// TestSignals stops the program by a signal while clients add animals: no client may be cut off. A
// second signal, when no client can connect any more, must change nothing.
func TestSignals(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, withAPIKey)

	var created atomic.Int64
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for {
				resp := p.create(rex)
				if errors.Is(resp.err, syscall.ECONNREFUSED) {
					return
				}
				if resp.status != 201 {
					t.Errorf("%s = %d, %v, want 201 or a refused connection",
						resp.request(), resp.status, resp.err)
					return
				}
				if created.Add(1) == 100 { // the clients are busy
					p.cmd.Process.Signal(syscall.SIGTERM)
				}
			}
		})
	}
	clients.Wait()
	p.cmd.Process.Signal(syscall.SIGINT)

	if status := p.wait(t); status != 0 {
		t.Fatalf("after the signals, the status is %d, want 0", status)
	}
	p.log.wantText(t, "msg=stopping", "msg=stopped")
	p.log.wantNoText(t, "cut off")
	wantOnly(t, filepath.Dir(file), "animals.db")
	wantPetCount(t, file, int(created.Load()))
}

// TestUnreadLog closes the pipe that the program logs to: the program must go on. It logs each
// request.
func TestUnreadLog(t *testing.T) {
	t.Parallel()
	p := start(t, newFile(t), withAPIKey)
	must(t, p.stderr.Close())
	for range 3 {
		p.get("/v1/pets").want(t, 200)
	}
}

// TestKill starts the program, and kills it while clients add animals, three times. No animal that
// was acknowledged may be missing, and a repeat of its create must get the first response.
func TestKill(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	acknowledged := map[string]reply{} // by Idempotency-Key, which is also the name of the animal
	for round := range 3 {
		p := start(t, file, withAPIKey)
		for name, first := range acknowledged {
			p.create(petNamed(name), idempotencyKey(name)).wantRepeat(t, first)
		}
		maps.Copy(acknowledged, createUntilKilled(t, p, round))
	}

	s := openService(t, file)
	for _, first := range acknowledged {
		s.get("/v1/"+first.header.Get("Location")).want(t, 200).wantBody(t, first.body)
	}
	wantSQL(t, file, "SELECT count(*) - count(DISTINCT name) FROM pets", "0") // no name is repeated
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
}

// createUntilKilled lets 16 clients add animals, kills the program after 100 creates, and returns
// the responses to those that were acknowledged, by Idempotency-Key.
func createUntilKilled(t *testing.T, p *process, round int) map[string]reply {
	t.Helper()
	acknowledged := map[string]reply{}
	var mu sync.Mutex // guards acknowledged
	var clients sync.WaitGroup
	for client := range 16 {
		clients.Go(func() {
			for i := 0; ; i++ {
				name := fmt.Sprint(round, "-", client, "-", i)
				resp := p.create(petNamed(name), idempotencyKey(name))
				if resp.status != 201 {
					return // the program was killed
				}

				mu.Lock()
				acknowledged[name] = resp
				if len(acknowledged) == 100 {
					p.cmd.Process.Kill()
				}
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	p.cmd.Process.Kill() // if creates fail early
	p.wait(t)
	return acknowledged
}
