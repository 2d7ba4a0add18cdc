package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	// busyTimeout is how long a statement waits for the lock of another program.
	busyTimeout = 2 * time.Second

	// idempotencyKeyLifetime is how long an Idempotency-Key is remembered.
	idempotencyKeyLifetime = 24 * time.Hour

	// These two and petStatuses also stand in migrations: change them with a new migration.
	applicationID = 0x50657473 // PRAGMA application_id: "Pets" in ASCII
	maxName       = 255        // characters
)

// petStatuses are the values of PetStatus.
var petStatuses = []string{"available", "pending", "sold"}

// NewPet is the API's NewPet, with its status filled in. insert compares it with ==, so it has no
// pointers.
type NewPet struct {
	Name       string `json:"name"`
	CategoryID int64  `json:"categoryId"`
	Status     string `json:"status"`
}

// Pet is the API's Pet: a NewPet that has been stored, and so has an id.
type Pet struct {
	ID int64 `json:"id"`
	NewPet
}

// listOptions says which pets to list.
type listOptions struct {
	limit  int    // the most pets
	status string // "" for any
	after  int64  // list only greater ids
}

// store keeps the pets in an SQLite database. A commit appends to a write-ahead log (WAL), the file
// with the suffix -wal, which SQLite copies to the database now and then: see
// https://sqlite.org/wal.html.
//
// create, list and check may be called concurrently.
type store struct {
	path   string
	file   os.FileInfo // of the database when it was opened, for checkPath
	logger *slog.Logger

	readers        *sql.DB // for lists
	selectPets     *sql.Stmt
	selectByStatus *sql.Stmt

	writerMu      sync.Mutex // is held while a batch is stored
	writer        *sql.DB    // one connection, for creates
	insertPet     *sql.Stmt
	selectReplay  *sql.Stmt // the first response to an Idempotency-Key
	insertReplay  *sql.Stmt
	deleteExpired *sql.Stmt

	nextMu sync.Mutex // guards next and its creations
	next   *batch     // is joined by new creations; never nil
}

// list returns the pets that o selects, by ascending id. Its error may be errUnavailable.
//
// There is no context: the query is short, and database/sql starts a goroutine for one that can be
// cancelled.
func (s *store) list(o listOptions) ([]Pet, error) {
	defer s.exitOnPanic()
	statement, args := s.selectPets, []any{o.after, o.limit}
	if o.status != "" {
		statement, args = s.selectByStatus, []any{o.status, o.after, o.limit}
	}
	rows, err := statement.Query(args...)
	if err != nil {
		return nil, markUnavailable(err)
	}
	defer rows.Close()

	pets := make([]Pet, 0, o.limit)
	var p Pet
	columns := []any{&p.ID, &p.Name, &p.CategoryID, &p.Status}
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, err
		}
		pets = append(pets, p)
	}
	return pets, markUnavailable(rows.Err())
}

// creation is a pet to be stored, and the result.
type creation struct {
	caller         []byte // the SHA-256 sum of an API key
	idempotencyKey string // "" for none
	pet            Pet    // its id is 0 until it is inserted

	replayed bool  // pet is the first response to idempotencyKey
	err      error // why this pet is not stored, although its batch may be
}

// batch is a number of creations that one transaction stores.
type batch struct {
	creations []*creation
	once      sync.Once // calls commit
	err       error     // of the transaction: nothing of the batch is stored
}

// create stores p for a caller, and returns it with its id once it is on disk.
//
// If the caller has used idempotencyKey ("" for none) within idempotencyKeyLifetime, create stores
// nothing. It returns the pet of the first response and sets replayed, or it returns
// errIdempotencyKeyReused if p differs from that pet.
//
// After errIdempotencyKeyReused, errRefused or errUnavailable, p is not stored. After any other
// error it may be stored. If another program locks the database, create takes at most twice
// busyTimeout: one wait of the batch before, and one of its own.
//
// There is no context: p shares a transaction with other pets, which must be stored even if the
// client of p disconnects.
func (s *store) create(
	caller []byte,
	idempotencyKey string,
	p NewPet,
) (stored Pet, replayed bool, err error) {
	c := &creation{caller: caller, idempotencyKey: idempotencyKey, pet: Pet{NewPet: p}}

	// This is group commit: while one batch is being stored, new creations join the next. The first
	// to call once.Do stores them all, and the others wait in once.Do until that is done.
	s.nextMu.Lock()
	b := s.next
	b.creations = append(b.creations, c)
	s.nextMu.Unlock()

	b.once.Do(func() { s.commit(b) })
	return c.pet, c.replayed, cmp.Or(b.err, c.err)
}

// commit stores b in one transaction, and sets the results of its creations. More creations can
// join b until the batch before it is stored.
func (s *store) commit(b *batch) {
	defer s.exitOnPanic()
	s.writerMu.Lock()
	defer s.writerMu.Unlock()

	s.nextMu.Lock()
	s.next = new(batch) // now b is complete
	s.nextMu.Unlock()

	b.err = markUnavailable(inTx(s.writer, func(tx *sql.Tx) error {
		if err := s.checkPath(); err != nil {
			return fmt.Errorf("%w: %w", errUnavailable, err)
		}
		now := time.Now()
		for _, c := range b.creations {
			if err := s.insert(tx, c, now); err != nil {
				return err
			}
		}
		return nil
	}))
}

// insert inserts the pet of c in tx, unless its Idempotency-Key was used before, and sets the
// result of c. If it returns an error, tx must be rolled back.
func (s *store) insert(tx *sql.Tx, c *creation, now time.Time) error {
	p := c.pet.NewPet
	oldest := now.Add(-idempotencyKeyLifetime).Unix() // Idempotency-Keys from before have expired

	if c.idempotencyKey != "" {
		var first Pet
		err := tx.Stmt(s.selectReplay).QueryRow(c.caller, c.idempotencyKey, oldest).
			Scan(&first.ID, &first.Name, &first.CategoryID, &first.Status)
		switch {
		case err == nil && first.NewPet == p:
			c.pet, c.replayed = first, true
			return nil
		case err == nil:
			c.err = errIdempotencyKeyReused
			return nil
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
	}

	inserted, err := tx.Stmt(s.insertPet).Exec(p.Name, p.CategoryID, p.Status)
	if sqliteCode(err) == sqlite3.SQLITE_CONSTRAINT {
		c.err = fmt.Errorf("%w: %w", errRefused, err) // SQLite has undone this statement alone
		return nil
	}
	if err != nil {
		return err
	}
	if rows, _ := inserted.RowsAffected(); rows == 0 {
		c.err = fmt.Errorf("%w: a trigger left it out", errRefused) // RAISE(IGNORE) is no error
		return nil
	}
	c.pet.ID, _ = inserted.LastInsertId()

	if c.idempotencyKey != "" {
		_, err := tx.Stmt(s.insertReplay).
			Exec(c.caller, c.idempotencyKey, now.Unix(), c.pet.ID, p.Name, p.CategoryID, p.Status)
		if err != nil {
			return err
		}

		// One row is added, and up to two are deleted, so that the table cannot grow for ever.
		if _, err := tx.Stmt(s.deleteExpired).Exec(oldest); err != nil {
			return err
		}
	}
	return nil
}

// exitOnPanic, deferred, ends the program with status 1 after a panic in SQLite, whose connection
// may be in use for ever. Other panics end one request only: see callHandler.
func (s *store) exitOnPanic() {
	if p := recover(); p != nil {
		s.logger.Error("panic in the store", "panic", p, "stack", string(debug.Stack()))
		os.Exit(1)
	}
}

// openStore opens the database at path. If there is none, it creates one, and logs a warning.
func openStore(path string, logger *slog.Logger) (*store, error) {
	s := &store{
		path:    path,
		logger:  logger,
		readers: newPool(path, "ro", max(4, runtime.GOMAXPROCS(0))),
		writer:  newPool(path, "rwc", 1),
		next:    new(batch),
	}
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.readers.Close(), s.writer.Close())
	}
	return s, nil
}

// open opens the database, brings it up to date, and prepares the statements.
func (s *store) open() error {
	// SQLite would delete the WAL of a database that is missing.
	if fileSize(s.path) == 0 && fileSize(s.path+"-wal") > 0 {
		return fmt.Errorf("there is no database, but its write-ahead log, %q: "+
			"put that database back, or move the log away to begin with an empty one", s.path+"-wal")
	}

	oldVersion, err := migrate(s.writer, migrations)
	if err != nil {
		return err
	}
	var mode string
	if err := s.writer.QueryRow("PRAGMA journal_mode = WAL").Scan(&mode); err != nil {
		return err
	}
	if mode != "wal" {
		return errors.New("SQLite cannot use a write-ahead log here")
	}

	// A commit syncs the WAL. A killed process may have left pets there that are not yet on disk,
	// and a replay must not acknowledge those. Also, it opens the WAL, so that creates need no other
	// file descriptor, and close can delete it.
	_, err = s.writer.Exec(fmt.Sprintf("PRAGMA user_version = %d", len(migrations)))
	if err != nil {
		return err
	}

	if s.file, err = os.Stat(s.path); err != nil {
		return err
	}
	if err := s.prepare(); err != nil {
		return err
	}
	if err := s.openReaders(); err != nil {
		return err
	}
	if oldVersion == 0 {
		s.logger.Warn("the database is new and empty", "database", s.path)
	}
	return nil
}

// prepare prepares the statements.
func (s *store) prepare() (err error) {
	prepare := func(db *sql.DB, query string) *sql.Stmt {
		statement, prepareErr := db.Prepare(query)
		err = cmp.Or(err, prepareErr)
		return statement
	}

	s.selectPets = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE id > ? ORDER BY id LIMIT ?`)
	s.selectByStatus = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE status = ? AND id > ? ORDER BY id LIMIT ?`)

	s.insertPet = prepare(s.writer, `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`)
	s.selectReplay = prepare(s.writer, `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`)
	s.insertReplay = prepare(s.writer, `REPLACE INTO idempotency_keys -- an expired row may be there
		(caller, key, created, id, name, category_id, status) VALUES (?, ?, ?, ?, ?, ?, ?)`)
	s.deleteExpired = prepare(s.writer, `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT 2)`)
	return err
}

// openReaders opens all connections of the readers. One that is opened later could find another
// database at the path, or no file descriptor.
func (s *store) openReaders() error {
	for range s.readers.Stats().MaxOpenConnections {
		rows, err := s.selectPets.Query(0, 1)
		if err != nil {
			return err
		}
		defer rows.Close() // keeps the connection in use until all are open
	}
	return nil
}

// close waits until the batch in progress is stored, and closes the store. Call it only once.
func (s *store) close() error {
	s.writerMu.Lock()
	defer s.writerMu.Unlock()

	// If the database was moved, SQLite leaves the WAL behind, where it would damage another database
	// that is put in its place. So copy the WAL into the open database, and empty it.
	if s.checkPath() != nil {
		s.writer.Exec("PRAGMA wal_checkpoint(TRUNCATE)") // fails while another program reads
	}

	// The writer closes last, so that it can delete the WAL.
	return errors.Join(s.readers.Close(), s.writer.Close())
}

// check returns an error if the database is not in its place, or cannot be read.
func (s *store) check() error {
	if err := s.checkPath(); err != nil {
		return err
	}
	_, err := s.list(listOptions{limit: 1})
	return err
}

// checkPath returns an error if the file at the path is not the database that was opened. SQLite
// would go on with the one that it opened, and the next process would not find what is stored there.
func (s *store) checkPath() error {
	file, err := os.Stat(s.path)
	if err == nil && !os.SameFile(file, s.file) {
		err = fmt.Errorf("%q is another file", s.path)
	}
	if err != nil {
		return fmt.Errorf("the database is not in its place: %w", err)
	}
	return nil
}

// migrations[v] takes a database from schema version v to version v+1. The version is PRAGMA
// user_version, which is 0 in a new database.
//
// To change the schema, append to this list. Never edit what was released: databases that went
// through it stay as they are.
var migrations = []string{
	`PRAGMA application_id = 0x50657473;

	-- AUTOINCREMENT: no id is used again. The CHECKs also hold for edits by other programs.
	-- They do not use IN, for which SQLite would build a b-tree at each insert.
	CREATE TABLE pets (
		id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0),
		name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
		category_id INTEGER NOT NULL,
		status TEXT NOT NULL DEFAULT 'available'
			CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
	) STRICT;
	-- A covering index: with status alone, a page of a rare status takes longer.
	CREATE INDEX pets_by_status ON pets (status, id, name, category_id);

	-- caller is the SHA-256 sum of an API key, created is a Unix time in seconds, and the rest is
	-- the pet of the first response.
	CREATE TABLE idempotency_keys (
		caller BLOB NOT NULL,
		key TEXT NOT NULL,
		created INTEGER NOT NULL,
		id INTEGER NOT NULL,
		name TEXT NOT NULL,
		category_id INTEGER NOT NULL,
		status TEXT NOT NULL,
		PRIMARY KEY (caller, key)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created);`,
}

// migrate brings the schema of a database up to date, in one transaction, and returns the version
// that it had. steps is migrations; tests pass others. It changes nothing, and returns an error, if
// the database is not one of this service, or was written by a newer version.
func migrate(db *sql.DB, steps []string) (oldVersion int, err error) {
	err = inTx(db, func(tx *sql.Tx) error {
		version, err := readSchemaVersion(tx, len(steps))
		if err != nil {
			return err
		}
		oldVersion = version
		for ; version < len(steps); version++ {
			if _, err := tx.Exec(steps[version]); err != nil {
				return err
			}
			if _, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
				return err
			}
		}
		return nil
	})
	return oldVersion, err
}

// readSchemaVersion returns the schema version of a database, 0 if it is empty. It returns an
// error if the database is of another program, or of a version above newest.
func readSchemaVersion(tx *sql.Tx, newest int) (version int, err error) {
	var id, objects int
	err = tx.QueryRow(`SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
		FROM pragma_application_id, pragma_user_version`).Scan(&id, &version, &objects)
	if err != nil {
		return 0, err
	}

	empty := id == 0 && version == 0 && objects == 0
	ours := id == applicationID && version > 0
	if !empty && !ours {
		return 0, fmt.Errorf("not a database of this service: "+
			"its application_id is %d, and its user_version %d", id, version)
	}
	if version > newest {
		return 0, errors.New("a newer version of this service has written it; use that version")
	}
	return version, nil
}

// backup writes a copy of the database at path, which may be in use, to the new file target. The
// copy gets that name once it is verified and on disk.
func backup(ctx context.Context, path, target string) error {
	if _, err := os.Lstat(target); err == nil {
		return fmt.Errorf("%q exists already; name a new file", target)
	}
	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()

	db := newPool(path, "rw", 1)
	defer db.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", temp.Name()); err != nil {
		return err
	}
	if err := verify(ctx, temp.Name()); err != nil {
		return err
	}

	if err := errors.Join(temp.Sync(), temp.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp.Name(), target); err != nil {
		return err
	}
	if folder, err := os.Open(filepath.Dir(target)); err == nil {
		folder.Sync() // which makes the name durable, except on Windows
		folder.Close()
	}
	return nil
}

// verify returns an error if the database at path is empty, damaged, or not one of this version of
// the service or of an earlier one.
func verify(ctx context.Context, path string) error {
	db := newPool(path, "rw", 1) // with "ro", SQLite would not verify the CHECKs
	defer db.Close()

	return inTx(db, func(tx *sql.Tx) error {
		version, err := readSchemaVersion(tx, len(migrations))
		if err != nil {
			return err
		}
		if version == 0 {
			return errors.New("it is empty")
		}

		var result string
		if err := tx.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result); err != nil {
			return err
		}
		if result != "ok" {
			return errors.New("it is damaged: " + result)
		}
		return nil
	})
}

// inTx runs f in a transaction of db, and commits that if f returns nil. Otherwise it rolls back,
// and returns the error of f.
func inTx(db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	if err := f(tx); err != nil {
		tx.Rollback() // not deferred: after a panic in a statement, it would wait for ever
		return err
	}
	return tx.Commit()
}

// newPool returns a pool of up to size connections to the database at path. None is open yet. mode
// is SQLite's: ro, rw, or rwc to create it.
func newPool(path, mode string, size int) *sql.DB {
	query := url.Values{ // see https://pkg.go.dev/modernc.org/sqlite#Driver.Open
		"mode":      {mode},
		"_txlock":   {"immediate"},
		"_error_rc": {"1"}, // without it, an error could quote the message of another one
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()),
			"synchronous(FULL)",
			"fullfsync(ON)", // on macOS, fsync leaves data in the cache of the disk
			"checkpoint_fullfsync(ON)",
		},
	}
	name := "file:" + url.PathEscape(filepath.ToSlash(path)) + "?" + query.Encode()

	db, _ := sql.Open("sqlite", name) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// markUnavailable adds errUnavailable to an error of SQLite whose cause may pass.
func markUnavailable(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL: // a lock of another program, a full disk
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return err
}

// sqliteCode returns the primary result code of an SQLite error, or 0 for any other error.
func sqliteCode(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code() & 0xff
	}
	return 0
}

// fileSize returns the size of a file in bytes, or 0 if there is none.
func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
