package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

// TestBackup makes backups of a running service.
func TestBackup(t *testing.T) {
	t.Parallel()
	s := newService(t)
	first := s.create(rex, idempotencyKey("k")).wantNew(t, 1)
	list := s.get("/v1/pets").want(t, 200)
	dir := t.TempDir()
	args := []string{"-db", s.file, "-backup", filepath.Join(dir, "copy.db")}
	stderr := &logBuffer{}

	t.Run("one that is interrupted leaves nothing", func(t *testing.T) {
		interrupted, cancel := context.WithCancel(t.Context())
		cancel()
		if status := run(interrupted, args, os.LookupEnv, stderr); status != 1 {
			t.Fatalf("-backup = %d, want 1: %s", status, stderr)
		}
		wantOnly(t, dir)
	})

	t.Run("a service can run on the copy", func(t *testing.T) {
		lock(t, s.file) // a backup needs no write lock
		if status := run(t.Context(), args, os.LookupEnv, stderr); status != 0 {
			t.Fatalf("-backup = %d, want 0: %s", status, stderr)
		}
		wantOnly(t, dir, "copy.db")
		copied := openService(t, filepath.Join(dir, "copy.db"))
		copied.get("/v1/pets").want(t, 200).wantBody(t, list.body)
		copied.create(rex, idempotencyKey("k")).wantRepeat(t, first)
		copied.create(rex, idempotencyKey("another")).wantNew(t, 2)
	})
}

// TestRefusedBackups makes backups that must be refused, and leave no file behind. Each is a backup
// of a database with one animal, and most come after something has happened to its folder.
func TestRefusedBackups(t *testing.T) {
	t.Parallel()
	const exists = `" exists already; name a new file`
	for _, c := range []struct {
		name    string
		happens func(t *testing.T, dir string)
		message string
	}{
		{"a file has the name of the copy", func(t *testing.T, dir string) {
			writeFile(t, dir+"/copy.db", "")
		}, "copy.db" + exists},
		{"a link that leads nowhere has that name", func(t *testing.T, dir string) {
			must(t, os.Symlink("nowhere", dir+"/copy.db"))
		}, "copy.db" + exists},
		{"SQLite would apply an old -wal to the copy", func(t *testing.T, dir string) {
			writeFile(t, dir+"/copy.db-wal", "")
		}, "copy.db-wal" + exists},
		{"SQLite would apply an old -journal", func(t *testing.T, dir string) {
			writeFile(t, dir+"/copy.db-journal", "")
		}, "copy.db-journal" + exists},
		{"an index is damaged", func(t *testing.T, dir string) {
			breakIndex(t, dir+"/animals.db")
		}, "the database is damaged: row 1 missing from index pets_by_status"},
		{"an animal breaks a rule of the schema", func(t *testing.T, dir string) {
			execSQL(t, dir+"/animals.db",
				"PRAGMA ignore_check_constraints = ON; UPDATE pets SET status = 'lost'")
		}, "the database is damaged: CHECK constraint failed in pets"},
		{"the database is empty", func(t *testing.T, dir string) {
			writeFile(t, dir+"/animals.db", "")
		}, "the database is empty"},
		{"the database is missing", func(t *testing.T, dir string) {
			must(t, os.Remove(dir+"/animals.db"))
		}, "unable to open database file (14)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := newClosedDatabase(t)
			dir := filepath.Dir(file)
			c.happens(t, dir)
			wantRefusal(t, dir, withAPIKey, 1, c.message, "-db", file, "-backup", dir+"/copy.db")
		})
	}

	t.Run("the folder of the copy is missing", func(t *testing.T) {
		t.Parallel()
		file := newClosedDatabase(t)
		dir := filepath.Dir(file)
		// The copy is first written to a file in its own folder, such as copy.db.123.tmp.
		wantRefusal(t, dir, withAPIKey, 1, ": open "+dir+"/none/copy.db.",
			"-db", file, "-backup", dir+"/none/copy.db")
	})
}
