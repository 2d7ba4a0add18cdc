package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
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
	busyTimeout            = 5 * time.Second        // how long to wait for another program's lock
	watchInterval          = 250 * time.Millisecond // between checks for commits of other programs, which must show within 1 s
	idempotencyKeyLifetime = 24 * 60 * 60           // seconds for which an idempotency key is remembered
	maxIdleWAL             = 64 << 20               // bytes to which SQLite truncates the write-ahead log when it is not needed
	applicationID          = 0x50657473             // PRAGMA application_id: "Pets", the mark of this service's databases

	// schemaVersion is the PRAGMA user_version of the schema below; a new database has 0. Raise it with every change of the
	// schema, and migrate older tables in the transaction that sets it: read it again there, because another process may have.
	schemaVersion = 1
)

// schema creates the tables if they do not exist. The CHECKs apply to manual edits, too. (ORs are faster there than an IN.)
var schema = fmt.Sprintf(`
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS pets (
	id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0), -- AUTOINCREMENT: no id is used twice
	name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
	category_id INTEGER NOT NULL,
	status TEXT NOT NULL DEFAULT 'available' CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
) STRICT;
CREATE INDEX IF NOT EXISTS pets_by_status ON pets (status, id, name, category_id); -- a covering index

CREATE TABLE IF NOT EXISTS idempotency_keys ( -- with the animal of the first response
	caller BLOB NOT NULL,       -- SHA-256 sum of the API key
	key TEXT NOT NULL,
	created INTEGER NOT NULL,   -- Unix time, seconds
	id INTEGER NOT NULL,
	name TEXT NOT NULL,
	category_id INTEGER NOT NULL,
	status TEXT NOT NULL,
	PRIMARY KEY (caller, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS idempotency_keys_by_age ON idempotency_keys (created);
PRAGMA application_id = %d;
PRAGMA user_version = %d;
COMMIT;`, applicationID, schemaVersion)

// newPet is the API's NewPet, with its status filled in.
type newPet struct {
	Name       string `json:"name"`
	CategoryID int64  `json:"categoryId"`
	Status     string `json:"status"`
}

// pet is the API's Pet: an animal in the database.
type pet struct {
	ID int64 `json:"id"`
	newPet
}

// columns returns the Scan destinations for the columns of an animal that a SELECT returns.
func (p *pet) columns() []any { return []any{&p.ID, &p.Name, &p.CategoryID, &p.Status} }

// page selects the animals to list.
type page struct {
	limit  int
	status string // "" for any
	after  int64  // the last id of the previous page
}

// creation is an animal waiting to be stored, and then the result.
type creation struct {
	newPet
	caller         caller
	idempotencyKey string // "" for none
	stored         pet
	replayed       bool  // stored is from the first response to idempotencyKey
	err            error // of this creation alone
}

// batch is a set of creations that share one transaction.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
	err       error         // of the whole batch
}

// store keeps the animals in an SQLite database in WAL mode. Its methods may be called concurrently. Reads run on a pool of
// read-only connections. Creations that wait at the same time share one transaction, and so one wait for the disk: the
// goroutine of the first of them writes them all.
type store struct {
	path    string      // absolute
	file    os.FileInfo // the file at path when it was opened
	walPath string      // of the write-ahead log
	wal     os.FileInfo // the file at walPath when it was opened
	readers *sql.DB
	writer  *sql.DB // one connection, so that its statements form one transaction
	watcher *sql.DB // one connection, which sees the commits of all others, and waits for no lock

	selectPage, selectPageByStatus                                         *sql.Stmt // of readers
	begin, commit, insertPet                                               *sql.Stmt // of writer
	selectIdempotencyKey, insertIdempotencyKey, deleteStaleIdempotencyKeys *sql.Stmt // of writer

	readSlots   chan struct{} // a semaphore: holds a value for each of the readers in use
	writing     sync.Mutex    // held during a transaction
	joining     sync.Mutex    // guards gathering
	gathering   *batch        // the batch that a creation can join, or nil
	walGone     atomic.Bool   // the log is not at walPath, as watch or checkWAL has seen
	walReplaced bool          // another program has begun a new log; guarded by writing
	changes     atomic.Int64  // grows after every commit: of this process, before it is acknowledged; of others, within watchInterval
	closing     chan struct{} // ends watch
}

// openStore opens the database at path, which is absolute. If the file is missing or empty (isNew), it creates the database.
func openStore(path string) (s *store, isNew bool, err error) {
	target, err := filepath.EvalSymlinks(path)
	if link, _ := os.Lstat(path); err != nil && link != nil && link.Mode()&os.ModeSymlink != 0 { // which cannot be followed
		return nil, false, err
	}
	walPath := cmp.Or(target, path) + "-wal" // SQLite keeps the log beside the file that a link leads to
	wal, _ := os.Stat(walPath)               // before the database, which another process may be creating
	info, err := os.Stat(path)
	isNew = err != nil || info.Size() <= 1 // SQLite takes a file of one byte for empty
	if isNew && wal != nil && wal.Size() > 0 {
		return nil, false, fmt.Errorf("there is no database, but %q is the write-ahead log of one and may hold animals; "+
			"put that database back, or delete the log to start with an empty one", walPath)
	}
	readers := max(4, runtime.GOMAXPROCS(0))
	s = &store{
		path:      path,
		walPath:   walPath,
		readers:   openPool(path, "ro", readers),
		readSlots: make(chan struct{}, readers),
		writer:    openPool(path, "rwc", 1, "synchronous(FULL)", "fullfsync(ON)", fmt.Sprintf("journal_size_limit(%d)", maxIdleWAL)),
		watcher:   openPool(path, "rw", 1, "busy_timeout(0)"),
		closing:   make(chan struct{}),
	}
	if err := s.open(); err != nil {
		s.watcher.Close()
		s.readers.Close()
		s.writer.Close()
		return nil, false, explain(err)
	}
	go s.watch()
	return s, isNew, nil
}

// open checks the database, creates the tables of a new one, prepares the statements and opens all connections.
func (s *store) open() error {
	version, err := checkDatabase(s.writer)
	if err != nil {
		return err
	}
	statements := "PRAGMA journal_mode = WAL; DELETE FROM pets WHERE id = 0" // a write of nothing: fails if read-only or locked
	if version < schemaVersion {
		statements = schema
	}
	if s.file, err = os.Stat(s.path); err == nil { // before Exec, which may wait for a lock
		_, err = s.writer.Exec(statements)
	}
	if err == nil {
		s.wal, err = os.Stat(s.walPath)
	}
	prepare := func(db *sql.DB, query string) (statement *sql.Stmt) {
		if err == nil {
			statement, err = db.Prepare(query)
		}
		return statement
	}
	s.selectPage = prepare(s.readers, `SELECT id, name, category_id, status FROM pets WHERE id > ? ORDER BY id LIMIT ?`)
	s.selectPageByStatus = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE status = ? AND id > ? ORDER BY id LIMIT ?`)
	s.begin = prepare(s.writer, `BEGIN IMMEDIATE`)
	s.commit = prepare(s.writer, `COMMIT`)
	s.insertPet = prepare(s.writer, `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`)
	s.selectIdempotencyKey = prepare(s.writer, `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`)
	s.insertIdempotencyKey = prepare(s.writer, `REPLACE INTO idempotency_keys (caller, key, created, id, name, category_id, status)
		VALUES (?, ?, ?, ?, ?, ?, ?)`)
	s.deleteStaleIdempotencyKeys = prepare(s.writer, `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT ?)`)
	if err == nil {
		err = errors.Join(openAll(s.readers), openAll(s.watcher))
	}
	return err
}

// close waits for a transaction in progress and closes the database. The store must not be used afterwards.
func (s *store) close() (err error) {
	s.closing <- struct{}{} // waits for watch
	s.writing.Lock()        // for good: nothing may be written any more
	s.readers.Close()       // before the writer: the last connection removes the write-ahead log, if it may write
	if err = s.checkWAL(); err != nil {
		return err // with the writer open: closing it would use the log once more, and delete whatever is at walPath
	}
	if !isFile(s.path, s.file) { // SQLite would leave the log at walPath, and then apply it to the next database there
		err = s.emptyWAL()
	}
	return errors.Join(err, s.watcher.Close(), s.writer.Close())
}

// list returns a page of animals, by ascending id, and whether more follow. It takes no context: the query is bounded, and
// database/sql discards the connection of a cancelled query.
func (s *store) list(p page) (pets []pet, more bool, err error) {
	statement, args := s.selectPage, []any{p.after, p.limit + 1}
	if p.status != "" {
		statement, args = s.selectPageByStatus, append([]any{p.status}, args...)
	}
	s.readSlots <- struct{}{} // first come, first served: database/sql could starve a caller
	defer func() { <-s.readSlots }()
	defer crash()
	rows, err := statement.Query(args...)
	if err != nil {
		return nil, false, dbError(err)
	}
	defer rows.Close()
	pets = make([]pet, 0, p.limit+1)
	var row pet
	columns := row.columns()
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, false, err
		}
		pets = append(pets, row)
	}
	more = len(pets) > p.limit
	return pets[:min(len(pets), p.limit)], more, dbError(rows.Err())
}

// create stores p and returns it, with its id, once it is on disk. If the caller has used idempotencyKey, unless it is "", within
// its lifetime, create returns the first result with replayed true, or errKeyReused if p differs. After errKeyReused or
// errUnavailable nothing was stored; after another error p may be stored. It takes no context: a disconnect must not break a commit.
func (s *store) create(who caller, idempotencyKey string, p newPet) (_ pet, replayed bool, err error) {
	c := &creation{newPet: p, caller: who, idempotencyKey: idempotencyKey}
	s.joining.Lock()
	first := s.gathering == nil
	if first {
		s.gathering = &batch{done: make(chan struct{})}
	}
	b := s.gathering
	b.creations = append(b.creations, c)
	s.joining.Unlock()
	if first {
		s.write(b)
	}
	<-b.done
	return c.stored, c.replayed, cmp.Or(b.err, c.err)
}

// write stores the batch b, sets its results and closes b.done.
func (s *store) write(b *batch) {
	s.writing.Lock()
	defer s.writing.Unlock()
	defer crash()
	_, err := s.begin.Exec() // while this waits for the lock of another program, creations join b
	s.joining.Lock()
	s.gathering = nil // the next creation begins a new batch
	s.joining.Unlock()
	if err != nil { // whatever it is, nothing is stored
		b.err = fmt.Errorf("%w: %w", errUnavailable, err)
	} else {
		b.err = s.transact(b)
	}
	if b.err != nil {
		s.writer.Exec("ROLLBACK") // fails, harmlessly, if no transaction is open
	}
	close(b.done)
}

// transact stores the batch b in the open transaction and commits it. After an error the transaction may still be open.
func (s *store) transact(b *batch) (err error) {
	if err := s.inPlace(); err != nil {
		return err
	}
	now, withKey := time.Now().Unix(), 0
	for _, c := range b.creations {
		if err := s.insert(c, now); err != nil {
			return dbError(err)
		}
		if c.idempotencyKey != "" {
			withKey++
		}
	}
	if withKey > 0 { // delete two for each Idempotency-Key in the batch, so that stale ones cannot pile up
		_, err = s.deleteStaleIdempotencyKeys.Exec(now-idempotencyKeyLifetime, 2*withKey)
	}
	if err == nil {
		_, err = s.commit.Exec()
		s.changes.Add(1) // even after an error: the animals may be on disk
	}
	return dbError(err)
}

// crash, deferred, ends the program after a panic: it would otherwise go on, with a connection lost and a transaction open.
func crash() {
	if p := recover(); p != nil {
		fmt.Fprintf(os.Stderr, "panic: %v\n%s", p, debug.Stack())
		os.Exit(2) // as after any other panic
	}
}

// insert stores c in the open transaction, or finds the first response to its Idempotency-Key. now is in Unix seconds. It
// returns an error that concerns the whole batch; one that concerns c alone is left in c.err.
func (s *store) insert(c *creation, now int64) error {
	if c.idempotencyKey != "" {
		err := s.selectIdempotencyKey.QueryRow(c.caller[:], c.idempotencyKey, now-idempotencyKeyLifetime).Scan(c.stored.columns()...)
		c.replayed = err == nil
		if c.replayed && c.stored.newPet != c.newPet {
			c.err = errKeyReused
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err // nil if there was a first response
		}
	}
	result, err := s.insertPet.Exec(c.Name, c.CategoryID, c.Status)
	if sqliteCode(err) == sqlite3.SQLITE_CONSTRAINT {
		c.err = err // such as RAISE(ABORT) in a trigger: SQLite has undone only this statement
		return nil
	}
	if err != nil {
		return err
	}
	id, _ := result.LastInsertId() // this driver never returns an error here
	c.stored = pet{id, c.newPet}
	if c.idempotencyKey != "" {
		_, err = s.insertIdempotencyKey.Exec(c.caller[:], c.idempotencyKey, now, id, c.Name, c.CategoryID, c.Status)
	}
	return err
}

// inPlace returns errUnavailable unless the database that was opened is still at path, with its log beside it. SQLite would
// go on writing to both wherever they are, even if they were deleted.
func (s *store) inPlace() error {
	if !isFile(s.path, s.file) || s.walGone.Load() {
		return fmt.Errorf("%w: the database or its write-ahead log was moved, deleted or replaced; put the database back, or end all "+
			"other programs that use it and restart the service", errUnavailable)
	}
	return nil
}

// checkWAL notes whether the write-ahead log is beside the database, where the next process looks for it. If not, checkWAL copies
// what the log holds, which is still open, to the database, and returns an error. Once another program has begun a new log, it
// copies nothing: all programs share one index of the log, which then describes the new one. The caller holds writing.
func (s *store) checkWAL() error {
	wal, err := os.Stat(s.walPath)
	gone := isFile(s.path, s.file) && (err != nil || !os.SameFile(wal, s.wal))
	if gone && err == nil && wal.Size() > 0 {
		s.walReplaced = true
	}
	s.walGone.Store(gone || s.walReplaced)
	switch {
	case s.walReplaced:
		return fmt.Errorf("another program has replaced %q; any animals that were only in the old one are lost", s.walPath)
	case gone:
		return cmp.Or(s.emptyWAL(), fmt.Errorf("%q was moved or deleted; the animals in it were saved in the database", s.walPath))
	}
	return nil
}

// emptyWAL moves all that the write-ahead log holds to the database. It waits for no lock: another program that holds one could
// begin a new log meanwhile.
func (s *store) emptyWAL() error {
	var busy, frames, copied int
	err := s.watcher.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &copied)
	if busy > 0 {
		err = errors.New("it is in use")
	}
	if err != nil {
		err = fmt.Errorf("%q or its write-ahead log, %q, was moved, deleted or replaced, and the log holds animals and could not be "+
			"emptied: %w; end all programs that use the database, and move the log beside it, under its name with -wal", s.path, s.walPath, err)
	}
	return err
}

// isFile reports whether the file at path is the given one.
func isFile(path string, file os.FileInfo) bool {
	now, err := os.Stat(path)
	return err == nil && os.SameFile(file, now)
}

// watch looks for commits of other programs, and whether the write-ahead log is in its place, until the store is closed. (A
// look at the log before each commit would slow a lone create by a seventh.)
func (s *store) watch() {
	ticks, last := time.Tick(watchInterval), int64(-1)
	for {
		var seen int64
		err := s.watcher.QueryRow("PRAGMA data_version").Scan(&seen)
		if err != nil || seen != last { // it also differs after commits of this process
			s.changes.Add(1)
		}
		last = seen
		if s.walGone.Load() || !isFile(s.walPath, s.wal) {
			s.walGone.Store(true) // first, for a creation that waits for another program's lock and holds writing
			s.writing.Lock()
			s.checkWAL()
			s.writing.Unlock()
		}
		select {
		case <-ticks:
		case <-s.closing:
			return
		}
	}
}

// backup writes a consistent copy of the database at path, which may be in use, to the new file target. The copy gets that
// name once it is verified and on disk; after an error before that, nothing of it is left.
func backup(ctx context.Context, path, target string) error {
	if _, err := os.Lstat(target); err == nil {
		return errors.New("the copy exists already; name a new file")
	}
	if info, err := os.Stat(path); err == nil && info.Size() <= 1 { // SQLite deletes the write-ahead log of an empty file
		return errors.New("not a database of this service: the file is empty")
	}
	db := openPool(path, "rw", 1)
	defer db.Close()
	if _, err := checkDatabase(db); err != nil {
		return explain(err)
	}
	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", temp.Name()); err != nil {
		return explain(err)
	}
	written := openPool(temp.Name(), "rw", 1) // on a read-only connection, integrity_check would skip the CHECK constraints
	var result string
	err = written.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result)
	if err == nil && result != "ok" {
		err = fmt.Errorf("the copy is damaged, and perhaps the database: %s", result)
	}
	if err := errors.Join(err, written.Close(), temp.Sync(), temp.Close()); err != nil {
		return err
	}
	return os.Rename(temp.Name(), target)
}

// openPool returns a pool of up to size connections to the database in file, whose path is absolute, with SQLite's URI
// mode ro, rw or rwc. All have the busy timeout, and then the given pragmas. None is open yet.
func openPool(file, mode string, size int, pragmas ...string) *sql.DB {
	query := url.Values{"mode": {mode}, "_busy_timeout": {fmt.Sprint(busyTimeout.Milliseconds())}, "_pragma": pragmas}
	location := "/" + strings.TrimPrefix(filepath.ToSlash(file), "/") // on Windows: /C:/...
	dsn := url.URL{Scheme: "file", Path: location, RawQuery: query.Encode()}
	db, _ := sql.Open("sqlite", dsn.String()) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// openAll opens all connections of db, for good: one that was opened later would open whatever is at the path by then.
func openAll(db *sql.DB) error {
	for range db.Stats().MaxOpenConnections {
		rows, err := db.Query("SELECT 1 FROM pets LIMIT 1") // SQLite opens the files at the first read
		if err != nil {
			return err
		}
		defer rows.Close() // and so gives the connection back to db, when all are open
	}
	return nil
}

// checkDatabase returns the schema version of a database. It refuses that of another program or of a newer version.
func checkDatabase(db *sql.DB) (version int, err error) {
	var id, objects int
	err = db.QueryRow(`SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
		FROM pragma_application_id, pragma_user_version`).Scan(&id, &version, &objects)
	switch {
	case err != nil:
		return 0, err
	case id != applicationID && (id != 0 || version != 0 || objects > 0):
		return 0, fmt.Errorf("not a database of this service: its application_id is not %d", applicationID)
	case version > schemaVersion:
		return 0, errors.New("a newer version of this service has written it; run that version")
	}
	return version, nil
}

// explain adds hints for the operator to an error of SQLite.
func explain(err error) error {
	if sqliteCode(err) == 0 {
		return err
	}
	return fmt.Errorf("%w (is it a file in an existing folder, can this user write to both, is there disk space, and is no other "+
		"program locking it? If it is damaged, restore a backup)", err)
}

// dbError wraps err in errUnavailable if it is an error of SQLite that may be temporary and after which nothing is stored.
func dbError(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
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
