package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	sqlite3 "modernc.org/sqlite/lib"
)

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
		{"of version 1", edit("PRAGMA user_version = 1"),
			"not a database of this service: its application_id is 1348826227, and its user_version 1"},
		{"of another program, of no version",
			edit("PRAGMA application_id = 0; PRAGMA user_version = 0"), foreign},
		{"of another program, without tables", func(t *testing.T, file string) {
			must(t, os.Remove(file))
			execSQL(t, file, "PRAGMA application_id = 1")
		}, "not a database of this service: its application_id is 1"},
		{"of a newer version", edit(fmt.Sprint("PRAGMA user_version = ", len(migrations)+1)),
			"a newer version of this service has written the database"},
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

// TestNamesOfDatabases opens databases whose names have characters with a meaning in URLs or
// SQLite: the file must have just this name.
func TestNamesOfDatabases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"file:x", "a?mode=memory", "a#b", "100%", "%41", "a b&c", `ä"'`, "[a]",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := openService(t, filepath.Join(dir, name))
			s.log.wantText(t, `level=WARN msg="the database is new and empty"`)
			s.log.wantNoText(t, "have no links")
			s.create(rex).wantNew(t, 1)
			must(t, s.close())

			wantOnly(t, dir, name)
			again := openService(t, s.file)
			again.log.wantNoText(t, "new and empty")
			again.get("/v1/pets/1").want(t, 200)
		})
	}
}

// TestSchema edits animals by SQL, as other programs do: the schema must refuse these edits.
func TestSchema(t *testing.T) {
	t.Parallel()
	s := newService(t)
	longest := strings.Repeat("é", maxName)
	const insert = "INSERT INTO pets (name, category_id, status) VALUES (?, 1, ?)"
	for _, status := range petStatuses { // these can be inserted
		execSQL(t, s.file, insert, longest, status)
	}

	for _, c := range []struct{ name, edit string }{
		{"a long name", "UPDATE pets SET name = '" + longest + "é'"},
		{"an empty name", "UPDATE pets SET name = ''"},
		{"a NULL name", "UPDATE pets SET name = NULL"},
		{"a name that is a BLOB", "UPDATE pets SET name = x'00'"},
		{"a NULL category", "UPDATE pets SET category_id = NULL"},
		{"a category that is no integer", "UPDATE pets SET category_id = 1.5"},
		{"a NULL status", "UPDATE pets SET status = NULL"},
		{"an unknown status", "UPDATE pets SET status = 'lost'"},
		{"the id 0", "INSERT INTO pets (id, name, category_id) VALUES (0, 'x', 1)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := connect(t, s.file).Exec(c.edit)
			if sqliteCode(err) != sqlite3.SQLITE_CONSTRAINT {
				t.Fatalf("%.60s: %v, want a constraint", c.edit, err)
			}
		})
	}

	t.Run("an id is never used again", func(t *testing.T) {
		execSQL(t, s.file, "DELETE FROM pets")
		s.create(rex).wantNew(t, len(petStatuses)+1)
	})
}

// TestQueryPlans explains the statements that search: with millions of rows, each must use an
// index.
func TestQueryPlans(t *testing.T) {
	t.Parallel()
	db := connect(t, newService(t).file)
	for query, want := range map[string]string{
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
		if !strings.Contains(got, want) || strings.Contains(got, "SCAN") {
			t.Errorf("%s: %s, want %s", query, got, want)
		}
	}
}

// TestPragmas reads the pragmas of a connection.
func TestPragmas(t *testing.T) {
	t.Parallel()
	db := newPool(newService(t).file, "rw", 1)
	defer db.Close()
	for pragma, want := range map[string]string{
		"journal_mode":         "wal",
		"synchronous":          "2", // FULL
		"busy_timeout":         "2000",
		"fullfsync":            "1",
		"checkpoint_fullfsync": "1",
		"wal_autocheckpoint":   "1000", // without checkpoints, the WAL would grow for ever
	} {
		var got string
		must(t, db.QueryRow("PRAGMA "+pragma).Scan(&got))
		if got != want {
			t.Errorf("%s is %s, want %s", pragma, got, want)
		}
	}
}

// TestMigration migrates a database with one animal, of category 7.
func TestMigration(t *testing.T) {
	t.Parallel()
	file := newClosedDatabase(t)
	db := newPool(file, "rwc", 1)
	defer db.Close()
	const versionAndCategory = `SELECT user_version || ' ' || category_id
		FROM pragma_user_version, pets`
	version := len(migrations)
	good := append(slices.Clone(migrations), "UPDATE pets SET category_id = category_id + 1")
	bad := append(slices.Clone(good), "DROP TABLE dogs") // the last step fails

	t.Run("no released step was edited", func(t *testing.T) {
		const want = "96974f7c6329e14aa77da57bf57af2f9a1c916f41bc7188acb0248f1733eb9d4"
		released := strings.Join(migrations[:2], "\n")
		if got := fmt.Sprintf("%x", sha256.Sum256([]byte(released))); got != want {
			t.Fatalf("the SHA-256 sum of the released steps is %s, want %s", got, want)
		}
	})
	t.Run("a step that fails undoes those before it", func(t *testing.T) {
		_, err := migrate(db, bad)
		if err == nil || !strings.Contains(err.Error(), "no such table: dogs") {
			t.Fatalf("migrate = %v, want no such table", err)
		}
		wantSQL(t, file, versionAndCategory, fmt.Sprint(version, " 7"))
	})
	t.Run("each step runs once", func(t *testing.T) {
		for range 2 {
			_, err := migrate(db, good)
			must(t, err)
			wantSQL(t, file, versionAndCategory, fmt.Sprint(version+1, " 8"))
		}
	})
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
	_, err := openStore(s.file, s.server.logger)
	if want := "SQL logic error: no such table: pets (1)"; err == nil || err.Error() != want {
		t.Fatalf("openStore = %v, want %s", err, want)
	}
}
