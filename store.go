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
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	busyTimeout   = 5 * time.Second        // how long to wait for the lock of another program; a create has 8 s in all
	maxBatch      = 4096                   // creations in a batch, at a few hundred bytes each
	watchInterval = 250 * time.Millisecond // between checks for commits of other programs, which must show within 1 s
	keyLifetime   = 24 * time.Hour         // how long an idempotency key is remembered
	maxIdleWAL    = 64 << 20               // bytes to which SQLite truncates the write-ahead log when it is not needed

	applicationID = 0x50657473 // PRAGMA application_id: "Pets", the mark of this service's databases
	schemaVersion = 1          // PRAGMA user_version
)

var errNewer = errors.New("a newer version of this service has written it; run that version")

// schema creates the tables of a new database, unless another process has just done so. The CHECK constraints apply the
// rules of the API to manual edits too; white space is as in unicode.IsSpace. (SQLite checks three ORs faster than an IN.)
var schema = fmt.Sprintf(`
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS pets (
	id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0), -- AUTOINCREMENT: no id is used twice
	name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255 AND instr(name, char(0)) = 0
		AND trim(name, char(9, 10, 11, 12, 13, 32, 133, 160, 5760, 8192, 8193, 8194, 8195, 8196, 8197, 8198,
			8199, 8200, 8201, 8202, 8232, 8233, 8239, 8287, 12288)) <> ''),
	category_id INTEGER NOT NULL,
	status TEXT NOT NULL DEFAULT 'available' CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
) STRICT;
-- All columns, so that a list by status is read from the index alone.
CREATE INDEX IF NOT EXISTS pets_by_status ON pets (status, id, name, category_id);

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

// The statements, which are prepared once.
const (
	listSQL         = `SELECT id, name, category_id, status FROM pets WHERE id > ? ORDER BY id LIMIT ?`
	listByStatusSQL = `SELECT id, name, category_id, status FROM pets WHERE status = ? AND id > ? ORDER BY id LIMIT ?`
	getSQL          = `SELECT id, name, category_id, status FROM pets WHERE id = ?`
	beginSQL        = `BEGIN IMMEDIATE`
	commitSQL       = `COMMIT`
	insertPetSQL    = `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`
	findKeySQL      = `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`
	insertKeySQL = `REPLACE INTO idempotency_keys (caller, key, created, id, name, category_id, status)
		VALUES (?, ?, ?, ?, ?, ?, ?)`
	purgeSQL = `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT ?)`
)

// newPet is the API's NewPet, with its status filled in.
type newPet struct {
	Name       string `json:"name"`
	CategoryID int64  `json:"categoryId"`
	Status     string `json:"status"`
}

// pet is the API's Pet: an animal in the store.
type pet struct {
	ID int64 `json:"id"`
	newPet
}

// columns returns the Scan destinations for the SELECT statements above.
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
	caller caller
	key    string // idempotency key, "" for none

	stored   pet
	replayed bool  // stored is from the first response to key
	err      error // of this creation alone
}

// batch is a set of creations that share one transaction.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
	err       error         // of the whole batch
}

// store keeps the animals in an SQLite database in WAL mode. Its methods may be called concurrently.
//
// Reads run on a pool of read-only connections. Creations that wait at the same time share one transaction, and so
// one wait for the disk: the goroutine of the first of them writes them all.
type store struct {
	path     string      // absolute
	file     os.FileInfo // the file at path when it was opened
	walPath  string      // the write-ahead log
	wal      os.FileInfo // the file at walPath when it was opened
	readers  *sql.DB
	writer   *sql.DB // one connection, so that its statements form one transaction
	prepared map[string]*sql.Stmt

	writing   sync.Mutex // held during a transaction
	joining   sync.Mutex // guards gathering
	gathering *batch     // the batch that a creation can join, or nil

	changes atomic.Int64              // see version
	watcher *sql.DB                   // one connection, which sees the commits of all others
	looking sync.Mutex                // held during a look; guards seen
	seen    int64                     // the data_version that the watcher saw last
	looked  atomic.Pointer[time.Time] // when that was
}

// openStore opens the database file at path, which is absolute and has passed checkFile, and creates the database if the
// file is missing or empty.
func openStore(path string) (*store, error) {
	s := &store{
		path:     path,
		readers:  openPool(path, "ro", max(4, runtime.GOMAXPROCS(0))),
		writer:   openPool(path, "rwc", 1, "synchronous(FULL)", "fullfsync(ON)", fmt.Sprintf("journal_size_limit(%d)", maxIdleWAL)),
		watcher:  openPool(path, "ro", 1),
		prepared: map[string]*sql.Stmt{},
	}
	s.looked.Store(new(time.Time))
	if err := s.open(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// open creates the schema in a new database, prepares the statements and opens all connections.
func (s *store) open() error {
	var version int
	if err := s.writer.QueryRow("PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > schemaVersion { // according to the write-ahead log, which checkFile does not read
		return errNewer
	}
	if version == 0 { // before WAL mode, so that application_id is in the file from the start, and not only in the log
		if _, err := s.writer.Exec(schema); err != nil {
			return err
		}
	}
	var mode string
	if err := s.writer.QueryRow("PRAGMA journal_mode = WAL").Scan(&mode); err != nil {
		return err
	}
	if mode != "wal" {
		return fmt.Errorf("its file system does not support a write-ahead log (journal mode %s)", mode)
	}
	err := cmp.Or(
		s.prepare(s.readers, listSQL, listByStatusSQL, getSQL),
		s.prepare(s.writer, beginSQL, commitSQL, insertPetSQL, findKeySQL, insertKeySQL, purgeSQL),
		s.prepare(s.watcher))
	if err != nil {
		return err
	}
	resolved, _ := filepath.EvalSymlinks(s.path) // SQLite puts the log beside that file
	s.walPath = resolved + "-wal"
	s.file, err = os.Stat(s.path)
	if err == nil {
		s.wal, err = os.Stat(s.walPath)
	}
	return err
}

// prepare prepares queries on db, and opens all its connections, so that a lack of file descriptors shows at the start.
func (s *store) prepare(db *sql.DB, queries ...string) error {
	for _, query := range queries {
		statement, err := db.Prepare(query)
		if err != nil {
			return err
		}
		s.prepared[query] = statement
	}
	for range db.Stats().MaxOpenConnections {
		conn, err := db.Conn(context.Background())
		if err != nil {
			return err
		}
		defer conn.Close() // returns it to the pool, but not before all are open
		// SQLite opens the files at the first query.
		if _, err := conn.ExecContext(context.Background(), "SELECT 1 FROM pets LIMIT 1"); err != nil {
			return err
		}
	}
	return nil
}

// close waits for a transaction in progress and closes the database. The store must not be used afterwards.
//
// SQLite does not remove the log of a database that was moved or replaced, and would apply it to the next database at this
// path. close therefore empties the log. If another program prevents that, close renames it and returns an error.
func (s *store) close() error {
	s.writing.Lock() // and never unlocks it
	s.watcher.Close()
	s.readers.Close() // before the writer: the last connection removes the log, if it may write
	logIsOurs := s.wal != nil && isFile(s.walPath, s.wal)
	if s.inPlace() == nil || !logIsOurs {
		return s.writer.Close()
	}
	var busy, frames, copied int
	err := s.writer.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &copied)
	s.writer.Close()
	if err == nil && busy == 0 {
		return nil
	}
	err = cmp.Or(err, errors.New("another program is using it"))
	kept := s.walPath + time.Now().Format(".20060102T150405")
	if err := os.Rename(s.walPath, kept); err != nil {
		return err
	}
	os.Remove(strings.TrimSuffix(s.walPath, "-wal") + "-shm") // the index of the log; SQLite rebuilds it
	return fmt.Errorf("%q was moved or replaced, and its write-ahead log could not be emptied: %w; the log holds animals and is now "+
		"%q: to keep them, end all programs that use the database, move it back, and rename the log to %q", s.path, err, kept, s.walPath)
}

// list returns a page of animals, by ascending id, and whether more follow. It takes no context: the query is bounded, and
// database/sql discards the connection of a cancelled query.
func (s *store) list(p page) (pets []pet, more bool, err error) {
	query, args := listSQL, []any{p.after, p.limit + 1}
	if p.status != "" {
		query, args = listByStatusSQL, append([]any{p.status}, args...)
	}
	rows, err := s.prepared[query].Query(args...)
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

// get returns the animal with the given id, or errNotFound.
func (s *store) get(id int64) (pet, error) {
	var p pet
	err := s.prepared[getSQL].QueryRow(id).Scan(p.columns()...)
	if errors.Is(err, sql.ErrNoRows) {
		return pet{}, errNotFound
	}
	return p, dbError(err)
}

// create stores p and returns it, with its id, once it is safely on disk. If the caller has used the idempotency key within
// keyLifetime, it stores nothing: it returns the first result with replayed true, or errKeyReused if p differs. A key of ""
// is none. After errUnavailable nothing is stored; after any other error p may or may not be stored. It takes no context:
// a client that disconnects must not leave that in doubt.
func (s *store) create(who caller, key string, p newPet) (_ pet, replayed bool, err error) {
	c := &creation{newPet: p, caller: who, key: key}
	s.joining.Lock()
	first := s.gathering == nil
	if first {
		s.gathering = &batch{done: make(chan struct{}), err: errors.New("the write ended in a panic")} // write replaces err
	}
	b := s.gathering
	if len(b.creations) == maxBatch {
		s.joining.Unlock()
		return pet{}, false, fmt.Errorf("%w: %d creates are waiting already", errUnavailable, maxBatch)
	}
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
	defer func() {
		if b.err != nil {
			s.writer.Exec("ROLLBACK") // fails, harmlessly, if no transaction is open
		}
		close(b.done)
	}()
	if err := s.begin(); err != nil {
		b.err = err
		return
	}
	now := time.Now()
	for _, c := range b.creations {
		if err := s.insert(c, now); err != nil {
			b.err = dbError(err)
			return
		}
	}
	_, err := s.prepared[commitSQL].Exec()
	s.changes.Add(1) // even after an error: the animals may be on disk
	b.err = dbError(err)
}

// begin begins a transaction for the current batch. Creations can join the batch until the database is locked for it, or
// the lock is refused. Any error is errUnavailable: another program has the lock, for example, or the database was moved.
func (s *store) begin() error {
	defer func() {
		s.joining.Lock()
		s.gathering = nil
		s.joining.Unlock()
	}()
	if _, err := s.prepared[beginSQL].Exec(); err != nil {
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return s.inPlace()
}

// insert stores c in the open transaction, or finds the first response to its key. It returns an error that concerns the
// whole batch; one that concerns c alone is left in c.err.
func (s *store) insert(c *creation, now time.Time) error {
	oldest := now.Add(-keyLifetime).Unix() // of the keys that have not expired
	if c.key != "" {
		err := s.prepared[findKeySQL].QueryRow(c.caller[:], c.key, oldest).Scan(c.stored.columns()...)
		c.replayed = err == nil
		if c.replayed && c.stored.newPet != c.newPet {
			c.err = errKeyReused
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err // nil if the key was found
		}
	}
	result, err := s.prepared[insertPetSQL].Exec(c.Name, c.CategoryID, c.Status)
	if sqliteCode(err) == sqlite3.SQLITE_CONSTRAINT {
		c.err = err // such as RAISE(ABORT) in a trigger: SQLite has undone only this statement
		return nil
	}
	if err != nil {
		return err
	}
	if rows, _ := result.RowsAffected(); rows == 0 { // neither this nor LastInsertId returns an error in this driver
		c.err = errors.New("a trigger left the animal out")
		return nil
	}
	id, _ := result.LastInsertId()
	c.stored = pet{id, c.newPet}
	if c.key == "" {
		return nil
	}
	if _, err := s.prepared[insertKeySQL].Exec(c.caller[:], c.key, now.Unix(), id, c.Name, c.CategoryID, c.Status); err != nil {
		return err
	}
	_, err = s.prepared[purgeSQL].Exec(oldest, 2) // two expired keys for each new one
	return err
}

// inPlace returns errUnavailable unless the database that was opened is still at path. SQLite would go on writing to it
// wherever it is, even if it was deleted.
func (s *store) inPlace() error {
	if !isFile(s.path, s.file) {
		return fmt.Errorf("%w: the database was moved, deleted or replaced; put it back, or restart the service", errUnavailable)
	}
	return nil
}

// isFile reports whether path leads to file.
func isFile(path string, file os.FileInfo) bool {
	now, err := os.Stat(path)
	return err == nil && os.SameFile(file, now)
}

// version returns a number that grows with every commit: of this process, before it is acknowledged; of other programs,
// within watchInterval. It also grows if there may have been a commit.
func (s *store) version() int64 {
	if time.Since(*s.looked.Load()) < watchInterval {
		return s.changes.Load()
	}
	s.looking.Lock()
	defer s.looking.Unlock()
	if time.Since(*s.looked.Load()) >= watchInterval { // no other goroutine has just looked
		var seen int64
		err := s.watcher.QueryRow("PRAGMA data_version").Scan(&seen)
		if err != nil || seen != s.seen {
			s.changes.Add(1)
		}
		s.seen = seen
		s.looked.Store(new(time.Now()))
	}
	return s.changes.Load()
}

// backup writes a consistent copy of the database at path to the new file target. Both paths are absolute. The copy gets that
// name once it is verified and on disk; after an error before that, nothing of it is left.
func backup(ctx context.Context, path, target string) error {
	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return errors.Unwrap(err) // without the temporary name: the caller adds target
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()
	if err := copyDatabase(ctx, path, temp.Name()); err != nil {
		return err
	}
	if err := temp.Sync(); err != nil {
		return err
	}
	if err := os.Link(temp.Name(), target); err != nil { // unlike Rename, Link never overwrites
		return err
	}
	dir, err := os.Open(filepath.Dir(target))
	if err != nil || runtime.GOOS == "windows" { // which cannot sync a folder
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// copyDatabase writes a copy of the database at path, which may be in use, to the empty file target, and verifies it.
func copyDatabase(ctx context.Context, path, target string) error {
	db := openPool(path, "rw", 1)
	defer db.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", target); err != nil {
		return fmt.Errorf("copying %q: %w", path, err)
	}
	written := openPool(target, "rw", 1) // on a read-only connection, integrity_check would skip the CHECK constraints
	defer written.Close()
	var result string
	err := written.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result)
	if err == nil && result != "ok" {
		err = fmt.Errorf("the copy is damaged, and so may be the database: %s", result)
	}
	return err
}

// openPool returns a pool of up to size connections to the database in file, whose path is absolute, with SQLite's URI
// mode ro, rw or rwc. All have the busy timeout and the given pragmas. None is open yet.
func openPool(file, mode string, size int, pragmas ...string) *sql.DB {
	pragmas = append(pragmas, fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()))
	query := url.Values{"mode": {mode}, "_pragma": pragmas}
	location := "/" + strings.TrimPrefix(filepath.ToSlash(file), "/") // on Windows: /C:/...
	dsn := url.URL{Scheme: "file", Path: location, RawQuery: query.Encode()}
	db, _ := sql.Open("sqlite", dsn.String()) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// dbError wraps err in errUnavailable if it is an SQLite error that may be temporary and after which nothing is stored.
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
