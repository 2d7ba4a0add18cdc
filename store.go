package main

import (
	"cmp"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	busyTimeout            = 5 * time.Second        // how long to wait for another program's lock
	watchInterval          = 250 * time.Millisecond // between looks at the database; edits must show within 1 s
	idempotencyKeyLifetime = 24 * 60 * 60           // seconds for which an Idempotency-Key is remembered
	applicationID          = 0x50657473             // PRAGMA application_id of this service's databases: "Pets"
	// schemaVersion is the PRAGMA user_version of the schema below; a new database has 0. Raise it with every change,
	// and migrate older tables in the transaction that sets it. Read it again there: another process may have done so.
	schemaVersion = 1
)

// schema creates the tables if they do not exist. The CHECKs are also for edits by other programs. (They do not use IN,
// for which SQLite would create a temporary b-tree at each insert.)
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

// filter selects the animals to list.
type filter struct {
	limit  int
	status string // "" for any
	after  int64  // list only greater ids
}

// creation is an animal waiting to be stored, and then the result.
type creation struct {
	newPet
	caller         caller
	idempotencyKey string // "" for none
	stored         pet
	replayed       bool  // stored is from the first response to idempotencyKey
	err            error // of this creation alone: nil or errKeyReused
}

// batch is a set of creations that share one transaction.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
	err       error         // of the whole batch
}

// store keeps the animals in an SQLite database in WAL mode. Handlers may call its methods concurrently. Reads run on
// a pool of read-only connections. Writes use group commit: creations that wait at the same time share one transaction,
// and so one wait for the disk; the goroutine of the first of them writes them all.
type store struct {
	path    string       // absolute
	files   []openedFile // the database, its write-ahead log and the index of that log
	readers *sql.DB
	writer  *sql.DB // one connection, so that its statements form one transaction
	watcher *sql.DB // one connection, which sees the commits of all others, and waits for no lock

	selectPage, selectPageByStatus, // of readers; the others are of writer
	begin, commit, insertPet, selectIdempotencyKey, insertIdempotencyKey, deleteStaleIdempotencyKeys *sql.Stmt

	readSlots chan struct{} // a semaphore: holds a value for each of the readers in use
	writeMu   sync.Mutex    // held during a transaction, or to prevent one
	nextMu    sync.Mutex    // guards next
	next      *batch        // the batch that a creation can join, or nil
	closing   chan struct{} // ends watch

	changes atomic.Int64          // grows after every commit: of this process at once, of others within watchInterval
	moved   atomic.Pointer[error] // why nothing may be created, or nil; set by checkFiles
	emptied bool                  // emptyWAL has succeeded since a file was moved; used by checkFiles
}

// openStore opens the database at path, which is absolute. If there is none, or an empty file, it creates one (isNew).
func openStore(path string) (s *store, isNew bool, err error) {
	wal := path + "-wal"
	walInfo, _ := os.Lstat(wal) // before the database, which another process may be creating
	info, err := os.Lstat(path)
	if err == nil && !info.Mode().IsRegular() {
		return nil, false, errors.New("it is not a regular file; if it is a link, name the file that it leads to")
	}
	if walInfo != nil {
		// SQLite would take a file of one byte for a new database, and delete the log.
		if err != nil || info.Size() <= 1 {
			return nil, false, fmt.Errorf("there is no database, but %q is the write-ahead log of one; "+
				"put that database back, or delete the log to start with an empty one", wal)
		}
		// A process that was killed may have left commits that are not on disk yet. SQLite recovers them without a
		// sync, and a response to a repeated request must not acknowledge them before.
		if err := cmp.Or(syncPath(wal), syncPath(filepath.Dir(path))); err != nil {
			return nil, false, err
		}
	}
	readers := max(4, runtime.GOMAXPROCS(0))
	s = &store{
		path:      path,
		readers:   newPool(path, "ro", readers),
		readSlots: make(chan struct{}, readers),
		writer:    newPool(path, "rwc", 1, "synchronous(FULL)", "fullfsync(ON)", "journal_size_limit(64000000)"),
		watcher:   newPool(path, "rw", 1, "busy_timeout(0)", "fullfsync(ON)"),
		closing:   make(chan struct{}),
	}
	isNew, err = s.setUp()
	if err != nil {
		s.readers.Close()
		s.watcher.Close()
		s.writer.Close()
		return nil, false, explain(err)
	}
	go s.watch()
	return s, isNew, nil
}

// setUp creates the tables of a new database (isNew), prepares the statements, opens all connections and sets s.files.
func (s *store) setUp() (isNew bool, err error) {
	version, err := readSchemaVersion(s.writer)
	if err != nil {
		return false, err
	}
	statements := schema
	if version == schemaVersion { // a write of nothing: it fails if the database is read-only or locked
		statements = "PRAGMA journal_mode = WAL; DELETE FROM pets WHERE id = 0"
	}
	if _, err := s.writer.Exec(statements); err != nil {
		return false, err
	}
	if err := cmp.Or(s.prepare(), openConnections(s.readers), openConnections(s.watcher)); err != nil {
		return false, err
	}
	for _, path := range []string{s.path, s.path + "-wal", s.path + "-shm"} {
		info, err := os.Lstat(path)
		if err != nil {
			return false, err
		}
		s.files = append(s.files, openedFile{path, info})
	}
	return version == 0, nil
}

// prepare prepares the statements. It returns an error if the database lacks a table or a column.
func (s *store) prepare() (err error) {
	on := func(db *sql.DB, query string) (statement *sql.Stmt) {
		if err == nil {
			statement, err = db.Prepare(query)
		}
		return statement
	}
	s.selectPage = on(s.readers, `SELECT id, name, category_id, status FROM pets WHERE id > ? ORDER BY id LIMIT ?`)
	s.selectPageByStatus = on(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE status = ? AND id > ? ORDER BY id LIMIT ?`)
	s.begin = on(s.writer, `BEGIN IMMEDIATE`)
	s.commit = on(s.writer, `COMMIT`)
	s.insertPet = on(s.writer, `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`)
	s.selectIdempotencyKey = on(s.writer, `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`)
	s.insertIdempotencyKey = on(s.writer, `REPLACE INTO idempotency_keys
		(caller, key, created, id, name, category_id, status) VALUES (?, ?, ?, ?, ?, ?, ?)`)
	s.deleteStaleIdempotencyKeys = on(s.writer, `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT ?)`)
	return err
}

// close waits for a transaction in progress and closes the store. Call it once. If a file is not in its place, close
// returns an error and closes no connection: SQLite would use, and delete, whatever log is at the path.
func (s *store) close() error {
	s.closing <- struct{}{} // waits for watch
	err := s.checkFiles()
	s.writeMu.Lock() // for good: nothing may be written any more
	if err != nil {
		return err
	}
	// The writer comes last: the last connection removes the write-ahead log, if it may write.
	return errors.Join(s.readers.Close(), s.watcher.Close(), s.writer.Close())
}

// list returns a page of animals, by ascending id, and whether more follow. It takes no context: the query is bounded.
func (s *store) list(f filter) (pets []pet, more bool, err error) {
	statement, args := s.selectPage, []any{f.after, f.limit + 1}
	if f.status != "" {
		statement, args = s.selectPageByStatus, append([]any{f.status}, args...)
	}
	s.readSlots <- struct{}{} // first come, first served: database/sql would let some of 1,000 callers wait for 2 s
	defer func() { <-s.readSlots }()
	defer crash()
	rows, err := statement.Query(args...)
	if err != nil {
		return nil, false, dbError(err)
	}
	defer rows.Close()
	pets = make([]pet, 0, f.limit+1)
	var row pet
	columns := []any{&row.ID, &row.Name, &row.CategoryID, &row.Status}
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, false, err
		}
		pets = append(pets, row)
	}
	more = len(pets) > f.limit
	return pets[:min(len(pets), f.limit)], more, dbError(rows.Err())
}

// create stores p and returns it, with its id, once it is on disk. If who has used idempotencyKey ("" for none) within
// idempotencyKeyLifetime, it returns the first result and replayed, or errKeyReused if p differs. After errKeyReused or
// errUnavailable p is not stored; after another error it may be. No context: a disconnect must not break a commit.
func (s *store) create(who caller, idempotencyKey string, p newPet) (_ pet, replayed bool, err error) {
	c := &creation{newPet: p, caller: who, idempotencyKey: idempotencyKey}
	s.nextMu.Lock()
	first := s.next == nil
	if first {
		s.next = &batch{done: make(chan struct{})}
	}
	b := s.next
	b.creations = append(b.creations, c)
	s.nextMu.Unlock()
	if first {
		s.write(b)
	}
	<-b.done
	return c.stored, c.replayed, cmp.Or(b.err, c.err)
}

// write stores the batch b, sets its results and closes b.done.
func (s *store) write(b *batch) {
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
	defer crash()
	_, err := s.begin.Exec() // while this waits for the lock of another program, creations join b
	s.nextMu.Lock()
	s.next = nil // the next creation begins a new batch
	s.nextMu.Unlock()
	if err != nil { // whatever it is, nothing is stored
		b.err = cmp.Or(s.requireInPlace(), fmt.Errorf("%w: %w", errUnavailable, err))
	} else {
		b.err = s.transact(b)
	}
	if b.err != nil {
		s.writer.Exec("ROLLBACK") // fails, harmlessly, if no transaction is open
	}
	close(b.done)
}

// transact stores the batch b in the open transaction and commits it. After an error the transaction may be open.
func (s *store) transact(b *batch) (err error) {
	if err := s.requireInPlace(); err != nil {
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

// insert stores c in the open transaction, or finds the first response to its Idempotency-Key. now is in Unix seconds.
// It returns an error that concerns the whole batch; one that concerns c alone is left in c.err.
func (s *store) insert(c *creation, now int64) error {
	if c.idempotencyKey != "" {
		row := s.selectIdempotencyKey.QueryRow(c.caller[:], c.idempotencyKey, now-idempotencyKeyLifetime)
		err := row.Scan(&c.stored.ID, &c.stored.Name, &c.stored.CategoryID, &c.stored.Status)
		c.replayed = err == nil
		if c.replayed && c.stored.newPet != c.newPet {
			c.err = errKeyReused
		}
		if c.replayed || !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	result, err := s.insertPet.Exec(c.Name, c.CategoryID, c.Status)
	if err != nil {
		return err
	}
	// After RAISE(IGNORE) in a trigger there is no error, and LastInsertId is that of an earlier animal.
	if inserted, _ := result.RowsAffected(); inserted == 0 {
		return errors.New("a trigger in the database left the animal out")
	}
	id, _ := result.LastInsertId()
	c.stored = pet{id, c.newPet}
	if c.idempotencyKey != "" {
		_, err = s.insertIdempotencyKey.Exec(c.caller[:], c.idempotencyKey, now, id, c.Name, c.CategoryID, c.Status)
	}
	return err
}

// crash, deferred, ends the program after a panic in the store. If exchange.finish recovered it, as it does those of
// handlers, the program would go on without a connection to the database, or with an open transaction.
func crash() {
	if p := recover(); p != nil {
		time.AfterFunc(time.Second, func() { os.Exit(2) }) // in case nobody reads standard error
		fmt.Fprintf(os.Stderr, "panic: %v\n%s", p, debug.Stack())
		os.Exit(2)
	}
}

// watch looks for commits of other programs, and for files that were moved, until the store is closed.
func (s *store) watch() {
	ticks, last := time.Tick(watchInterval), int64(-1)
	for {
		var seen int64
		err := s.watcher.QueryRow("PRAGMA data_version").Scan(&seen)
		if err != nil || seen != last { // it also differs after commits of this process
			s.changes.Add(1)
		}
		last = seen
		s.checkFiles()
		select {
		case <-ticks:
		case <-s.closing:
			return
		}
	}
}

// requireInPlace returns an error that wraps errUnavailable if checkFiles last failed, or if the database itself is not
// in its place now. (A look at the log, too, would slow commits: the kernel would then update its time at each write.)
func (s *store) requireInPlace() error {
	if err := s.moved.Load(); err != nil {
		return fmt.Errorf("%w: %w", errUnavailable, *err)
	}
	if !s.files[0].inPlace() {
		return fmt.Errorf("%w: %w", errUnavailable, s.files[0].movedError("do not restart the service yet"))
	}
	return nil
}

// checkFiles returns an error as long as a file of the database is not in its place. SQLite would go on writing to that
// file wherever it is, so nothing is created meanwhile. What the write-ahead log holds is moved to the database, once:
// the next process would miss the log, or apply it to another database at the path. Calls must not overlap.
func (s *store) checkFiles() error {
	i := slices.IndexFunc(s.files, func(f openedFile) bool { return !f.inPlace() })
	if i < 0 {
		s.moved.Store(nil)
		s.emptied = false
		return nil
	}
	if s.emptied {
		return *s.moved.Load()
	}
	moved := s.files[i].movedError
	pending := moved("do not restart the service yet")
	s.moved.Store(&pending) // first: a create that holds writeMu may be waiting for another program
	s.writeMu.Lock()        // so that no create fills the log again
	defer s.writeMu.Unlock()
	inUse, err := s.emptyWAL()
	s.emptied = err == nil
	const restart = "end all other programs that use the database, and restart"
	switch {
	case err != nil:
		err = fmt.Errorf("%w: %q could not be saved in the database: %w", pending, s.path+"-wal", err)
	case inUse:
		err = moved("another program has begun a new log without the old one's animals; put it back, or " + restart)
	case i > 0:
		err = moved("the animals in the log were saved in the database; " + restart)
	default:
		err = moved(fmt.Sprintf("put it back (see /proc/%d/fd) or a backup in its place, %s", os.Getpid(), restart))
	}
	s.moved.Store(&err)
	return err
}

// emptyWAL moves what the write-ahead log holds to the database, unless another program has begun a new log or a new
// index of it (inUse): what this process knows of the log would then damage the database. It waits for no lock.
func (s *store) emptyWAL() (inUse bool, err error) {
	for _, f := range s.files[1:] {
		now, err := os.Lstat(f.path)
		if err == nil && now.Mode().IsRegular() && now.Size() > 0 && !os.SameFile(now, f.info) {
			return true, nil
		}
	}
	var busy, frames, copied int
	err = s.watcher.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &copied)
	if busy > 0 {
		err = errors.New("it is in use")
	}
	return false, err
}

// openedFile is a file that was opened at path.
type openedFile struct {
	path string
	info os.FileInfo
}

// inPlace reports whether the file is still at its path.
func (f openedFile) inPlace() bool {
	now, err := os.Lstat(f.path)
	return err == nil && os.SameFile(f.info, now)
}

// movedError returns an error that says that the file is not at its path, and what to do.
func (f openedFile) movedError(advice string) error {
	return fmt.Errorf("%q was moved, deleted or replaced while the service ran; %s", f.path, advice)
}

// syncPath makes the file at path durable, or the names in the folder at path.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if runtime.GOOS == "windows" {
		return nil // it cannot sync a file that was opened to read
	}
	return f.Sync()
}

// newPool returns a pool of up to size connections to the database in file, at its location. None is open yet.
func newPool(file, mode string, size int, pragmas ...string) *sql.DB {
	db, _ := sql.Open("sqlite", location(file, mode, pragmas...)) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// location returns the URI of the database in file, with SQLite's mode ro, rw or rwc. The pragmas override busyTimeout.
func location(file, mode string, pragmas ...string) string {
	query := url.Values{"mode": {mode}, "_busy_timeout": {fmt.Sprint(busyTimeout.Milliseconds())}, "_pragma": pragmas}
	query.Set("_error_rc", "1")                                  // or an error could quote the message of another one
	path, _ := filepath.Abs(file)                                // an error leaves path empty, which SQLite cannot open
	path = "/" + strings.TrimPrefix(filepath.ToSlash(path), "/") // on Windows: /C:/...
	return (&url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}).String()
}

// openConnections opens all connections of db, for good: one opened later would open whatever is at the path by then.
func openConnections(db *sql.DB) error {
	for range db.Stats().MaxOpenConnections {
		rows, err := db.Query("SELECT 1 FROM pets LIMIT 1") // SQLite opens the files at the first read
		if err != nil {
			return err
		}
		defer rows.Close() // and so gives the connection back to db, when all are open
	}
	return nil
}

var errForeign = fmt.Errorf("not a database of this service: its application_id is not %d", applicationID)

// readSchemaVersion returns the schema version of a database, 0 if it is empty. It refuses foreign and newer ones.
func readSchemaVersion(db *sql.DB) (version int, err error) {
	var id, objects int
	err = db.QueryRow(`SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
		FROM pragma_application_id, pragma_user_version`).Scan(&id, &version, &objects)
	switch {
	case err != nil:
		return 0, err
	case id != applicationID && (id != 0 || version != 0 || objects > 0):
		return 0, errForeign
	case version > schemaVersion:
		return 0, errors.New("a newer version of this service has written it; run that version")
	}
	return version, nil
}

// dbError wraps an error of a statement in errUnavailable if the cause may pass and nothing is stored.
func dbError(err error) error {
	if code := sqliteCode(err); code == sqlite3.SQLITE_BUSY || code == sqlite3.SQLITE_FULL {
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

// explain adds to an error of SQLite what the operator can do.
func explain(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		return fmt.Errorf("%w: it must be a file in an existing folder, with the right to write for both", err)
	case sqlite3.SQLITE_IOERR:
		return fmt.Errorf("%w: end all other programs that use it; if there are none, the disk may be failing", err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: it is damaged: put a backup in with -restore or, if that fails, move its files "+
			"elsewhere and copy a backup into their place", err)
	}
	return err
}
