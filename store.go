package main

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	busyTimeout   = 5 * time.Second        // wait for another program's lock; a create is to be answered within 8 s
	maxBatch      = 4096                   // creates that wait at most, at a few hundred bytes each
	watchInterval = 250 * time.Millisecond // between looks for edits from outside, which are to show within 1 s
	keyLifetime   = 24 * time.Hour         // for which an idempotency key is remembered
	walKept       = 64 << 20               // bytes of the write-ahead log that outlive a checkpoint, to be used again

	applicationID = 0x50657473 // "Pets": marks a database as this service's
	schemaVersion = 1          // PRAGMA user_version
)

// schema makes a new database, unless another process just has. The CHECK constraints hold edits from outside to
// the rules of the API; white space is what unicode.IsSpace says it is. Three statuses joined by OR are checked
// much faster than a list of three.
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
-- All the columns, so that a list by status need not visit the table for each animal.
CREATE INDEX IF NOT EXISTS pets_by_status ON pets (status, id, name, category_id);

CREATE TABLE IF NOT EXISTS idempotency_keys ( -- and the answers first given for them
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

// The statements, which are prepared once. Only the first three run on connections for reading.
const (
	listSQL         = `SELECT id, name, category_id, status FROM pets WHERE id > ? ORDER BY id LIMIT ?`
	listByStatusSQL = `SELECT id, name, category_id, status FROM pets WHERE status = ? AND id > ? ORDER BY id LIMIT ?`
	getSQL          = `SELECT id, name, category_id, status FROM pets WHERE id = ?`
	beginSQL        = `BEGIN IMMEDIATE`
	commitSQL       = `COMMIT`
	rollbackSQL     = `ROLLBACK`
	insertPetSQL    = `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`
	findKeySQL      = `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`
	insertKeySQL = `REPLACE INTO idempotency_keys (caller, key, created, id, name, category_id, status)
		VALUES (?, ?, ?, ?, ?, ?, ?)`
	purgeSQL = `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT ?)`
)

// newPet is an animal without an id: the interface's NewPet with its status filled in.
type newPet struct {
	Name       string `json:"name"`
	CategoryID int64  `json:"categoryId"`
	Status     string `json:"status"`
}

// pet is an animal in the store: the interface's Pet.
type pet struct {
	ID int64 `json:"id"`
	newPet
}

// columns returns where to scan the columns of the queries above.
func (p *pet) columns() []any { return []any{&p.ID, &p.Name, &p.CategoryID, &p.Status} }

// page is what a list is asked for.
type page struct {
	limit  int
	status string // "" for any
	after  int64  // the last id of the page before
}

// creation is a create on its way to the disk.
type creation struct {
	newPet
	caller caller
	key    string // idempotency key, "" for none

	stored   pet
	replayed bool  // stored is the answer first given to key
	err      error // of this creation alone
}

// batch is the creations that one transaction stores.
type batch struct {
	creations []*creation
	done      chan struct{} // closed once all the rest is final
	err       error         // of the whole batch
}

// store keeps the animals in a file, an SQLite database in WAL mode. Its methods may be called concurrently.
//
// Reads run on a pool of read-only connections. Creations that wait at the same moment share one transaction, and
// so one wait for the disk; the goroutine of the first of them writes them all.
type store struct {
	path    string
	file    os.FileInfo  // what path led to when it was opened
	changes atomic.Int64 // see version

	readers  *sql.DB
	writer   *sql.DB // of one connection, so that what it runs is one transaction
	prepared map[string]*sql.Stmt

	writing   sync.Mutex // held during a transaction
	joining   sync.Mutex
	gathering *batch // what a creation joins, nil if there is none; joining guards it

	watcher *sql.DB                   // of one connection, which notices what all others commit
	looking sync.Mutex                // held during a look
	seen    int64                     // the result of the last look; looking guards it
	looked  atomic.Pointer[time.Time] // when the last look ended
}

// openStore opens the database file at path, an absolute one, and creates it if it does not exist or is empty. It leaves
// untouched what is not a database of this service, or is one that a newer version has written.
func openStore(path string) (*store, error) {
	if err := checkFile(path); err != nil && err != errNoDatabase {
		return nil, fmt.Errorf("-db %q: %w", path, err)
	}
	s := &store{
		path:     path,
		readers:  openPool(path, "ro", max(4, runtime.GOMAXPROCS(0))),
		writer:   openPool(path, "rwc", 1, "synchronous(FULL)", "fullfsync(ON)", fmt.Sprintf("journal_size_limit(%d)", walKept)),
		prepared: map[string]*sql.Stmt{},
		watcher:  openPool(path, "ro", 1),
	}
	s.looked.Store(new(time.Time))
	if err := s.open(); err != nil {
		s.close()
		if code := sqliteCode(err); code == sqlite3.SQLITE_CANTOPEN || code == sqlite3.SQLITE_READONLY {
			err = fmt.Errorf("%w: the service must be able to write this file, and others beside it in its folder", err)
		}
		return nil, fmt.Errorf("-db %q: %w", path, err)
	}
	return s, nil
}

// open makes the schema in a new database, prepares the statements and opens all connections.
func (s *store) open() (err error) {
	var version int
	if err := s.writer.QueryRow("PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > schemaVersion { // which checkFile cannot see in the write-ahead log
		return errNewer
	}
	if version == 0 { // before WAL mode, so that the file itself is this service's from its first byte
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
	for db, queries := range map[*sql.DB][]string{
		s.readers: {listSQL, listByStatusSQL, getSQL},
		s.writer:  {beginSQL, commitSQL, rollbackSQL, insertPetSQL, findKeySQL, insertKeySQL, purgeSQL},
		s.watcher: nil,
	} {
		for _, query := range queries {
			if s.prepared[query], err = db.Prepare(query); err != nil {
				return err
			}
		}
		for range db.Stats().MaxOpenConnections { // all of them now: later there may be no file descriptor left
			conn, err := db.Conn(context.Background())
			if err != nil {
				return err
			}
			defer conn.Close() // back to the pool
			if _, err := conn.ExecContext(context.Background(), "SELECT 1 FROM pets LIMIT 1"); err != nil {
				return err
			}
		}
	}
	s.file, err = os.Stat(s.path)
	return err
}

// close waits for what is being written and closes the database. Nothing may use the store afterwards.
func (s *store) close() error {
	s.writing.Lock()  // for good
	s.watcher.Close() // like the readers before the writer, which as the last one removes the write-ahead log
	s.readers.Close()
	if s.file != nil && s.inPlace() != nil {
		// SQLite leaves the log, and would take it for that of the file which is there now.
		s.writer.Exec("PRAGMA wal_checkpoint(TRUNCATE)")
	}
	return s.writer.Close()
}

// list returns a page of the animals, by ascending id, and whether more follow. It cannot be cancelled: it is bounded,
// and to interrupt a query costs a connection.
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
	if len(pets) > p.limit {
		pets, more = pets[:p.limit], true
	}
	return pets, more, dbError(rows.Err())
}

// get returns the animal with the id, or errNotFound.
func (s *store) get(id int64) (pet, error) {
	var p pet
	err := s.prepared[getSQL].QueryRow(id).Scan(p.columns()...)
	if errors.Is(err, sql.ErrNoRows) {
		return pet{}, errNotFound
	}
	return p, dbError(err)
}

// create stores p and returns it with its id once it is safely on disk. If the idempotency key (a key of "" is none)
// was used before with the API key that has this SHA-256 sum, it stores nothing and returns the animal that it returned
// then, with replayed true; or errKeyReused if that was made from another newPet. On errUnavailable nothing is stored;
// on any other error it may or may not be. It cannot be cancelled: a client that goes away would leave that in doubt.
func (s *store) create(who caller, key string, p newPet) (_ pet, replayed bool, err error) {
	c := &creation{newPet: p, caller: who, key: key}
	s.joining.Lock()
	first := s.gathering == nil
	if first {
		s.gathering = &batch{done: make(chan struct{}), err: errors.New("the write ended in a panic")}
	}
	b := s.gathering
	if len(b.creations) == maxBatch {
		s.joining.Unlock()
		return pet{}, false, fmt.Errorf("%w: %d creates wait already", errUnavailable, maxBatch)
	}
	b.creations = append(b.creations, c)
	s.joining.Unlock()
	if first {
		s.write(b)
	}
	<-b.done
	if b.err != nil {
		return pet{}, false, b.err
	}
	return c.stored, c.replayed, c.err
}

// write stores the batch b, or leaves the reason why not in it.
func (s *store) write(b *batch) {
	s.writing.Lock()
	defer s.writing.Unlock()
	defer func() {
		if b.err != nil {
			s.prepared[rollbackSQL].Exec() // fails if nothing was begun, or SQLite has undone it already
		}
		close(b.done)
	}()
	if err := s.begin(); err != nil {
		b.err = fmt.Errorf("%w: %w", errUnavailable, err)
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
	s.changes.Add(1) // even on an error, after which the animals may be on disk
	b.err = dbError(err)
}

// begin begins a transaction, on a file that is known to be in its place. Creations join its batch until then:
// whoever comes while the database is locked is stored, or refused, with the rest.
func (s *store) begin() error {
	defer func() {
		s.joining.Lock()
		s.gathering = nil
		s.joining.Unlock()
	}()
	if _, err := s.prepared[beginSQL].Exec(); err != nil {
		return err
	}
	return s.inPlace()
}

// insert stores c, or finds the answer first given to its key. An error is that of the whole batch: one that
// concerns c alone is left in c.
func (s *store) insert(c *creation, now time.Time) error {
	forgotten := now.Add(-keyLifetime).Unix()
	if c.key != "" {
		err := s.prepared[findKeySQL].QueryRow(c.caller[:], c.key, forgotten).Scan(c.stored.columns()...)
		if err == nil {
			if c.replayed = true; c.stored.newPet != c.newPet {
				c.err = errKeyReused
			}
			return nil
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	result, err := s.prepared[insertPetSQL].Exec(c.Name, c.CategoryID, c.Status)
	if sqliteCode(err) == sqlite3.SQLITE_CONSTRAINT {
		c.err = err // of a trigger made from outside, say: SQLite undoes the one statement
		return nil
	}
	if err != nil {
		return err
	}
	id, _ := result.LastInsertId() // never an error in this driver
	c.stored = pet{id, c.newPet}
	if c.key == "" {
		return nil
	}
	if _, err := s.prepared[insertKeySQL].Exec(c.caller[:], c.key, now.Unix(), id, c.Name, c.CategoryID, c.Status); err != nil {
		return err
	}
	_, err = s.prepared[purgeSQL].Exec(forgotten, 2) // two for each one added, so that they run out
	return err
}

// inPlace returns an error unless path leads to the file that was opened: what is written to another would be gone
// with this process.
func (s *store) inPlace() error {
	now, err := os.Stat(s.path)
	if err == nil && !os.SameFile(s.file, now) {
		err = errors.New("another file is there")
	}
	if err != nil {
		return fmt.Errorf("the database was moved, deleted or replaced; put it back, or restart: %w", err)
	}
	return nil
}

// version returns a number that grows with every commit: of this process, before it is acknowledged; of another
// program, within watchInterval.
func (s *store) version() int64 {
	if time.Since(*s.looked.Load()) >= watchInterval {
		s.look()
	}
	return s.changes.Load()
}

// look adds to changes if another connection has committed since the last look, or if it cannot tell. Only one
// goroutine looks at a time; the others wait for its result.
func (s *store) look() {
	s.looking.Lock()
	defer s.looking.Unlock()
	if time.Since(*s.looked.Load()) < watchInterval { // another goroutine has just looked
		return
	}
	var seen int64
	err := s.watcher.QueryRow("PRAGMA data_version").Scan(&seen)
	if err != nil || seen != s.seen {
		s.changes.Add(1)
	}
	now := time.Now()
	s.seen = seen
	s.looked.Store(&now)
}

var (
	errNoDatabase = errors.New("there is no database yet")
	errForeign    = errors.New("not a database of this service; name another file with -db")
	errNewer      = errors.New("a newer version of this service has written it; run that version")
)

// checkFile returns an error unless path is a database that openStore accepts, by its header, as
// https://sqlite.org/fileformat.html#the_database_header lays it out; errNoDatabase if there is no file or an empty
// one. It must not be called while this process has the file open: it would drop SQLite's locks.
func checkFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0) // SQLite would make do with a file that it may only read
	if errors.Is(err, fs.ErrNotExist) {
		return errNoDatabase
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	var header [72]byte
	_, err = f.ReadAt(header[:], 0)
	switch {
	case info.Mode().IsRegular() && info.Size() == 0:
		return errNoDatabase
	case err != nil && err != io.EOF:
		return err
	case string(header[:16]) != "SQLite format 3\x00" || binary.BigEndian.Uint32(header[68:]) != applicationID:
		return errForeign
	case binary.BigEndian.Uint32(header[60:]) > schemaVersion:
		return errNewer
	}
	return nil
}

// backup writes a copy of the database at path, in a consistent state, to the file target, which must not exist yet.
// Both paths are absolute. The copy is verified and on disk when it gets that name; if it does not, nothing is left of it.
func backup(ctx context.Context, path, target string) error {
	if err := checkFile(path); err != nil {
		return fmt.Errorf("-db %q: %w", path, err)
	}
	if _, err := os.Lstat(target); err == nil {
		return fmt.Errorf("-backup %q exists already; name a new file", target)
	}
	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return fmt.Errorf("-backup: %w", err)
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // which SQLite leaves if the disk is full
	defer temp.Close()
	if err := copyDatabase(ctx, path, temp.Name()); err != nil {
		return err
	}
	if err := temp.Sync(); err != nil {
		return err
	}
	if err := os.Link(temp.Name(), target); err != nil { // unlike Rename, this fails if another backup was faster
		return fmt.Errorf("-backup: %w", err)
	}
	dir, err := os.Open(filepath.Dir(target))
	if err != nil || runtime.GOOS == "windows" { // where a folder cannot be synced
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// copyDatabase writes a copy of the database at path, which others may be using, to the empty file target, and
// verifies it.
func copyDatabase(ctx context.Context, path, target string) error {
	db := openPool(path, "rw", 1)
	defer db.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", target); err != nil {
		return fmt.Errorf("copying %q: %w", path, err)
	}
	written := openPool(target, "rw", 1) // read-only, integrity_check would leave out the CHECKs
	defer written.Close()
	var result string
	err := written.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result)
	if err == nil && result != "ok" {
		err = fmt.Errorf("the copy is damaged, and so may be the database: %s", result)
	}
	return err
}

// openPool returns a pool of connections to the database file at path, an absolute one. It opens none yet. They all
// have the busy timeout and the given pragmas.
func openPool(path, mode string, size int, pragmas ...string) *sql.DB {
	if path = filepath.ToSlash(path); path[0] != '/' {
		path = "/" + path // before the drive, on Windows
	}
	pragmas = append(pragmas, fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()))
	dsn := url.URL{Scheme: "file", Path: path, RawQuery: url.Values{"mode": {mode}, "_pragma": pragmas}.Encode()}
	db, _ := sql.Open("sqlite", dsn.String()) // an error means only that there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// sqliteCode returns the primary result code of an SQLite error, and 0 for any other.
func sqliteCode(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code() & 0xff
	}
	return 0
}

// dbError adds errUnavailable to an error of the database that may pass and has left nothing behind.
func dbError(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return err
}
