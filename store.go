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

// What the store's methods return, wrapped, for errors.Is to tell apart.
var (
	errNotFound    = errors.New("no such animal")
	errKeyReused   = errors.New("the idempotency key was used for another animal")
	errUnavailable = errors.New("the store is unavailable") // for now, and nothing was stored
)

const (
	busyTimeout   = 5 * time.Second        // wait while another program holds the database locked
	queueTimeout  = 7 * time.Second        // wait of a create for its turn; it is to be answered within 8 s
	queueLength   = 4096                   // creates that wait at most, at a few hundred bytes each
	watchInterval = 250 * time.Millisecond // between looks for edits from outside, which are to show within 1 s
	keyLifetime   = 24 * time.Hour         // for which an idempotency key is remembered
	purgeInterval = time.Minute            // between deletions of those no longer remembered
	purgeBatch    = 500                    // of them deleted at once: a few milliseconds that creates wait
	walKept       = 64 << 20               // bytes of the write-ahead log that outlive a checkpoint, to be used again

	applicationID = 0x50657473 // "Pets": marks a database as this service's
	schemaVersion = 1          // PRAGMA user_version
)

// schema makes a new database, unless another process just has. The CHECK constraints hold edits from outside to the rules of the API, white
// space being what unicode.IsSpace says it is.
var schema = fmt.Sprintf(`
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS pets (
	id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0), -- AUTOINCREMENT: no id is used twice
	name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255 AND instr(name, char(0)) = 0
		AND trim(name, char(9, 10, 11, 12, 13, 32, 133, 160, 5760, 8192, 8193, 8194, 8195, 8196, 8197, 8198,
			8199, 8200, 8201, 8202, 8232, 8233, 8239, 8287, 12288)) <> ''),
	category_id INTEGER NOT NULL,
	status TEXT NOT NULL DEFAULT 'available' CHECK (status IN ('available', 'pending', 'sold'))
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

const (
	listSQL         = `SELECT id, name, category_id, status FROM pets WHERE id > ? ORDER BY id LIMIT ?`
	listByStatusSQL = `SELECT id, name, category_id, status FROM pets WHERE status = ? AND id > ? ORDER BY id LIMIT ?`
	getSQL          = `SELECT id, name, category_id, status FROM pets WHERE id = ?`
	insertPetSQL    = `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`
	findKeySQL      = `SELECT id, name, category_id, status FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created > ?`
	insertKeySQL = `REPLACE INTO idempotency_keys (caller, key, created, id, name, category_id, status)
		VALUES (?, ?, ?, ?, ?, ?, ?)`
	purgeSQL = `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created <= ? ORDER BY created LIMIT ?)`
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

// creation is a create on its way to the disk.
type creation struct {
	newPet newPet
	caller caller
	key    string // idempotency key, "" for none

	claimed  atomic.Bool   // set by whoever is first: the writer that takes it up, or its caller that gives up
	done     chan struct{} // closed by the writer once the fields below are final
	pet      pet
	replayed bool // pet is the answer first given to key
	err      error
}

// store keeps the animals in a file, an SQLite database in WAL mode. Its methods may be called concurrently.
//
// Reads run on a pool of read-only connections. Creates queue for the one goroutine that writes: it commits
// all that wait as one transaction, so that they share one wait for the disk.
type store struct {
	path    string
	file    *os.File               // path, for intact; closing it drops SQLite's locks, so it closes last
	opened  map[string]os.FileInfo // path and the files SQLite keeps beside it, when they were opened
	version atomic.Int64           // grows with every change, before it is acknowledged

	readers               *sql.DB
	listAll, listByStatus *sql.Stmt
	getOne                *sql.Stmt
	writer                *sql.DB // of one connection, for the writing goroutine
	insertPet, purge      *sql.Stmt
	findKey, insertKey    *sql.Stmt

	queue   chan *creation
	quit    chan struct{}
	running sync.WaitGroup
}

// openStore opens the database file at path, and creates it if it does not exist or is empty. It leaves
// untouched what is not a database of this service, or is one that a newer version has written.
func openStore(path string) (_ *store, err error) {
	if err := checkFile(path); err != nil && !errors.Is(err, errNoDatabase) {
		return nil, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return nil, err
	}
	s := &store{path: path, queue: make(chan *creation, queueLength), quit: make(chan struct{})}
	defer func() {
		if err != nil {
			s.close()
			err = fmt.Errorf("opening %q: %w", path, err)
		}
	}()
	if err := s.openWriter(); err != nil {
		return nil, err
	}
	watcher, err := s.openReaders()
	if err != nil {
		return nil, err
	}
	if err := s.noteFiles(); err != nil {
		return nil, err
	}
	s.running.Go(s.write)
	s.running.Go(func() { s.watch(watcher) })
	return s, nil
}

// openWriter opens the connection that writes, and makes the schema where there is none.
func (s *store) openWriter() (err error) {
	s.writer, err = sql.Open("sqlite", dsn(s.path, "rwc", "synchronous(FULL)", fmt.Sprintf("journal_size_limit(%d)", walKept))+
		"&_txlock=immediate")
	if err != nil {
		return err
	}
	s.writer.SetMaxOpenConns(1)
	var version int
	if err := s.writer.QueryRow("PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > schemaVersion { // which the header in the file does not show yet
		return errNewer
	}
	if version == 0 {
		// Before WAL mode, in which the header would lag behind: the file is this service's from its first byte.
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
	return prepare(s.writer, map[string]**sql.Stmt{insertPetSQL: &s.insertPet, findKeySQL: &s.findKey,
		insertKeySQL: &s.insertKey, purgeSQL: &s.purge})
}

// openReaders opens the pool that reads and returns one connection more, for watch. All open their files now:
// later there may be no file descriptor left.
func (s *store) openReaders() (watcher *sql.Conn, err error) {
	count := max(4, runtime.GOMAXPROCS(0)) + 1
	if s.readers, err = sql.Open("sqlite", dsn(s.path, "ro")); err != nil {
		return nil, err
	}
	s.readers.SetMaxOpenConns(count)
	s.readers.SetMaxIdleConns(count)
	if err := prepare(s.readers, map[string]**sql.Stmt{
		listSQL: &s.listAll, listByStatusSQL: &s.listByStatus, getSQL: &s.getOne}); err != nil {
		return nil, err
	}
	for range count {
		conn, err := s.readers.Conn(context.Background())
		if err != nil {
			return nil, err
		}
		if _, err := conn.ExecContext(context.Background(), "SELECT 1 FROM pets LIMIT 1"); err != nil {
			return nil, err
		}
		if watcher == nil {
			watcher = conn
		} else {
			defer conn.Close() // back to the pool
		}
	}
	return watcher, nil
}

// dsn returns the data source name of the database file at path, an absolute one, for connections that all
// have the busy timeout and the given pragmas.
func dsn(path, mode string, pragmas ...string) string {
	pragmas = append(pragmas, fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()))
	query := url.Values{"mode": {mode}, "_pragma": pragmas}
	return (&url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}).String()
}

// prepare prepares each query on db and puts the statement where the map says.
func prepare(db *sql.DB, queries map[string]**sql.Stmt) (err error) {
	for query, stmt := range queries {
		if *stmt, err = db.Prepare(query); err != nil {
			return err
		}
	}
	return nil
}

// close waits for what is being written and closes the database. Nothing may use the store afterwards.
func (s *store) close() error {
	close(s.quit)
	s.running.Wait()
	if s.file != nil {
		s.detach()
	}
	var errs []error
	for _, db := range []*sql.DB{s.readers, s.writer} { // the writer last: it can then remove the write-ahead log
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return errors.Join(append(errs, s.file.Close())...)
}

// list returns a page of the animals, by ascending id, and whether more follow.
func (s *store) list(ctx context.Context, p page) (pets []pet, more bool, err error) {
	var rows *sql.Rows
	if p.status == "" {
		rows, err = s.listAll.QueryContext(ctx, p.after, p.limit+1)
	} else {
		rows, err = s.listByStatus.QueryContext(ctx, p.status, p.after, p.limit+1)
	}
	if err != nil {
		return nil, false, dbError(err)
	}
	defer rows.Close()
	pets = make([]pet, 0, p.limit+1)
	for rows.Next() {
		pets = append(pets, pet{})
		if err := rows.Scan(pets[len(pets)-1].columns()...); err != nil {
			return nil, false, dbError(err)
		}
	}
	if len(pets) > p.limit {
		pets, more = pets[:p.limit], true
	}
	return pets, more, dbError(rows.Err())
}

// get returns the animal with the id, or errNotFound.
func (s *store) get(ctx context.Context, id int64) (pet, error) {
	var p pet
	err := s.getOne.QueryRowContext(ctx, id).Scan(p.columns()...)
	if errors.Is(err, sql.ErrNoRows) {
		return pet{}, errNotFound
	}
	return p, dbError(err)
}

// create stores p and returns it with its id once it is safely on disk. If the caller has used the
// idempotency key before (a key of "" is none), it stores nothing and returns the animal that it returned
// then, with replayed true; or errKeyReused if that was made from another newPet. On errUnavailable nothing is
// stored, on any other error that is not known. It cannot be cancelled: a client that goes away would leave
// that in doubt.
func (s *store) create(caller caller, key string, p newPet) (_ pet, replayed bool, err error) {
	c := &creation{newPet: p, caller: caller, key: key, done: make(chan struct{})}
	select {
	case s.queue <- c:
	default:
		return pet{}, false, fmt.Errorf("%w: %d creates wait already", errUnavailable, queueLength)
	}
	timeout := time.NewTimer(queueTimeout)
	defer timeout.Stop()
	select {
	case <-c.done:
	case <-timeout.C:
		if c.claimed.CompareAndSwap(false, true) {
			return pet{}, false, fmt.Errorf("%w: waited %v to be written", errUnavailable, queueTimeout)
		}
		<-c.done
	}
	return c.pet, c.replayed, c.err
}

// write stores what is queued, and purges idempotency keys, until the store closes.
func (s *store) write() {
	purge := time.NewTimer(s.purgeKeys())
	defer purge.Stop()
	for {
		select {
		case c := <-s.queue:
			// The lock first: whoever comes while it is waited for joins the batch, or is refused with it.
			tx, err := s.beginTx()
			batch := s.claim(c)
			if err == nil {
				err = s.writeBatch(tx, batch)
			}
			for _, c := range batch {
				if err != nil {
					c.err = err
				}
				close(c.done)
			}
		case <-purge.C:
			purge.Reset(s.purgeKeys())
		case <-s.quit:
			return
		}
	}
}

// beginTx takes the write lock and begins a transaction, on a file that is known to be still in its place. Any
// error is errUnavailable.
func (s *store) beginTx() (*sql.Tx, error) {
	tx, err := s.writer.Begin()
	if err == nil {
		if err = s.intact(); err == nil {
			return tx, nil
		}
		tx.Rollback()
	}
	return nil, fmt.Errorf("%w: %w", errUnavailable, err)
}

// claim returns c and whatever waits behind it, but for what its caller has given up.
func (s *store) claim(c *creation) []*creation {
	var batch []*creation
	for {
		if c.claimed.CompareAndSwap(false, true) {
			batch = append(batch, c)
		}
		if len(s.queue) == 0 {
			runtime.Gosched() // whoever is about to queue may as well share this wait for the disk
		}
		if len(s.queue) == 0 || len(batch) == queueLength {
			return batch
		}
		c = <-s.queue // does not block: nobody else takes from the queue
	}
}

// writeBatch stores the batch in the transaction and commits it. What breaks a constraint fails alone; any other
// error is returned, and is that of the whole batch.
func (s *store) writeBatch(tx *sql.Tx, batch []*creation) error {
	defer tx.Rollback() // has no effect after Commit
	findKey, insertPet, insertKey := tx.Stmt(s.findKey), tx.Stmt(s.insertPet), tx.Stmt(s.insertKey)
	now := time.Now()
	for _, c := range batch {
		if c.key != "" {
			err := findKey.QueryRow(c.caller[:], c.key, now.Add(-keyLifetime).Unix()).Scan(c.pet.columns()...)
			if err == nil {
				if c.replayed = true; c.pet.newPet != c.newPet {
					c.err = errKeyReused
				}
				continue
			}
			if !errors.Is(err, sql.ErrNoRows) {
				return dbError(err)
			}
		}
		result, err := insertPet.Exec(c.newPet.Name, c.newPet.CategoryID, c.newPet.Status)
		if e, ok := errors.AsType[*sqlite.Error](err); ok && e.Code()&0xff == sqlite3.SQLITE_CONSTRAINT {
			c.err = err // of a trigger made from outside, say: SQLite undoes the one statement
			continue
		}
		if err != nil {
			return dbError(err)
		}
		c.pet.newPet = c.newPet
		c.pet.ID, _ = result.LastInsertId() // never an error in this driver
		if c.key != "" {
			_, err := insertKey.Exec(c.caller[:], c.key, now.Unix(), c.pet.ID, c.pet.Name, c.pet.CategoryID, c.pet.Status)
			if err != nil {
				return dbError(err)
			}
		}
	}
	err := tx.Commit()
	s.version.Add(1)
	if e, ok := errors.AsType[*sqlite.Error](err); ok && e.Code() == sqlite3.SQLITE_FULL {
		return dbError(err)
	}
	return err // and the animals may be on disk: SQLite syncs its log before it does the rest
}

// purgeKeys deletes a batch of idempotency keys that are no longer remembered, and returns how long to wait
// for the next.
func (s *store) purgeKeys() time.Duration {
	if s.intact() == nil {
		result, err := s.purge.Exec(time.Now().Add(-keyLifetime).Unix(), purgeBatch)
		if err == nil { // else what stops it stops creates too, and they tell
			if n, _ := result.RowsAffected(); n == purgeBatch {
				return 0
			}
		}
	}
	return purgeInterval
}

// watch raises the version when another program has changed the database, as conn notices, until the store
// closes. While it cannot tell it assumes so.
func (s *store) watch(conn *sql.Conn) {
	defer conn.Close()
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for last := int64(-1); ; {
		var now int64
		err := conn.QueryRowContext(context.Background(), "PRAGMA data_version").Scan(&now)
		if err != nil || now != last {
			s.version.Add(1)
		}
		last = now
		s.detach()
		select {
		case <-tick.C:
		case <-s.quit:
			return
		}
	}
}

// check returns an error unless the store can be read.
func (s *store) check(ctx context.Context) error {
	if err := s.intact(); err != nil {
		return err
	}
	_, _, err := s.list(ctx, page{limit: 1})
	return err
}

// noteFiles notes which files the store has open: the database, by the name given for it too, and those that
// SQLite keeps beside it.
func (s *store) noteFiles() (err error) {
	given := s.path
	if s.path, err = filepath.EvalSymlinks(given); err != nil {
		return err
	}
	if s.file, err = os.Open(s.path); err != nil {
		return err
	}
	s.opened = map[string]os.FileInfo{}
	for _, name := range []string{given, s.path, s.path + "-wal", s.path + "-shm"} {
		if s.opened[name], err = os.Stat(name); err != nil {
			return err
		}
	}
	return nil
}

// displaced returns an error if one of the files that the store has open was deleted or replaced.
func (s *store) displaced() error {
	for name := range s.opened {
		if !s.inPlace(name) {
			return fmt.Errorf("%q was deleted or replaced; put it back, or restart", name)
		}
	}
	return nil
}

// inPlace reports whether the file called name is still the one that the store has open.
func (s *store) inPlace(name string) bool {
	now, err := os.Stat(name)
	return err == nil && os.SameFile(s.opened[name], now)
}

// intact returns an error if what is written to the database would be gone with this process: it was displaced,
// or overwritten with something else.
func (s *store) intact() error {
	if err := s.displaced(); err != nil {
		return err
	}
	return checkHeader(s.file)
}

// detach keeps the next process from taking the write-ahead log of a database that is no longer in its place for
// that of the file which is there then, and damaging it.
func (s *store) detach() {
	if s.displaced() == nil {
		return
	}
	if _, err := os.Stat(s.path); err != nil || s.inPlace(s.path) { // nothing is there, or the log is what is gone
		s.writer.Exec("PRAGMA wal_checkpoint(TRUNCATE)")
		return
	}
	s.writer.Exec("PRAGMA wal_checkpoint(PASSIVE)") // into the old file, as far as others who read it let it
	for _, name := range []string{s.path + "-wal", s.path + "-shm"} {
		if s.inPlace(name) {
			os.Remove(name)
		}
	}
}

var (
	errNoDatabase = errors.New("there is no database yet")
	errForeign    = errors.New("not a database of this service; name another file with -db")
	errNewer      = errors.New("a newer version of this service has written it; run that version")
)

// checkFile returns an error unless path is a database that openStore accepts; errNoDatabase if there is no
// file or an empty one. It must not be called while SQLite has the file open: it would drop SQLite's locks.
func checkFile(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode().IsRegular() && info.Size() == 0:
		return fmt.Errorf("%q: %w", path, errNoDatabase)
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%q is not a file", path)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0) // SQLite would make do with a file that it may only read
	if err != nil {
		return err
	}
	defer f.Close()
	if err := checkHeader(f); err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}
	return nil
}

// checkHeader returns an error unless f begins with the header of a database of this service, as
// https://sqlite.org/fileformat.html#the_database_header lays it out.
func checkHeader(f io.ReaderAt) error {
	var header [72]byte
	if _, err := f.ReadAt(header[:], 0); err != nil && err != io.EOF {
		return err
	}
	if string(header[:16]) != "SQLite format 3\x00" || binary.BigEndian.Uint32(header[68:]) != applicationID {
		return errForeign
	}
	if binary.BigEndian.Uint32(header[60:]) > schemaVersion {
		return errNewer
	}
	return nil
}

// dbError adds errUnavailable to an error of the database that may pass and has left nothing behind.
func dbError(err error) error {
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return err
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
		sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM:
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return err
}

// backup writes a copy of the database at path, as it is at one moment, to the file target, which must not
// exist yet. The copy is verified and on disk when it gets that name; on an error nothing is left of it.
func backup(ctx context.Context, path, target string) (err error) {
	if err := checkFile(path); err != nil {
		return err
	}
	if path, err = filepath.Abs(path); err != nil {
		return err
	}
	if target, err = filepath.Abs(target); err != nil {
		return err
	}
	if err := refuseExisting(target); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer f.Close()
	defer os.Remove(f.Name()) // or what is left of it: nothing after Rename
	defer os.Remove(f.Name() + "-journal")
	if err := vacuumInto(ctx, path, f.Name()); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := refuseExisting(target); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), target); err != nil {
		return err
	}
	return syncDir(filepath.Dir(target))
}

// refuseExisting returns an error if there is anything at path.
func refuseExisting(path string) error {
	_, err := os.Lstat(path)
	if err == nil {
		return fmt.Errorf("%q exists already; name a new file", path)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// vacuumInto copies the database at path, which others may be using, to target, and verifies the copy.
func vacuumInto(ctx context.Context, path, target string) error {
	db, err := sql.Open("sqlite", dsn(path, "rw"))
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", target); err != nil {
		return fmt.Errorf("copying %q: %w", path, err)
	}
	written, err := sql.Open("sqlite", dsn(target, "rw")) // read-only, integrity_check would leave out the CHECKs
	if err != nil {
		return err
	}
	defer written.Close()
	var result string
	if err := written.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result); err != nil {
		return err
	}
	if result != "ok" {
		return fmt.Errorf("the copy is damaged, and so may be the database: %s", result)
	}
	return nil
}

// syncDir makes a change of the names in dir durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
