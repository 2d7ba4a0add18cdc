package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestIdempotencyKey sends two or more creates, with the same Idempotency-Key or with others.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	const inAnotherForm = `{"status":"available","categoryId":7,"n\u0061me":"Rex"}`
	for _, c := range []struct {
		name, edit string // SQL before the request
		body       string
	}{
		{"the same animal", "", rex},
		{"the same animal in another form", "", inAnotherForm},
		{"after an edit", "UPDATE pets SET name = 'x', category_id = 1, status = 'sold'", rex},
		{"after a deletion", "DELETE FROM pets", rex},
		// The status stands for a member that did not exist when the response was stored.
		{"after a release with a new member",
			"UPDATE idempotency_keys SET response = json_remove(response, '$.status')", rex},
	} {
		t.Run("a repeat gets the first response: "+c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			first := s.create(rex, idempotencyKey("k")).wantNew(t, 1)
			execSQL(t, s.file, c.edit)
			s.create(c.body, idempotencyKey("k")).wantRepeat(t, first)
			s.create(rex).wantNew(t, 2) // so the repeat has added nothing
		})
	}

	for _, c := range []struct{ name, body string }{
		{"name", `{"name":"rex","categoryId":7}`},
		{"category", `{"name":"Rex","categoryId":8}`},
		{"status", `{"name":"Rex","categoryId":7,"status":"sold"}`},
	} {
		t.Run("an animal with another "+c.name+" is refused", func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			s.create(rex, idempotencyKey("k")).wantNew(t, 1)
			s.create(c.body, idempotencyKey("k")).wantError(t, 422, "idempotency_key_reused",
				"this Idempotency-Key was used for another animal")
			wantPetCount(t, s.file, 1)
		})
	}

	t.Run("other keys and callers add another animal", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.create(rex, idempotencyKey("k")).wantNew(t, 1)
		s.create(rex).wantNew(t, 2)
		s.create(rex, idempotencyKey("K")).wantNew(t, 3)
		s.create(rex, idempotencyKey("k"), "Authorization: Bearer "+otherKey).wantNew(t, 4)
	})
	t.Run("an invalid animal does not use up a key", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.create(`{"name":1}`, idempotencyKey("k")).want(t, 400)
		s.create(rex, idempotencyKey("k")).wantNew(t, 1)
		s.create(`{"name":1}`, idempotencyKey("k")).want(t, 400)
	})
	t.Run("a damaged response is an error", func(t *testing.T) {
		t.Parallel()
		s := newService(t)
		s.create(rex, idempotencyKey("k")).wantNew(t, 1)
		execSQL(t, s.file, "UPDATE idempotency_keys SET response = 'no JSON'")
		s.create(rex, idempotencyKey("k")).want(t, 500)
	})
}

// TestExpiredIdempotencyKeys lets Idempotency-Keys grow old, under a fake clock: after 24 hours,
// they must add an animal again. Each new animal with a key must delete up to two keys that have
// expired, and no others.
func TestExpiredIdempotencyKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		const keys = "SELECT group_concat(key ORDER BY key) FROM idempotency_keys"
		for i, k := range []string{"a", "b", "c", "d"} { // a is the oldest
			s.create(rex, idempotencyKey(k)).wantNew(t, i+1)
			time.Sleep(time.Second)
		}

		time.Sleep(24*time.Hour - 4*time.Second) // a is 24 hours old, and the last age that counts
		s.create(rex, idempotencyKey("late")).wantNew(t, 5)
		wantSQL(t, s.file, keys, "a,b,c,d,late")
		s.create(rex, idempotencyKey("a")).want(t, 201).wantHeader(t, "Idempotency-Replayed", "true")

		time.Sleep(2 * time.Minute) // now all but late have expired
		again := s.create(rex, idempotencyKey("d")).wantNew(t, 6)
		wantSQL(t, s.file, keys, "c,d,late") // d has replaced the old d; a and b were deleted
		s.create(rex, idempotencyKey("d")).wantRepeat(t, again)
		s.create(rex, idempotencyKey("e")).wantNew(t, 7)
		wantSQL(t, s.file, keys, "d,e,late")
	})
}

// TestBatches adds animals to a locked database, so that many of them share a transaction. An
// animal that is refused must not keep the others from being stored.
func TestBatches(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const zoe = `{"name":"Zoe","categoryId":13}`
	execSQL(t, s.file, `INSERT INTO pets (name, category_id) VALUES ('Zoe', 13);
		CREATE UNIQUE INDEX one_of_13 ON pets (category_id) WHERE category_id = 13`)
	s.create(rex, idempotencyKey("used")).wantNew(t, 2)

	// Each of 20 clients sends five requests, two of them with the same Idempotency-Key.
	var replies [20]struct{ first, same, refused, reused, withoutKey reply }
	waiting := s.lockOutCreates(t)
	for i := range replies {
		r, k := &replies[i], fmt.Sprint(i)
		waiting.create(&r.first, rex, k)
		waiting.create(&r.same, rex, k)
		waiting.create(&r.refused, zoe, k+"-zoe")
		waiting.create(&r.reused, zoe, "used")
		waiting.create(&r.withoutKey, rex, "")
	}
	waiting.letIn()

	for i, r := range replies {
		t.Run(fmt.Sprint("client ", i), func(t *testing.T) {
			if r.first.header.Get("Idempotency-Replayed") != "" {
				r.first, r.same = r.same, r.first // same arrived first
			}
			r.first.want(t, 201)
			r.same.wantRepeat(t, r.first)
			r.refused.wantError(t, 400, "refused", breaksRule)
			r.reused.want(t, 422)
			r.withoutKey.want(t, 201)
		})
	}
	s.log.wantText(t, "UNIQUE constraint failed")
	wantPetCount(t, s.file, 2+20*2) // Zoe, the animal of the used key, and two of each client
	// Each animal that was added with a key has one, and no other key is kept.
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "21")
	wantSQL(t, s.file,
		"SELECT count(*) FROM pets JOIN idempotency_keys ON id = response ->> 'id'", "21")
}

// TestGroupCommit adds 40 animals to a locked database: they must share transactions.
func TestGroupCommit(t *testing.T) {
	t.Parallel()
	s := newService(t)
	before := len(readFile(t, s.file+"-wal"))
	var replies [40]reply
	waiting := s.lockOutCreates(t)
	for i := range replies {
		waiting.create(&replies[i], rex, "")
	}
	waiting.letIn()

	for _, r := range replies {
		r.want(t, 201)
	}
	// A transaction writes at least 3 pages of 4096 bytes to the WAL: 120 pages if each animal had
	// one. Two or three for all of them write less than half of that.
	if pages := (len(readFile(t, s.file+"-wal")) - before) / 4096; pages > 60 {
		t.Fatalf("the WAL has grown by %d pages, want at most 60", pages)
	}
}

// waitingCreates are creates that wait for a locked database.
type waitingCreates struct {
	service  *service
	unlock   func()
	arrived  sync.WaitGroup // the service has read their bodies
	answered sync.WaitGroup
}

// lockOutCreates locks the database, until letIn is called.
func (s *service) lockOutCreates(t *testing.T) *waitingCreates {
	t.Helper()
	return &waitingCreates{service: s, unlock: lock(t, s.file)}
}

// create begins to add an animal, with an Idempotency-Key unless that is "". letIn sets r.
func (w *waitingCreates) create(r *reply, pet, key string) {
	w.arrived.Add(1)
	arrived := sync.OnceFunc(w.arrived.Done)
	body := io.MultiReader(strings.NewReader(pet), atEnd(arrived))
	request := httptest.NewRequest("POST", "/v1/pets", body)
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	w.answered.Go(func() {
		*r = w.service.send(request)
		r.sent = key + " " + pet
	})
}

// letIn unlocks the database when all creates have arrived, and waits for their replies.
func (w *waitingCreates) letIn() {
	w.arrived.Wait()
	w.unlock()
	w.answered.Wait()
}

// atEnd is an empty io.Reader, which calls a function when it is read.
type atEnd func()

func (f atEnd) Read([]byte) (int, error) {
	f()
	return 0, io.EOF
}

// TestLockedDatabase adds an animal while another program holds a lock: it gets 503, and reads do
// not wait for it. If the lock ends in time, an animal with an Idempotency-Key is added.
func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	unlock := lock(t, s.file)
	created := make(chan reply, 1)
	go func() { created <- s.create(rex) }()
	s.awaitCreate() // it waits for 2 seconds
	s.get("/v1/pets/1").want(t, 404)
	s.get("/v1/pets").want(t, 200).wantBody(t, "[]\n")
	s.get("/healthz").want(t, 200)
	if len(created) != 0 {
		t.Fatal("the reads have waited for the create")
	}
	(<-created).wantError(t, 503, "unavailable", unavailable).wantHeader(t, "Retry-After", "1")
	s.log.wantText(t, "level=ERROR", "database is locked")

	go func() { created <- s.create(rex, idempotencyKey("k")) }()
	s.awaitCreate()
	unlock()
	(<-created).wantNew(t, 1)
	wantPetCount(t, s.file, 1)
}

// awaitCreate waits until a create uses the connection that stores animals. If the database is
// locked, the create then waits for the lock.
func (s *service) awaitCreate() {
	for s.writer.Stats().InUse == 0 {
		time.Sleep(time.Millisecond)
	}
}

// TestFullDatabase adds animals until the database is full: the next one gets 503, and lists go on.
func TestFullDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.pragma(t, "max_page_count = 20")
	large := `{"categoryId":1,"name":"` + strings.Repeat("x", 250) + `"}`

	created := 0
	for created < 1000 && s.create(large).status == 201 { // 20 pages of 4096 bytes have space for less
		created++
	}
	s.create(large).wantError(t, 503, "unavailable", unavailable)
	s.log.wantText(t, "level=ERROR", "database or disk is full")
	s.get("/v1/pets").want(t, 200)
	s.get("/healthz").want(t, 200)
	wantPetCount(t, s.file, created)

	execSQL(t, s.file, "DELETE FROM pets")
	s.create(rex).want(t, 201)
}

// TestFailedTransactions makes transactions fail, each in another statement, which the cause in the
// log tells. The animal must get 500, and not be stored. The next one must be.
func TestFailedTransactions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		sabotage func(t *testing.T, s *service)
		cause    string
	}{
		{"the lookup of the Idempotency-Key", func(t *testing.T, s *service) {
			// The lookup must find a row, because fail is called once for each.
			caller := sha256.Sum256([]byte(testKey))
			execSQL(t, s.file, "INSERT INTO idempotency_keys VALUES (?, 'k', unixepoch(), '{}')", caller[:])
			replaceByView(t, s.file, "idempotency_keys", "* FROM real WHERE fail('no lookup')")
		}, "no lookup"},
		{"the insert of the animal", func(t *testing.T, s *service) {
			beforeInsert(t, s.file, "pets", "iif(new.name = 'Rex', fail('no animal'), 0)")
		}, "no animal"},
		{"the insert of the Idempotency-Key", func(t *testing.T, s *service) {
			beforeInsert(t, s.file, "idempotency_keys", "fail('no key')")
		}, "no key"},
		{"COMMIT", breakCommit, "FOREIGN KEY constraint failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			c.sabotage(t, s)
			s.create(rex, idempotencyKey("k")).want(t, 500)
			s.log.wantText(t, "level=ERROR", c.cause)
			s.create(petNamed("Mia")).wantNew(t, 1) // so Rex was not stored
		})
	}
}

// TestFailedReads lists and fetches two animals, of which the second cannot be read. A response
// that would have it must be a 500.
func TestFailedReads(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, view, cause string }{
		{"SQLite returns an error",
			"* FROM real WHERE id = 1 OR fail('a mistake')", "a mistake"},
		{"a name is NULL",
			"id, CASE id WHEN 1 THEN name END AS name, category_id, status FROM real",
			"converting NULL to string is unsupported"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			addPets(t, s.file, 2)
			replaceByView(t, s.file, "pets", c.view)

			// A list that fails must give its connection back. There are fewer than 100 on most
			// machines, so otherwise none would be left for the last lists.
			for range 100 {
				s.get("/v1/pets").wantError(t, 500, "internal", "internal error")
			}
			s.get("/v1/pets?status=sold").want(t, 500)
			s.get("/v1/pets/2").want(t, 500)
			s.log.wantText(t, "level=ERROR", c.cause)
			s.get("/v1/pets/1").want(t, 200)

			// The health check reads the first animal that there is.
			s.get("/healthz").want(t, 200)
			execSQL(t, s.file, "DELETE FROM real WHERE id = 1")
			s.get("/healthz").want(t, 503)
		})
	}
}

// TestPanicInSQLite makes requests panic in SQLite: the program must end with status 1, because the
// connection may stay in use for ever.
func TestPanicInSQLite(t *testing.T) {
	t.Parallel()
	panicInRead := func(t *testing.T, file string) {
		// The first animal can be read, so a list panics in rows.Next.
		replaceByView(t, file, "pets", "* FROM real WHERE id = 1 OR panic_now()")
	}
	panicInInsert := func(t *testing.T, file string) {
		beforeInsert(t, file, "pets", "panic_now()")
	}
	for _, c := range []struct {
		request  string
		sabotage func(t *testing.T, file string)
	}{
		{"GET /v1/pets", panicInRead},
		{"GET /v1/pets/2", panicInRead},
		{"POST /v1/pets", panicInInsert},
	} {
		t.Run(c.request, func(t *testing.T) {
			t.Parallel()
			file := newFile(t)
			p := start(t, file, withAPIKey)
			addPets(t, file, 2)
			c.sabotage(t, file)

			if resp := p.do(c.request, rex); resp.err == nil {
				t.Fatalf("%s = %d, want no response", c.request, resp.status)
			}
			if status := p.wait(t); status != 1 {
				t.Fatalf("the exit status is %d, want 1", status)
			}
			p.log.wantText(t, `level=ERROR msg="panic in the store" panic="a mistake" stack=`, "store.go:")
		})
	}
}
