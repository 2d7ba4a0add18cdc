package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	// busyTimeout is how long a statement waits for the lock of another program.
	busyTimeout = 5 * time.Second

	// retryTime is how long creations are tried again, in other transactions, after a rule of the
	// operator has refused one of them. The last transaction may then wait for busyTimeout.
	retryTime = 2 * time.Second

	// watchInterval is the time between two looks for commits of other programs.
	watchInterval = 250 * time.Millisecond

	// idempotencyKeyLifetime is how long an Idempotency-Key is remembered.
	idempotencyKeyLifetime = 24 * time.Hour

	// applicationID is the PRAGMA application_id of this service's databases: "Pets" in ASCII.
	applicationID = 0x50657473
)

// NewPet is the API's NewPet, with its status filled in.
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

// caller identifies a client by the SHA-256 sum of its API key, which itself is not kept. Each
// caller has its own Idempotency-Keys. The zero caller is nobody.
type caller [sha256.Size]byte

// migrations[v] takes a database from schema version v to version v+1. The version is PRAGMA
// user_version, which is 0 in a new database.
//
// To change the schema, append to this list. Never edit what was released: databases that went
// through it stay as they are.
var migrations = []string{
	`PRAGMA application_id = 0x50657473;

	-- AUTOINCREMENT: no id is used twice. The CHECKs also hold for edits by other programs.
	-- They do not use IN, for which SQLite would build a b-tree at each insert.
	CREATE TABLE pets (
		id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0),
		name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
		category_id INTEGER NOT NULL,
		status TEXT NOT NULL DEFAULT 'available'
			CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
	) STRICT;
	-- A covering index: with status alone, a page of a rare status takes three times as long.
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

// The statements of the store.
const (
	selectPage = `SELECT id, name, category_id, status FROM pets
		WHERE id > ? ORDER BY id LIMIT ?`
	selectPageByStatus = `SELECT id, name, category_id, status FROM pets
		WHERE status = ? AND id > ? ORDER BY id LIMIT ?`

	insertPet = `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`
	selectKey = `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`
	insertKey = `REPLACE INTO idempotency_keys -- one that has expired may still be there
		(caller, key, created, id, name, category_id, status) VALUES (?, ?, ?, ?, ?, ?, ?)`
	deleteExpiredKeys = `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT 2)`
)

// store keeps the pets in an SQLite database in WAL mode: a commit appends to a write-ahead log
// (WAL), the file with the suffix -wal, and a checkpoint copies that to the database later. See
// https://sqlite.org/wal.html.
//
// create and list may be called concurrently.
type store struct {
	path   string
	info   os.FileInfo // of the database when it was opened, for checkPath
	logger *slog.Logger

	// generation grows after each commit: before create returns, and within watchInterval if the
	// commit is of another program. It may also grow without one.
	generation atomic.Int64
	watcher    *sql.DB       // one connection, for watch
	closing    chan struct{} // ends watch

	readers  *sql.DB              // for lists
	writer   *sql.DB              // one connection, for creates
	prepared map[string]*sql.Stmt // by SQL
	writerMu sync.Mutex           // is held while the writer is in use

	// waitingMu guards waiting: the creations for the next transaction, while writerMu is held for
	// the one before it (group commit; BenchmarkCreates shows what that gains).
	waitingMu sync.Mutex
	waiting   []*creation
}

// openStore opens the database at path, which is absolute. If there is none, it creates one, and
// logs a warning.
func openStore(path string, logger *slog.Logger) (*store, error) {
	s := &store{
		path:     path,
		logger:   logger,
		watcher:  openPool(path, "ro", 1),
		closing:  make(chan struct{}),
		readers:  openPool(path, "ro", max(4, runtime.GOMAXPROCS(0))),
		writer:   openPool(path, "rwc", 1),
		prepared: map[string]*sql.Stmt{},
	}

	isNew := isEmpty(path)
	if err := s.open(); err != nil {
		s.closeAll()
		return nil, explain(err)
	}
	if isNew {
		logger.Warn("the database is new and empty", "database", path)
	}
	go s.watch()
	return s, nil
}

// open opens the database, brings it up to date, and prepares the statements.
func (s *store) open() error {
	if err := refuseOrphanedWAL(s.path); err != nil {
		return err
	}
	if err := syncWAL(s.path); err != nil {
		return err
	}
	if err := migrate(s.writer, migrations); err != nil {
		return err
	}
	var mode string
	err := s.writer.QueryRow("PRAGMA journal_mode = WAL").Scan(&mode)
	if err != nil {
		return err
	}
	if mode != "wal" {
		return errors.New("SQLite cannot use a write-ahead log here")
	}

	// Start with a short WAL. On a full disk, go on all the same: lists work.
	_, err = s.writer.Exec("PRAGMA wal_checkpoint")
	if err != nil && sqliteCode(err) != sqlite3.SQLITE_FULL {
		return err
	}

	s.info, err = os.Stat(s.path)
	if err != nil {
		return err
	}
	for _, query := range []string{selectPage, selectPageByStatus} {
		if s.prepared[query], err = s.readers.Prepare(query); err != nil {
			return err
		}
	}
	for _, query := range []string{insertPet, selectKey, insertKey, deleteExpiredKeys} {
		if s.prepared[query], err = s.writer.Prepare(query); err != nil {
			return err
		}
	}
	return s.openReaders()
}

// openReaders opens all connections of the readers. One that was opened later, after the database
// was moved, would be to another file, or to none.
func (s *store) openReaders() error {
	for range s.readers.Stats().MaxOpenConnections {
		rows, err := s.prepared[selectPage].Query(0, 1)
		if err != nil {
			return err
		}
		defer rows.Close() // keeps the connection in use until all are open
	}
	return nil
}

// close closes the store. It returns an error if the database is not in its place. Call close only
// once.
func (s *store) close() error {
	s.closing <- struct{}{} // watch has ended when it takes this
	s.writerMu.Lock()       // when the creations that are being stored are on disk
	defer s.writerMu.Unlock()

	// The last connection to be closed copies the WAL into the database and deletes it, but not if
	// the database was moved: the WAL stays, and would damage another database at the path. So copy
	// it into the database that is open, wherever that is, and empty it.
	if err := s.checkPath(); err != nil {
		return errors.Join(err, s.emptyWAL(), s.closeAll())
	}
	return s.closeAll()
}

// emptyWAL copies the WAL into the database that is open, and empties it.
func (s *store) emptyWAL() error {
	var busy, pages, copied int
	err := s.writer.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &pages, &copied)
	if err == nil && busy != 0 {
		err = errors.New("its write-ahead log is not empty, because another program reads it: " +
			"move the log away before the next start")
	}
	return err
}

// closeAll closes all connections. The writer's comes last, because the others may not write, and
// so would leave the WAL behind.
func (s *store) closeAll() error {
	return errors.Join(s.watcher.Close(), s.readers.Close(), s.writer.Close())
}

// watch looks for commits of other programs every watchInterval, until the store is closed.
func (s *store) watch() {
	defer s.exitOnPanic()

	var lastVersion int64
	ticks := time.Tick(watchInterval)
	for {
		select {
		case <-ticks:
		case <-s.closing:
			return
		}

		// SQLite changes this number for each commit of another connection.
		var version int64
		err := s.watcher.QueryRow("PRAGMA data_version").Scan(&version)
		if err != nil || version != lastVersion {
			s.generation.Add(1)
		}
		lastVersion = version
	}
}

// checkPath returns an error if the file at the path is not the database that was opened. SQLite
// would go on with that, wherever it is, and the next process would not find what it stores there.
func (s *store) checkPath() error {
	info, err := os.Stat(s.path)
	if err == nil && !os.SameFile(info, s.info) {
		err = fmt.Errorf("%q is another file", s.path)
	}
	if err != nil {
		return fmt.Errorf("the database is not in its place: %w", err)
	}
	return nil
}

// list returns the pets that o selects, by ascending id. It takes no context: the query is short,
// and one that can be cancelled needs a goroutine, which costs 15 % of the lists in a second.
func (s *store) list(o listOptions) ([]Pet, error) {
	defer s.exitOnPanic()

	statement, args := s.prepared[selectPage], []any{o.after, o.limit}
	if o.status != "" {
		statement, args = s.prepared[selectPageByStatus], []any{o.status, o.after, o.limit}
	}
	rows, err := statement.Query(args...)
	if err != nil {
		return nil, explain(err)
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
	return pets, explain(rows.Err())
}

// creation is a pet to be stored, and then the result.
type creation struct {
	pet            NewPet
	caller         caller
	idempotencyKey string // "" for none

	result result
	stored sync.WaitGroup // is done when result is set
}

// result is what a client gets for a creation.
type result struct {
	pet      Pet
	replayed bool // pet is from the first response to the Idempotency-Key
	err      error
}

// create stores p and returns it, with its id, once it is on disk.
//
// If who has already used idempotencyKey ("" for none) within idempotencyKeyLifetime, it stores
// nothing, and returns the first pet with replayed set, or errIdempotencyKeyReused if p differs
// from it.
//
// After errIdempotencyKeyReused, errRefused or errUnavailable p is not stored. After another error
// it may be. There is no context: p shares a transaction with others, which goes on when one of the
// clients disconnects.
func (s *store) create(who caller, idempotencyKey string, p NewPet) (
	stored Pet, replayed bool, err error,
) {
	defer s.exitOnPanic()
	c := &creation{pet: p, caller: who, idempotencyKey: idempotencyKey}
	c.stored.Add(1)

	s.waitingMu.Lock()
	s.waiting = append(s.waiting, c)
	first := len(s.waiting) == 1
	s.waitingMu.Unlock()

	// The first one stores all. A goroutine for that would be easier to read, but switching to it
	// and back costs a lone client a fifth of its creates in a second.
	if first {
		s.storeWaiting()
	}
	c.stored.Wait()
	return c.result.pet, c.result.replayed, c.result.err
}

// storeWaiting stores all waiting creations, when those before them are stored.
func (s *store) storeWaiting() {
	s.writerMu.Lock() // while this waits, others join
	s.waitingMu.Lock()
	creations := s.waiting
	s.waiting = nil
	s.waitingMu.Unlock()

	s.storeAll(creations, time.Now())
	for _, c := range creations {
		c.stored.Done()
	}
	s.writerMu.Unlock()
}

// storeAll stores creations in their order, and sets their results. They share one transaction,
// unless that fails because of one of them, which a rule of the operator refuses. Then each half
// gets its own, and so on: only that one fails. No transaction begins when retryTime has passed
// since start, because each could wait for a lock.
func (s *store) storeAll(creations []*creation, start time.Time) {
	var results []result
	err := fmt.Errorf("%w: too many transactions failed before this one", errUnavailable)
	if time.Since(start) < retryTime {
		results, err = s.insertAll(creations)
	}

	switch {
	case err == nil:
		for i, c := range creations {
			c.result = results[i]
		}
	case len(creations) > 1 && causedByOne(err):
		half := len(creations) / 2
		s.storeAll(creations[:half], start)
		s.storeAll(creations[half:], start)
	default:
		for _, c := range creations {
			c.result = result{err: err}
		}
	}
}

// causedByOne reports whether a transaction failed with err because of one of its creations: it
// breaks a constraint, or a trigger refuses it or fails.
func causedByOne(err error) bool {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG:
		return true
	}
	return errors.Is(err, errRefused)
}

// insertAll stores creations in one transaction, and returns their results.
func (s *store) insertAll(creations []*creation) ([]result, error) {
	results := make([]result, 0, len(creations))
	err := inTx(s.writer, func(tx *sql.Tx) error {
		if err := s.checkPath(); err != nil {
			return fmt.Errorf("%w: %w", errUnavailable, err)
		}
		for _, c := range creations {
			r, err := s.insert(tx, c)
			if err != nil {
				return err
			}
			results = append(results, r)
		}
		return nil
	})
	s.generation.Add(1) // even after an error: the pets may be on disk

	if sqliteCode(err) == sqlite3.SQLITE_CONSTRAINT { // RAISE in a trigger has this code, too
		err = fmt.Errorf("%w: %w", errRefused, err)
	}
	return results, explain(err)
}

// insert stores c in tx, or finds the first response to its Idempotency-Key. An error means that tx
// has failed.
func (s *store) insert(tx *sql.Tx, c *creation) (result, error) {
	now := time.Now()
	oldest := now.Add(-idempotencyKeyLifetime).Unix()

	if c.idempotencyKey != "" {
		var first Pet
		err := tx.Stmt(s.prepared[selectKey]).
			QueryRow(c.caller[:], c.idempotencyKey, oldest).
			Scan(&first.ID, &first.Name, &first.CategoryID, &first.Status)
		switch {
		case err == nil && first.NewPet == c.pet:
			return result{pet: first, replayed: true}, nil
		case err == nil:
			return result{err: errIdempotencyKeyReused}, nil
		case !errors.Is(err, sql.ErrNoRows):
			return result{}, err
		}
	}

	id, err := insertRow(tx.Stmt(s.prepared[insertPet]), c.pet.Name, c.pet.CategoryID, c.pet.Status)
	if err != nil {
		return result{}, err
	}

	if c.idempotencyKey != "" {
		_, err := insertRow(tx.Stmt(s.prepared[insertKey]), c.caller[:], c.idempotencyKey,
			now.Unix(), id, c.pet.Name, c.pet.CategoryID, c.pet.Status)
		if err != nil {
			return result{}, err
		}

		// Delete two that have expired, so that they cannot pile up.
		if _, err := tx.Stmt(s.prepared[deleteExpiredKeys]).Exec(oldest); err != nil {
			return result{}, err
		}
	}
	return result{pet: Pet{id, c.pet}}, nil
}

// insertRow runs an INSERT of one row, and returns its rowid, the id of a pet. It returns
// errRefused, wrapped, if a trigger leaves the row out, which SQLite does not report. RETURNING id
// would take longer.
func insertRow(statement *sql.Stmt, args ...any) (id int64, err error) {
	r, err := statement.Exec(args...)
	if err != nil {
		return 0, err
	}
	if inserted, _ := r.RowsAffected(); inserted == 0 {
		return 0, fmt.Errorf("%w: a trigger left it out", errRefused)
	}
	return r.LastInsertId()
}

// backup writes a copy of the database at path, which may be in use, to the new file target. The
// copy gets that name once it is verified and on disk.
func backup(ctx context.Context, path, target string) error {
	if err := refuseOrphanedWAL(path); err != nil {
		return err
	}
	for _, suffix := range []string{"", "-wal", "-journal"} { // another log would damage the copy
		if _, err := os.Lstat(target + suffix); err == nil {
			return fmt.Errorf("%q exists already; name a new file", target+suffix)
		}
	}

	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()

	db := openPool(path, "rw", 1)
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
	return syncFolder(filepath.Dir(target))
}

// verify returns an error if the database at path is empty, damaged, or not one of this version of
// the service or of an earlier one.
func verify(ctx context.Context, path string) error {
	db := openPool(path, "rw", 1) // with "ro", SQLite would not verify the CHECKs
	defer db.Close()

	return inTx(db, func(tx *sql.Tx) error {
		version, err := readSchemaVersion(tx, len(migrations))
		if err != nil {
			return err
		}
		if version == 0 {
			return errors.New("the database is empty")
		}

		var result string
		if err := tx.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result); err != nil {
			return err
		}
		if result != "ok" {
			return errors.New("the database is damaged: " + result)
		}
		return nil
	})
}

// restore replaces the content of the database at path, which may be in use, with that of the
// backup in the file source, in one transaction. The database may be damaged, or of a newer
// version, but not of another program. After an error, it has its old content.
//
// Meanwhile, it needs space for two copies of the backup: beside the database, and in the WAL.
func restore(ctx context.Context, path, source string) error {
	if err := refuseOrphanedWAL(path); err != nil {
		return err
	}
	if isEmpty(path) {
		return errors.New("there is no database: start the service once, which creates one, " +
			"and restore again")
	}
	if err := checkSource(path, source); err != nil {
		return err
	}

	folder, err := os.MkdirTemp(filepath.Dir(path), filepath.Base(path)+".restore-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)

	verified := filepath.Join(folder, "verified.db") // nobody else changes this copy
	if err := backup(ctx, source, verified); err != nil {
		return fmt.Errorf("the backup was not copied: %w", explainLock(err))
	}
	if err := upgrade(verified); err != nil {
		return err
	}

	err = copyPages(ctx, path, verified)
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY:
		return explainLock(err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: stop the service, move the database and its -wal and -shm files away, "+
			"start the service, and restore again", err)
	}
	return explain(err)
}

// explainLock says what the operator can do if err is due to a lock.
func explainLock(err error) error {
	if sqliteCode(err) == sqlite3.SQLITE_BUSY {
		return fmt.Errorf("%w: another program holds a lock; end it, and restore again", err)
	}
	return err
}

// checkSource returns an error if the file source cannot be a backup for the database at path.
func checkSource(path, source string) error {
	database, err := os.Stat(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(source)
	if err != nil {
		return fmt.Errorf("the backup cannot be read: %w", errors.Unwrap(err)) // without its name
	}

	const smallestPage = 512 // bytes
	switch {
	case !info.Mode().IsRegular():
		return errors.New("the backup is not a file")
	case os.SameFile(info, database):
		return errors.New("the backup is the database itself")
	case info.Size()%smallestPage != 0: // SQLite would fill the last page up
		return errors.New("the backup is truncated")
	}
	return nil
}

// upgrade brings the schema of the database at path up to date.
func upgrade(path string) error {
	db := openPool(path, "rw", 1)
	return errors.Join(migrate(db, migrations), db.Close())
}

// copyPages replaces the content of the database at path with that of the one at source: see
// https://sqlite.org/backup.html.
func copyPages(ctx context.Context, path, source string) error {
	db := openPool(path, "rw", 1)
	defer db.Close()

	// Only the header of the database is read, because the rest may be damaged.
	var id int
	if err := db.QueryRow("PRAGMA application_id").Scan(&id); err != nil {
		return err
	}
	if id != applicationID {
		return fmt.Errorf("not a database of this service: its application_id is %d", id)
	}

	// Whether it succeeds or not, the copy leaves the WAL as long as the backup.
	defer db.Exec("PRAGMA wal_checkpoint(TRUNCATE)")

	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.Raw(func(driverConn any) error {
		b, err := driverConn.(interface {
			NewRestore(string) (*sqlite.Backup, error)
		}).NewRestore(dataSourceName(source, "ro"))
		if err != nil {
			return err
		}

		const pages = 1000 // between two looks at ctx
		for more := true; more && err == nil; {
			if err = ctx.Err(); err == nil {
				more, err = b.Step(pages)
			}
		}
		finishErr := b.Finish() // undoes what was copied unless all was
		return cmp.Or(err, finishErr)
	})
}

// syncFolder makes the names in a folder durable.
func syncFolder(name string) error {
	folder, err := os.Open(name)
	if err != nil {
		return err
	}
	defer folder.Close()
	if runtime.GOOS == "windows" {
		return nil // it cannot sync folders
	}
	return folder.Sync()
}

// migrate brings the schema of a database up to date, in one transaction. steps is migrations, but
// for tests.
//
// It changes nothing, and returns an error, if the database is not one of this service, was written
// by a newer version, or cannot be written.
func migrate(db *sql.DB, steps []string) error {
	return inTx(db, func(tx *sql.Tx) error {
		version, err := readSchemaVersion(tx, len(steps))
		if err != nil {
			return err
		}
		for ; version < len(steps); version++ {
			if _, err := tx.Exec(steps[version]); err != nil {
				return err
			}
			if _, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
				return err
			}
		}

		// BEGIN IMMEDIATE succeeds even on a file that is read-only, so try to write. There is no
		// such pet, so that this needs no space on a full disk.
		_, err = tx.Exec("DELETE FROM pets WHERE id = 0")
		return err
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

// refuseOrphanedWAL returns an error if there is a WAL for the database at path, but no database.
// SQLite would take that for a new database, and delete the WAL.
func refuseOrphanedWAL(path string) error {
	wal, err := walPath(path)
	if err != nil {
		return err
	}
	if fileSize(wal) > 0 && isEmpty(path) { // in this order: another process may create both now
		return fmt.Errorf("there is no database, but %q is the write-ahead log of one; "+
			"put that database back, or move the log away to start with an empty database", wal)
	}
	return nil
}

// syncWAL makes durable what a killed process may have left in the WAL of the database at path: a
// repeated request must not acknowledge it before. A checkpoint would not do, because it syncs
// nothing while another program, such as Litestream, reads the WAL.
func syncWAL(path string) error {
	name, err := walPath(path)
	if err != nil {
		return err
	}
	wal, err := os.OpenFile(name, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer wal.Close()
	return wal.Sync()
}

// walPath returns the path of the WAL of the database at path, which is beside the file that a link
// leads to. It returns an error for a link that leads to no file.
func walPath(path string) (string, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return path + "-wal", nil // not a link, but a database that is to be created
	}
	file, err := filepath.EvalSymlinks(path)
	return file + "-wal", err
}

// isEmpty reports whether SQLite takes the file at path for a new database.
func isEmpty(path string) bool { return fileSize(path) <= 1 }

// fileSize returns the size of a file in bytes, or 0 if that cannot be found out.
func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// openPool returns a pool of up to size connections to the database at path. None is open yet.
func openPool(path, mode string, size int) *sql.DB {
	db, _ := sql.Open("sqlite", dataSourceName(path, mode)) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// dataSourceName returns the driver's name for the database at path, which is absolute. mode is
// SQLite's: ro, rw, or rwc to create it. For the other parameters, see
// https://pkg.go.dev/modernc.org/sqlite#Driver.Open.
func dataSourceName(path, mode string) string {
	query := url.Values{
		"mode":      {mode},
		"_txlock":   {"immediate"},
		"_error_rc": {"1"}, // without it, an error could quote the message of another one
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()),
			"synchronous(FULL)",
			"fullfsync(ON)", // on macOS, fsync leaves data in the cache of the disk
			"checkpoint_fullfsync(ON)",
			"journal_size_limit(64000000)", // bytes, to which the WAL is cut after a burst
		},
	}
	location := url.URL{
		Scheme:   "file",
		Path:     "/" + strings.TrimPrefix(filepath.ToSlash(path), "/"), // on Windows: /C:/...
		RawQuery: query.Encode(),
	}
	return location.String()
}

// exitOnPanic, deferred, ends the program after a panic in the store, with status 1. A connection
// may be in use for ever, or a transaction open, so the program must not go on, as it does after
// other panics (see callHandler).
func (s *store) exitOnPanic() {
	if p := recover(); p != nil {
		s.logger.Error("panic in the store", "panic", p, "stack", string(debug.Stack()))
		os.Exit(1)
	}
}

// explain adds to an error of SQLite what it means: errUnavailable if its cause may pass, or what
// the operator can do. It returns all other errors as they are.
func explain(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL: // a lock of another program, a full disk
		return fmt.Errorf("%w: %w", errUnavailable, err)
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		return fmt.Errorf("%w: it must be a file in an existing folder, and both must be writable", err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: it is damaged, or not an SQLite database: "+
			"check the path, or restore a backup", err)
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
