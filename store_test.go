package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	sqlite3 "modernc.org/sqlite/lib"
)

// TestIdempotencyKey adds animals with Idempotency-Keys. A repeat must get the first response, even
// after an edit or a deletion, and a key that was used for another animal must get 422.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := newService(t)

	s.create(`{"name":1}`, idempotencyKey("k")).want(t, 400) // does not use up the key
	first := s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	s.create(rex).wantNew(t, 2)
	s.create(rex, idempotencyKey("K")).wantNew(t, 3)
	s.create(rex, idempotencyKey("k"), "Authorization: Bearer "+otherKey).wantNew(t, 4)

	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	s.create(`{"status":"available","categoryId":7,"n\u0061me":"Rex"}`, idempotencyKey("k")).
		wantRepeat(t, first)
	execSQL(t, s.file, "UPDATE pets SET name = 'x', category_id = 1, status = 'sold'")
	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	execSQL(t, s.file, "DELETE FROM pets WHERE id = 1")
	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)

	for _, body := range []string{
		`{"name":"rex","categoryId":7}`,
		`{"name":"Rex","categoryId":8}`,
		`{"name":"Rex","categoryId":7,"status":"sold"}`,
	} {
		s.create(body, idempotencyKey("k")).
			wantError(t, 422, "idempotency_key_reused", "this Idempotency-Key was used for another animal")
	}
	s.create(`{"name":1}`, idempotencyKey("k")).want(t, 400)
	wantPetCount(t, s.file, 3)

	// A response that is older than a member of animals lacks that. Here it is the status, which
	// then is no difference.
	execSQL(t, s.file, "UPDATE idempotency_keys SET response = json_remove(response, '$.status')")
	s.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	execSQL(t, s.file, "UPDATE idempotency_keys SET response = 'no JSON'")
	s.create(rex, idempotencyKey("k")).want(t, 500)
}

// TestExpiredIdempotencyKeys lets Idempotency-Keys grow old, under a fake clock: after 24 hours,
// they must add an animal again. Each new animal with a key must delete up to two keys that have
// expired, and no others.
func TestExpiredIdempotencyKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		const keys = "SELECT group_concat(key ORDER BY key) FROM idempotency_keys"
		for _, k := range []string{"a", "b", "c", "d"} {
			s.create(rex, idempotencyKey(k)).want(t, 201)
			time.Sleep(time.Second) // a is the oldest
		}

		time.Sleep(24*time.Hour - 4*time.Second) // a is 24 hours old
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
	s.create(rex, idempotencyKey("used")).want(t, 201)
	before := len(readFile(t, s.file+"-wal"))
	lockFor(t, s.file, 300*time.Millisecond)

	// Each of 20 clients sends five requests at once, two of them with the same Idempotency-Key.
	var replies [20]struct{ first, same, refused, reused, withoutKey reply }
	var requests sync.WaitGroup
	for i := range replies {
		r, k := &replies[i], fmt.Sprint(i)
		requests.Go(func() { r.first = s.create(rex, idempotencyKey(k)) })
		requests.Go(func() { r.same = s.create(rex, idempotencyKey(k)) })
		requests.Go(func() { r.refused = s.create(zoe, idempotencyKey(k+"-zoe")) })
		requests.Go(func() { r.reused = s.create(zoe, idempotencyKey("used")) })
		requests.Go(func() { r.withoutKey = s.create(rex) })
	}
	requests.Wait()

	for _, r := range replies {
		if r.first.header.Get("Idempotency-Replayed") != "" {
			r.first, r.same = r.same, r.first // same arrived first
		}
		r.first.want(t, 201)
		r.same.wantRepeat(t, r.first)
		r.refused.wantError(t, 400, "refused", refused)
		r.reused.want(t, 422)
		r.withoutKey.want(t, 201)
	}
	s.log.wantText(t, "UNIQUE constraint failed")
	// A transaction writes at least 3 pages of 4096 bytes to the WAL, so the 40 animals would write
	// at least 120 pages if each had a transaction of its own. They wait for the lock, and share
	// two or three transactions, of some 20 pages together.
	if pages := (len(readFile(t, s.file+"-wal")) - before) / 4096; pages > 60 {
		t.Fatalf("the WAL has grown by %d pages, want at most 60", pages)
	}
	wantPetCount(t, s.file, 42) // Zoe, the animal of the used key, and two of each client
	// Only the keys of animals that were stored are kept.
	wantSQL(t, s.file, "SELECT count(*) FROM idempotency_keys", "21")
	wantSQL(t, s.file,
		"SELECT count(*) FROM pets JOIN idempotency_keys ON id = response ->> 'id'", "21")
}

// TestLockedDatabase adds an animal while another program holds a lock: it gets 503, and reads do
// not wait for it. If the lock ends in time, an animal with an Idempotency-Key is added.
func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	unlock := lock(t, s.file)

	created := make(chan reply, 1)
	go func() { created <- s.create(rex) }()
	time.Sleep(200 * time.Millisecond) // now the create waits, for 2 seconds
	s.get("/v1/pets/1").want(t, 404)
	s.get("/v1/pets").want(t, 200).wantBody(t, "[]\n")
	s.get("/healthz").want(t, 200)
	if len(created) != 0 {
		t.Fatal("the reads have waited for the create")
	}
	(<-created).wantError(t, 503, "unavailable", unavailable).wantHeader(t, "Retry-After", "1")
	s.log.wantText(t, "level=ERROR", "database is locked")

	unlock()
	lockFor(t, s.file, 300*time.Millisecond)
	s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	wantPetCount(t, s.file, 1)
}

// lock takes the write lock of a database, until unlock is called.
func lock(t testing.TB, file string) (unlock func()) {
	t.Helper()
	db := connect(t, file)
	_, err := db.Exec("BEGIN IMMEDIATE")
	must(t, err)
	return func() { db.Close() } // ends the transaction
}

// lockFor takes the write lock of a database, and returns. The lock ends after d.
func lockFor(t testing.TB, file string, d time.Duration) {
	t.Helper()
	unlock := lock(t, file)
	time.AfterFunc(d, unlock)
}

// TestFullDatabase adds animals until the database is full: the next one gets 503, and lists go on.
func TestFullDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.pragma(t, "max_page_count = 20")
	large := `{"categoryId":1,"name":"` + strings.Repeat("x", 250) + `"}`

	created := 0
	for created < 1000 && s.create(large).status == 201 {
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

// TestFailedTransactions lets transactions fail, each in another statement, which the cause in the
// log tells. The animal must get 500, and not be stored. The next one must be.
func TestFailedTransactions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, breaking, cause string }{
		{"the lookup of the Idempotency-Key", breakLookup, "the lookup has failed"},
		{"the insert of the Idempotency-Key", `CREATE TRIGGER rule BEFORE INSERT ON idempotency_keys
			BEGIN SELECT fail('the insert has failed'); END`, "the insert has failed"},
		// The row in t refers to an animal that is not there, which SQLite checks at COMMIT.
		{"COMMIT", `CREATE TABLE t (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
			CREATE TRIGGER rule AFTER INSERT ON pets WHEN new.name = 'Rex'
			BEGIN INSERT INTO t VALUES (-1); END`, "FOREIGN KEY constraint failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			s.pragma(t, "foreign_keys = ON") // for the last case
			execSQL(t, s.file, c.breaking)
			s.create(rex, idempotencyKey("k")).want(t, 500)
			s.log.wantText(t, "level=ERROR", c.cause)
			s.create(petNamed("Mia")).wantNew(t, 1)
		})
	}
}

// breakLookup puts a view in the place of the table of Idempotency-Keys. A SELECT from it fails,
// because its column created calls fail. The columns and triggers are there so that SQLite can
// prepare the INSERT and the DELETE of the service, too.
const breakLookup = `DROP TABLE idempotency_keys;
	CREATE VIEW idempotency_keys AS SELECT x'' AS caller, 'k' AS key, 1 AS rowid, '' AS response,
		fail('the lookup has failed') AS created;
	CREATE TRIGGER i INSTEAD OF INSERT ON idempotency_keys BEGIN SELECT 1; END;
	CREATE TRIGGER d INSTEAD OF DELETE ON idempotency_keys BEGIN SELECT 1; END`

// TestFailedReads lists and fetches two animals, of which the second cannot be read. A response
// that would have it must be a 500. Each list must give its connection back, or there would be none
// left for the last ones.
func TestFailedReads(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ secondName, cause string }{
		{"fail('a mistake')", "a mistake"}, // see registerSQL
		{"NULL", "converting NULL to string is unsupported"},
	} {
		s := newService(t)
		addPets(t, s.file, 2)
		replaceSecondName(t, s.file, c.secondName)

		for range 100 { // more than there are connections, on most machines
			s.get("/v1/pets").wantError(t, 500, "internal", "internal error")
		}
		s.get("/v1/pets?status=sold").want(t, 500)
		s.get("/v1/pets/2").want(t, 500)
		s.log.wantText(t, "level=ERROR", c.cause)
		s.get("/v1/pets/1").want(t, 200)
		execSQL(t, s.file, "DELETE FROM old WHERE id = 1")
		s.get("/healthz").want(t, 503) // it reads the first animal
	}
}

// replaceSecondName puts a view in the place of the table of animals. In the view, the name of
// animal 2 is what an SQL expression returns.
func replaceSecondName(t *testing.T, file, expression string) {
	t.Helper()
	execSQL(t, file, `ALTER TABLE pets RENAME TO old;
		CREATE VIEW pets AS SELECT id, category_id, status,
			CASE id WHEN 2 THEN `+expression+` ELSE name END AS name FROM old`)
}

// TestPanicInSQLite lets requests panic in SQLite: the program must end with status 1, because the
// connection may stay in use for ever.
func TestPanicInSQLite(t *testing.T) {
	t.Parallel()
	for _, request := range []string{"GET /v1/pets", "GET /v1/pets/2", "POST /v1/pets"} {
		file := newFile(t)
		p := start(t, file, withAPIKey)
		addPets(t, file, 2)
		// The first animal can be read, so a list panics in rows.Next.
		execSQL(t, file, `ALTER TABLE pets RENAME TO old;
			CREATE VIEW pets AS SELECT * FROM old WHERE id = 1 OR panic_now();
			CREATE TRIGGER broken INSTEAD OF INSERT ON pets BEGIN SELECT panic_now(); END`)

		if resp := p.do(request, rex); resp.err == nil {
			t.Fatalf("%s = %d, want no response", request, resp.status)
		}
		if status := p.wait(t); status != 1 {
			t.Fatalf("after %s, the exit status is %d, want 1", request, status)
		}
		p.log.wantText(t, `level=ERROR msg="panic in the store" panic="a mistake" stack=`, "store.go:")
	}
}

// pragma runs a PRAGMA on the connection that stores animals.
func (s *service) pragma(t testing.TB, pragma string) {
	t.Helper()
	_, err := s.writer.Exec("PRAGMA " + pragma)
	must(t, err)
}

// TestRefusedDatabases changes a database of one animal. The program must neither start with it,
// nor make a backup of it.
func TestRefusedDatabases(t *testing.T) {
	t.Parallel()
	const foreign = "not a database of this service: its application_id is 0"
	edit := func(statements string) func(t *testing.T, file string) {
		return func(t *testing.T, file string) { execSQL(t, file, statements) }
	}
	for _, c := range []struct {
		name    string
		change  func(t *testing.T, file string)
		message string
	}{
		{"text", func(t *testing.T, file string) { writeFile(t, file, "some text") },
			"not a database (26)"},
		{"truncated", func(t *testing.T, file string) { must(t, os.Truncate(file, 4096)) },
			"malformed (11)"},
		// Not in WAL mode, to show whether the service changes that.
		{"of another program",
			edit("PRAGMA journal_mode = DELETE; PRAGMA application_id = 0"), foreign},
		{"of no version", edit("PRAGMA user_version = 0"), "not a database of this service"},
		{"of another program, of no version",
			edit("PRAGMA application_id = 0; PRAGMA user_version = 0"), foreign},
		{"of another program, without tables", func(t *testing.T, file string) {
			must(t, os.Remove(file))
			execSQL(t, file, "PRAGMA application_id = 1")
		}, "not a database of this service: its application_id is 1"},
		{"of a newer version", edit(fmt.Sprint("PRAGMA user_version = ", len(migrations)+1)),
			"a newer version of this service has written the database"},
		{"lost, but for its link", moveToLinks(""), "all animals are in "},
		{"a link", func(t *testing.T, file string) {
			must(t, os.Rename(file, file+".real"))
			must(t, os.Symlink(file+".real", file))
		}, "it is a symbolic link: name the file that it leads to"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := newClosedDatabase(t)
			c.change(t, file)
			dir := filepath.Dir(file)
			wantRefusal(t, dir, withAPIKey, 1, c.message, "-addr", "127.0.0.1:0", "-db", file)
			wantRefusal(t, dir, withAPIKey, 1, c.message, "-db", file, "-backup", dir+"/copy.db")
		})
	}
}

// moveToLinks returns a function that moves a database to the place of the link with a suffix.
func moveToLinks(suffix string) func(t *testing.T, file string) {
	return func(t *testing.T, file string) {
		must(t, os.Mkdir(filepath.Dir(linkOf(file)), 0o700))
		must(t, os.Rename(file, filepath.Join(filepath.Dir(linkOf(file)), filepath.Base(file)+suffix)))
	}
}

// newClosedDatabase returns the name of a database with one animal, which no service has open.
func newClosedDatabase(t *testing.T) (file string) {
	t.Helper()
	s := newService(t)
	s.create(rex).want(t, 201)
	must(t, s.close())
	return s.file
}

// TestRefusedBackups makes backups that must be refused: because of a file in the place of the
// copy, and because of the database.
func TestRefusedBackups(t *testing.T) {
	t.Parallel()
	file := newClosedDatabase(t)
	dir := filepath.Dir(file)
	wantRefused := func(message string) {
		t.Helper()
		wantRefusal(t, dir, withAPIKey, 1, message, "-db", file, "-backup", dir+"/copy.db")
	}

	for _, name := range []string{"copy.db", "copy.db-wal", "copy.db-journal"} {
		writeFile(t, filepath.Join(dir, name), "")
		wantRefused(name + `" exists already; name a new file`)
		must(t, os.Remove(filepath.Join(dir, name)))
	}
	must(t, os.Symlink("nowhere", dir+"/copy.db"))
	wantRefused(`copy.db" exists already; name a new file`)
	must(t, os.Remove(dir+"/copy.db"))

	breakIndex(t, file)
	wantRefused("the database is damaged: row 1 missing from index pets_by_status")
	execSQL(t, file, "REINDEX")

	execSQL(t, file, "PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'")
	wantRefused("the database is damaged: CHECK constraint failed in pets")
	// The copy is first written to a file in its own folder, such as copy.db.123.tmp.
	wantRefusal(t, dir, withAPIKey, 1, ": open "+dir+"/none/copy.db.",
		"-db", file, "-backup", dir+"/none/copy.db")
	writeFile(t, file, "")
	wantRefused("the database is empty")
	must(t, os.Remove(file))
	wantRefused("unable to open database file (14)")
}

// breakIndex damages a database: it makes pets_by_status an index by name, and then corrects only
// its SQL in the schema, which writable_schema permits. So the index has names, where SQLite
// expects statuses.
func breakIndex(t *testing.T, file string) {
	t.Helper()
	execSQL(t, file, `DROP INDEX pets_by_status;
		CREATE INDEX pets_by_status ON pets (name);
		PRAGMA writable_schema = ON;
		UPDATE sqlite_schema SET sql = replace(sql, '(name)', '(status)')`)
}

// TestNamesOfDatabases opens databases whose names have characters with a meaning in URLs or
// SQLite: the file must have just this name.
func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", `ä"'`, "[a]"} {
		dir := t.TempDir()
		s := openService(t, filepath.Join(dir, name))
		s.log.wantText(t, `level=WARN msg="the database is new and empty"`)
		s.create(rex).want(t, 201)
		must(t, s.close())

		wantOnly(t, dir, name)
		again := openService(t, s.file)
		again.log.wantNoText(t, "new and empty", "have no links")
		must(t, again.close())
	}
}

// TestSchema edits pets by SQL, as other programs do: the schema must refuse these edits.
func TestSchema(t *testing.T) {
	t.Parallel()
	s := newService(t)
	db := connect(t, s.file)
	longest := strings.Repeat("é", maxName)

	const insert = "INSERT INTO pets (name, category_id, status) VALUES (?, 1, ?)"
	for _, status := range petStatuses {
		execSQL(t, s.file, insert, longest, status)
	}
	for _, edit := range []string{
		"INSERT INTO pets (name, category_id) VALUES ('" + longest + "é', 1)",
		"INSERT INTO pets (id, name, category_id) VALUES (0, 'x', 1)",
		"UPDATE pets SET name = ''",
		"UPDATE pets SET name = NULL",
		"UPDATE pets SET status = NULL",
		"UPDATE pets SET name = x'00'",
		"UPDATE pets SET category_id = 1.5",
		"UPDATE pets SET category_id = NULL",
		"UPDATE pets SET status = 'lost'",
	} {
		if _, err := db.Exec(edit); sqliteCode(err) != sqlite3.SQLITE_CONSTRAINT {
			t.Fatalf("%.60s: %v, want a constraint", edit, err)
		}
	}

	execSQL(t, s.file, "DELETE FROM pets")
	s.create(rex).wantNew(t, 4) // no id is used again
}

// TestQueryPlans explains the statements that search: with millions of rows, each must use an
// index.
func TestQueryPlans(t *testing.T) {
	t.Parallel()
	db := connect(t, newService(t).file)
	for query, index := range map[string]string{
		selectPetsSQL:     "SEARCH pets USING INTEGER PRIMARY KEY (rowid>?)",
		selectPetSQL:      "SEARCH pets USING INTEGER PRIMARY KEY (rowid=?)",
		selectResponseSQL: "idempotency_keys_1 (caller=? AND key=?)", // the index of the primary key
		selectByStatusSQL: "SEARCH pets USING INDEX pets_by_status (status=? AND rowid>?)",
		deleteExpiredSQL:  "SEARCH idempotency_keys USING COVERING INDEX idempotency_keys_by_age",
	} {
		var plan []string
		// Each placeholder is NULL.
		rows, err := db.Query("EXPLAIN QUERY PLAN "+query, make([]any, strings.Count(query, "?"))...)
		must(t, err)
		for rows.Next() {
			var ignored, detail string
			must(t, rows.Scan(&ignored, &ignored, &ignored, &detail))
			plan = append(plan, detail)
		}
		got := strings.Join(plan, "; ")
		if !strings.Contains(got, index) || strings.Contains(got, "SCAN") {
			t.Fatalf("%s: %s, want %s", query, got, index)
		}
	}
}

// TestPragmas reads the pragmas of a connection. A synchronous of 2 is FULL. Without checkpoints,
// the WAL would grow for ever.
func TestPragmas(t *testing.T) {
	t.Parallel()
	db := newPool(newService(t).file, "mode=rw", 1)
	defer db.Close()
	var got string
	must(t, db.QueryRow(`SELECT concat_ws(' ', journal_mode, synchronous, timeout, fullfsync,
		checkpoint_fullfsync) FROM pragma_journal_mode, pragma_synchronous, pragma_busy_timeout,
		pragma_fullfsync, pragma_checkpoint_fullfsync`).Scan(&got))
	if want := "wal 2 2000 1 1"; got != want {
		t.Fatalf("the pragmas are %s, want %s", got, want)
	}
	if must(t, db.QueryRow("PRAGMA wal_autocheckpoint").Scan(&got)); got != "1000" {
		t.Fatalf("wal_autocheckpoint is %s, want 1000", got)
	}
}

// TestMigration migrates a database with two more steps, of which the second fails: nothing must
// change. Then it migrates with the first step alone.
func TestMigration(t *testing.T) {
	t.Parallel()
	file := newClosedDatabase(t)
	db := newPool(file, "mode=rwc", 1)
	defer db.Close()
	const versionAndCategory = `SELECT user_version || ' ' || category_id
		FROM pragma_user_version, pets`
	version := len(migrations)
	steps := append(slices.Clone(migrations),
		"UPDATE pets SET category_id = category_id + 1", "DROP TABLE dogs")

	_, err := migrate(db, steps)
	if err == nil || !strings.Contains(err.Error(), "no such table: dogs") {
		t.Fatalf("migrate = %v, want no such table", err)
	}
	wantSQL(t, file, versionAndCategory, fmt.Sprint(version, " 7"))

	for range 2 { // the second time, there is nothing to do
		_, err := migrate(db, steps[:version+1])
		must(t, err)
		wantSQL(t, file, versionAndCategory, fmt.Sprint(version+1, " 8"))
	}
}

// TestMissingTable drops the table of a running service: it must not be healthy, and the next start
// must say why.
func TestMissingTable(t *testing.T) {
	t.Parallel()
	s := newService(t)
	execSQL(t, s.file, "DROP TABLE pets")
	s.get("/healthz").wantError(t, 503, "unavailable", unavailable)
	s.log.wantText(t, `error="`+unavailable+`: SQL logic error: no such table: pets (1)"`)

	must(t, s.close())
	wantNoStart(t, s.file, "SQL logic error: no such table: pets (1)")
}

// TestMovedFiles moves each file of a running service away, and puts it back. Creates must get 503
// while it is away.
func TestMovedFiles(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	for _, suffix := range fileSuffixes {
		must(t, os.Rename(s.file+suffix, s.file+".away"))
		wantNotInItsPlace(t, s.client)
		must(t, os.Rename(s.file+".away", s.file+suffix))
		s.get("/healthz").want(t, 200)
		s.create(rex).want(t, 201)
	}
	s.log.wantText(t, "level=ERROR", "the database is not in its place")
	must(t, s.close())
	wantPetCount(t, s.file, 4)
}

// wantNotInItsPlace checks that a service refuses to add animals, but returns them.
func wantNotInItsPlace(t *testing.T, c client) {
	t.Helper()
	c.create(rex).wantError(t, 503, "unavailable", unavailable)
	c.get("/healthz").wantError(t, 503, "unavailable", unavailable)
	c.get("/v1/pets/1").want(t, 200)
}

// TestLostFiles lets the program lose its files by a command of an operator, alone and beside another
// program that has the database open, and stops or kills it. The next start must be refused until the
// files are moved back, unless the database has the animal. After it, all must be there.
func TestLostFiles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		command string // runs in the folder of animals.db
		heals   string // when the database has the animal, although nobody moves files back
	}{
		{"rm animals.db", "never"},
		{"mv animals.db moved", "never"},
		{"cp animals.db new; mv new animals.db", "never"},
		{"rm animals.db-wal", "stop alone"}, // SQLite copies the WAL at the last close
		{"mv animals.db-wal moved", "stop alone"},
		{": >new; mv new animals.db-wal", "stop alone"},
		{"rm animals.db-shm", "always"}, // the WAL is in its place
		{"cp animals.db-shm new; mv new animals.db-shm", "always"},
		{"rm animals.db-wal animals.db-shm", "stop alone"},
		{"rm animals.db animals.db-wal", "never"},
		{"rm animals.db*", "never"},
		{"mkdir new; cp animals.db* new; mv new/* .", "never"},
		{"mv ../folder ../moved", "never"},
	} {
		for _, signal := range []os.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			for _, other := range []bool{false, true} {
				healed := c.heals == "always" ||
					c.heals == "stop alone" && signal == syscall.SIGTERM && !other
				name := fmt.Sprint(c.command, ", ", signal, ", another program: ", other)
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					folder := filepath.Join(t.TempDir(), "folder")
					must(t, os.Mkdir(folder, 0o700))
					file := filepath.Join(folder, "animals.db")
					p := start(t, file, withAPIKey)
					p.create(rex).wantNew(t, 1)
					if other {
						_, err := connect(t, file).Exec("SELECT * FROM pets") // the connection stays open
						must(t, err)
					}

					command := exec.Command("sh", "-c", c.command)
					command.Dir = folder
					must(t, command.Run())
					wantNotInItsPlace(t, p.client)
					must(t, p.cmd.Process.Signal(signal))
					if status := p.wait(t); signal == syscall.SIGTERM && (status == 0) != healed {
						t.Fatalf("the status of the stop is %d: %s", status, &p.log)
					}

					if !healed {
						moveBack(t, file)
					}
					again := start(t, file, withAPIKey)
					again.get("/v1/pets/1").want(t, 200)
					again.create(rex).wantNew(t, 2)
				})
			}
		}
	}
}

// moveBack checks that a start is refused, and moves the files of a database back: from their links,
// or with the whole folder, from ../moved.
func moveBack(t *testing.T, file string) {
	t.Helper()
	folder := filepath.Dir(file)
	moved := filepath.Join(folder, "..", "moved")
	if _, err := os.Stat(moved); err == nil {
		wantNoStart(t, file, "unable to open database file (14)")
		must(t, os.Rename(moved, folder))
		return
	}
	wantNoStart(t, file, fmt.Sprintf("all animals are in %q", folder+"/.animals.db.links"))
	for _, suffix := range fileSuffixes {
		must(t, os.Rename(folder+"/.animals.db.links/animals.db"+suffix, file+suffix))
	}
}

// wantNoStart checks that the store cannot be opened, with this message.
func wantNoStart(t *testing.T, file, message string) {
	t.Helper()
	_, err := openStore(file, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), message) {
		t.Fatalf("openStore = %v, want %s", err, message)
	}
}

// TestMoveDuringACreate moves the database while a create waits for a lock: it must get 503. After the
// stop, the moved file must have all animals without the WAL, and so must the links.
func TestMoveDuringACreate(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	unlock := lock(t, s.file)
	time.AfterFunc(200*time.Millisecond, func() {
		os.Rename(s.file, s.file+".away")
		unlock()
	})
	s.create(rex).wantError(t, 503, "unavailable", unavailable)

	if err := s.close(); err == nil {
		t.Fatal("the stop has returned no error")
	}
	wantPetCount(t, s.file+".away", 1)
	moveBack(t, s.file)
	must(t, openService(t, s.file).close())
	wantPetCount(t, s.file, 1)
}

// TestListsOfAMovedDatabase sends four lists at once, which sleep_1s() makes slow (registerSQL), so
// that the service uses four connections. openReaders must have opened them before the database was
// moved.
func TestListsOfAMovedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	execSQL(t, s.file, `ALTER TABLE pets RENAME TO fast;
		CREATE VIEW pets AS SELECT * FROM fast WHERE sleep_1s()`)
	must(t, os.Rename(s.file, s.file+".away"))

	begun := time.Now()
	var replies [4]reply
	var lists sync.WaitGroup
	for i := range replies {
		lists.Go(func() { replies[i] = s.get("/v1/pets") })
	}
	lists.Wait()
	if took := time.Since(begun); took >= 4*time.Second {
		t.Fatalf("the lists took %v: each has waited for the one before", took)
	}
	for _, r := range replies {
		r.want(t, 200).
			wantBody(t, `[{"id":1,"name":"Rex","categoryId":7,"status":"available"}]`+"\n")
	}
}

// TestIdleReaders lets a day pass, under a fake clock. The service must keep its connections open,
// and open no new ones, which may be to another file.
func TestIdleReaders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		time.Sleep(24 * time.Hour)
		must(t, os.Rename(s.file, s.file+".away"))
		s.get("/v1/pets").want(t, 200)
	})
}

// TestStartAfterKill opens the database of a program that was killed, also after another program has
// deleted the WAL, by a proper close, and a third one has made a new one. The start must commit
// something, to sync the WAL, because the newest animals may not be on disk. It must make new links.
func TestStartAfterKill(t *testing.T) {
	t.Parallel()
	for _, newWAL := range []bool{false, true} {
		file := newFile(t)
		p := start(t, file, withAPIKey)
		p.create(rex).want(t, 201)
		p.cmd.Process.Kill()
		p.wait(t)
		if newWAL {
			wantPetCount(t, file, 1)
			_, err := connect(t, file).Exec("SELECT * FROM pets") // the connection stays open
			must(t, err)
		}

		before := readFile(t, file+"-wal")
		writeFile(t, filepath.Join(filepath.Dir(linkOf(file)), "old"), "")
		openService(t, file)
		if readFile(t, file+"-wal") == before {
			t.Fatal("the start has committed nothing")
		}
		wantPetCount(t, file, 1)
		wantOnly(t, filepath.Dir(linkOf(file)), "animals.db", "animals.db-shm", "animals.db-wal")
		for name, content := range readFiles(t, filepath.Dir(linkOf(file))) {
			if content != readFile(t, filepath.Join(filepath.Dir(file), name)) {
				t.Fatalf("the link to %s leads to another file", name)
			}
		}
	}
}

// TestOnlyTheDatabaseMovedBack lets a program that was killed lose its files, and moves only the
// database back: the start must be refused, because the animal is in the WAL.
func TestOnlyTheDatabaseMovedBack(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, withAPIKey)
	p.create(rex).want(t, 201)
	p.cmd.Process.Kill()
	p.wait(t)
	for _, suffix := range fileSuffixes {
		must(t, os.Remove(file+suffix))
	}
	must(t, os.Rename(filepath.Join(filepath.Dir(linkOf(file)), "animals.db"), file))
	wantNoStart(t, file, "all animals are in ")
}

// TestTruncatedWAL stops a service after another program has copied the WAL to the database, and then
// emptied it: the stop must notice that nothing is lost.
func TestTruncatedWAL(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	execSQL(t, s.file, "PRAGMA wal_checkpoint(TRUNCATE)")
	must(t, s.close())
	wantOnly(t, filepath.Dir(s.file), "animals.db")
}

// TestWithoutLinks opens a database with a name that is too long for a folder of links: the service
// must warn, and serve.
func TestWithoutLinks(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), strings.Repeat("x", 250))
	must(t, os.Rename(newClosedDatabase(t), file))
	s := openService(t, file)
	s.log.wantText(t, `level=WARN msg="the files of the database have no links"`)
	s.create(rex).wantNew(t, 2)
	s.get("/healthz").want(t, 200)
	must(t, s.close())
	wantPetCount(t, file, 2)
}

// TestBackup makes a backup of a running service, and runs another service on the copy.
func TestBackup(t *testing.T) {
	t.Parallel()
	s := newService(t)
	dir := t.TempDir()
	first := s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	list := s.get("/v1/pets").want(t, 200)
	args := []string{"-db", s.file, "-backup", filepath.Join(dir, "copy.db")}

	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if status := run(interrupted, args, os.LookupEnv, io.Discard); status != 1 {
		t.Fatalf("an interrupted -backup = %d, want 1", status)
	}
	wantOnly(t, dir)

	lock(t, s.file) // a backup needs no write lock
	if status := run(t.Context(), args, os.LookupEnv, io.Discard); status != 0 {
		t.Fatalf("-backup = %d, want 0", status)
	}
	wantOnly(t, dir, "copy.db")
	copied := openService(t, filepath.Join(dir, "copy.db"))
	copied.get("/v1/pets").want(t, 200).wantBody(t, list.body)
	copied.create(rex, idempotencyKey("k")).wantRepeat(t, first)
	copied.create(rex, idempotencyKey("another")).wantNew(t, 2)
}
