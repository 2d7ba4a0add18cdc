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

// TestRefusedSettings runs the program with wrong settings, and with -h: it must end at once with
// this status and message, and create no file.
func TestRefusedSettings(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { taken.Close() })

	for _, c := range []struct {
		args    string // separated by spaces
		env     env
		status  int
		message string
	}{
		{"x", withAPIKey, 2, `unexpected argument "x"`},
		{"-keys x", withAPIKey, 2, "flag provided but not defined: -keys"},
		{"-db=", withAPIKey, 2, "-db must not be empty"},
		{"-addr=", withAPIKey, 2, "-addr must not be empty"},
		{"-backup=", withAPIKey, 2, "-backup must not be empty"},
		{"-h", withAPIKey, 0, `(default "animalstore.db")`},
		{"-h", withAPIKey, 0, `(default "127.0.0.1:8080")`},

		{"-addr " + taken.Addr().String(), withAPIKey, 1, "address already in use"},
		{"-addr :0", env{}, 1, "API_KEYS is not set"},
		{"", env{"API_KEYS": ""}, 1, "API_KEYS: the list has no key"},
		{"", env{"API_KEYS": "one, secret key"}, 1,
			"API_KEYS: item 2 must consist of visible ASCII characters, without spaces"},
		{"", env{"API_KEYS": ",,sécret"}, 1, "API_KEYS: item 3 must consist of visible ASCII"},
		{"-db DIR/none/animals.db", withAPIKey, 1,
			`/none/animals.db": unable to open database file (14)`},
		{"-db :memory:", withAPIKey, 1, "SQLite cannot use a write-ahead log here"},
	} {
		dir := t.TempDir()
		// A flag in c.args replaces the same one before it.
		args := strings.Fields("-addr 127.0.0.1:0 -db DIR/animals.db " + c.args)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "DIR", dir)
		}
		stderr := wantRefusal(t, dir, c.env, c.status, c.message, args...)
		stderr.wantNoText(t, "secret", "sécret", testKey)
		if c.status != 1 {
			stderr.wantText(t, "Usage: API_KEYS=")
		}
	}
}

// TestSettings starts the program on all addresses, with two keys.
func TestSettings(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, env{"API_KEYS": "one,\n" + testKey + "\n"}, "-addr", "0.0.0.0:0")
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
	p.log.wantText(t, "level=WARN", `msg="API_KEYS is not set: made a key for this run"`, " keys=1 ")
	_, made, _ := strings.Cut(p.log.String(), "api_key=")
	made, _, _ = strings.Cut(made, "\n")
	if len(made) < 26 { // 128 bits in base32
		t.Fatalf("the key %s is short", made)
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
					t.Errorf("a create = %d, %v, want 201 or a refused connection", resp.status, resp.err)
					return
				}
				if created.Add(1) == 100 {
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

// TestUnreadLog closes the pipe that the program logs to: the program must go on.
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
	wantSQL(t, file, "SELECT count(*) - count(DISTINCT name) FROM pets", "0") // none is there twice
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
					return
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
