package main

import (
	"bytes"
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

// savedSuffixes end the names of copies of a database whose files were moved while it was open.
var savedSuffixes = []string{".saved", ".saved2", ".saved3", ".saved4"}

// schema creates the tables if they do not exist. The CHECKs apply to manual edits, too. (For an IN, SQLite would create a
// temporary b-tree at each insert.)
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
	err            error // of this creation alone
}

// batch is a set of creations that share one transaction.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
	err       error         // of the whole batch
}

// store keeps the animals in an SQLite database in WAL mode. Its methods may be called concurrently. Reads run on a pool of
// read-only connections. Writes use group commit: creations that wait at the same time share one transaction, and so one wait
// for the disk; the goroutine of the first of them writes them all.
type store struct {
	path    string      // absolute
	file    os.FileInfo // the database that was opened
	wal     os.FileInfo // its write-ahead log
	walPath string      // where the log was when it was opened
	readers *sql.DB
	writer  *sql.DB // one connection, so that its statements form one transaction
	watcher *sql.DB // one connection, which sees the commits of all others, and waits for no lock

	selectPage, selectPageByStatus                                         *sql.Stmt // of readers
	begin, commit, insertPet                                               *sql.Stmt // of writer
	selectIdempotencyKey, insertIdempotencyKey, deleteStaleIdempotencyKeys *sql.Stmt // of writer

	readSlots   chan struct{}         // a semaphore: holds a value for each of the readers in use
	writing     sync.Mutex            // held during a transaction
	joining     sync.Mutex            // guards gathering
	gathering   *batch                // the batch that a creation can join, or nil
	walProblem  atomic.Pointer[error] // why the log is not in its place, as checkWAL has last seen, or nil
	walReplaced bool                  // another program has begun a new log; used by checkWAL and close
	emptied     bool                  // the log was emptied when the database was moved, and others may use it since; used by checkWAL
	changes     atomic.Int64          // grows after every commit: of this process, before it is acknowledged; of others, within watchInterval
	closing     chan struct{}         // ends watch
}

// checkPlace returns the file at path, before SQLite opens it and may then wait for a lock, and whether the database will be new:
// if there is no file, which makes it nil, or an empty one. It refuses what may hide animals that a start would lose.
func checkPlace(path string) (file os.FileInfo, isNew bool, err error) {
	for _, suffix := range savedSuffixes {
		if _, err := os.Lstat(path + suffix); err == nil {
			return nil, false, fmt.Errorf("%q was saved by a stop, when the database was not in its place; it is empty if that failed, and the "+
				"database that is there now may be newer; keep one as %q, and move the other elsewhere, with any -wal and -shm beside it", path+suffix, path)
		}
	}
	wal, _ := os.Stat(walPath(path)) // before the database, which another process may be creating
	file, err = os.Stat(path)
	if link, _ := os.Lstat(path); err != nil && link != nil && link.Mode()&os.ModeSymlink != 0 {
		return nil, false, err // a link that cannot be followed
	}
	isNew = err != nil || file.Size() <= 1 // SQLite takes a file of one byte for empty
	if wal != nil && (err != nil || isNew && wal.Size() > 0) {
		return nil, false, fmt.Errorf("there is no database, but %q is the write-ahead log of one and may hold animals; "+
			"put that database back, or delete the log to start with an empty one", walPath(path))
	}
	return file, isNew, nil
}

// openStore opens the database at path, which is absolute. If the file is missing or empty (isNew), it creates the database.
func openStore(path string) (s *store, isNew bool, err error) {
	file, isNew, err := checkPlace(path)
	if err != nil {
		return nil, false, err
	}
	readers := max(4, runtime.GOMAXPROCS(0))
	s = &store{
		path:      path,
		file:      file,
		readers:   openPool(path, "ro", readers),
		readSlots: make(chan struct{}, readers),
		writer:    openPool(path, "rwc", 1, "synchronous(FULL)", "fullfsync(ON)", fmt.Sprintf("journal_size_limit(%d)", maxIdleWAL)),
		watcher:   openPool(path, "rw", 1, "busy_timeout(0)", "fullfsync(ON)"),
		closing:   make(chan struct{}),
	}
	probe := openPool(path, "rw", 1, openDamaged)
	defer probe.Close()
	err = s.open()
	if err == nil || sqliteCode(err) != 0 { // an error of SQLite that a deleted log may explain
		err = cmp.Or(checkLog(probe, path), err)
	}
	if err == nil {
		// A process that was killed may have left commits that are not on disk yet. SQLite recovers them without a sync, and a
		// response to a repeated request must not acknowledge them before. The checkpoint then empties the log, if it can.
		err = cmp.Or(syncPath(s.walPath), syncPath(filepath.Dir(s.walPath)))
		s.emptyWAL()
	}
	if err != nil {
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
	if err == nil && s.file == nil {
		s.file, err = os.Stat(s.path) // checkDatabase has created it
	}
	if err != nil {
		return err
	}
	s.walPath = walPath(s.path)
	s.wal, _ = os.Stat(s.walPath)                                            // before Exec, which may wait for a lock
	statements := "PRAGMA journal_mode = WAL; DELETE FROM pets WHERE id = 0" // a write of nothing: fails if read-only or locked
	if version < schemaVersion {
		statements = schema
	}
	if _, err := s.writer.Exec(statements); err != nil {
		return err
	}
	if s.wal == nil {
		s.wal, _ = os.Stat(walPath(s.path))
	}
	if !isFile(s.path, s.file) || !isFile(walPath(s.path), s.wal) {
		if _, err := os.Stat(s.path); err == nil { // otherwise the log still shows that a database is missing
			s.setWALAside()
		}
		return errors.New("the database or its write-ahead log was moved, deleted or replaced during the start; start again")
	}
	return cmp.Or(s.prepare(), openAll(s.readers), openAll(s.watcher))
}

// prepare prepares the statements.
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
	s.insertIdempotencyKey = on(s.writer, `REPLACE INTO idempotency_keys (caller, key, created, id, name, category_id, status)
		VALUES (?, ?, ?, ?, ?, ?, ?)`)
	s.deleteStaleIdempotencyKeys = on(s.writer, `DELETE FROM idempotency_keys WHERE (caller, key) IN
		(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT ?)`)
	return err
}

// close waits for a transaction in progress and closes the database. If its files are no longer in their place, close keeps what
// they hold, and returns an error that says where. The store must not be used afterwards.
func (s *store) close() error {
	s.closing <- struct{}{} // waits for watch
	s.writing.Lock()        // for good: nothing may be written any more
	s.readers.Close()       // before the writer: the last connection removes the write-ahead log, if it may write
	err := s.checkWAL()
	inPlace := isFile(s.path, s.file)
	if err == nil && inPlace {
		return errors.Join(s.watcher.Close(), s.writer.Close())
	}
	// From here on the writer stays open: closing it would use the log once more, and delete whatever is in its place.
	if s.walReplaced || inPlace && s.emptyWAL() == nil {
		return err
	}
	return s.save()
}

// save writes all that the database holds, which is still open, to a verified copy: at path if no file is there, or else at
// path.saved, where it makes the next start refuse until the operator has chosen. It returns an error that names the copy.
func (s *store) save() error {
	os.MkdirAll(filepath.Dir(s.path), 0o700)
	saved, err := "", errors.New("no name is free")
	for _, suffix := range savedSuffixes {
		if checkFree(s.path+suffix) != nil {
			continue // another service may have saved its copy
		}
		// The empty file makes the next start refuse even if there will be no copy.
		if f, failed := os.OpenFile(s.path+suffix, os.O_CREATE|os.O_EXCL, 0o600); failed == nil {
			f.Close()
			saved = s.path + suffix
			err = copyTo(context.Background(), s.watcher, saved, true)
			break
		}
	}
	const moved = "the database or its write-ahead log was moved, deleted or replaced while the service ran"
	if err != nil && !errors.Is(err, errDamaged) {
		return fmt.Errorf("%s, and no copy could be saved: %w; put its files back, as %q and %q, and delete the empty copy", moved, err, s.path, walPath(s.path))
	}
	os.Chmod(saved, s.file.Mode())
	s.setWALAside()
	if os.Link(saved, s.path) == nil { // unlike Rename, it replaces nothing
		syncPath(filepath.Dir(s.path))
		os.Remove(saved)
		saved = s.path
	}
	if err != nil {
		return fmt.Errorf("%s; what it held was saved in %q, but %w", moved, saved, err)
	}
	return fmt.Errorf("%s; what it held was saved in %q", moved, saved)
}

// setWALAside renames the write-ahead log of a database that is no longer at path, and removes its index: SQLite would apply
// the log to the next database at path, and other programs may still write to it.
func (s *store) setWALAside() {
	for _, wal := range []string{walPath(s.path), s.walPath} { // which differ if path is a link
		if isFile(wal, s.wal) && !isFile(s.path, s.file) {
			os.Rename(wal, wal+".old")
			os.Remove(strings.TrimSuffix(wal, "wal") + "shm")
		}
	}
}

// list returns a page of animals, by ascending id, and whether more follow. It takes no context: the query is bounded, and
// database/sql discards the connection of a cancelled query.
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
	columns := row.columns()
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, false, err
		}
		pets = append(pets, row)
	}
	more = len(pets) > f.limit
	return pets[:min(len(pets), f.limit)], more, dbError(rows.Err())
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
		time.AfterFunc(time.Second, func() { os.Exit(2) }) // nobody may be reading the log
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
	if inserted, _ := result.RowsAffected(); inserted == 0 { // this driver returns no error, here and for LastInsertId
		c.err = errors.New("a trigger left the animal out, with RAISE(IGNORE)")
		return nil
	}
	id, _ := result.LastInsertId()
	c.stored = pet{id, c.newPet}
	if c.idempotencyKey != "" {
		_, err = s.insertIdempotencyKey.Exec(c.caller[:], c.idempotencyKey, now, id, c.Name, c.CategoryID, c.Status)
	}
	return err
}

// inPlace returns errUnavailable unless the database that was opened is still at path, with its log beside it. SQLite would
// go on writing to both wherever they are, even if they were deleted.
func (s *store) inPlace() error {
	if !isFile(s.path, s.file) {
		return fmt.Errorf("%w: %q was moved, deleted or replaced; put it back, or make sure of disk space and restart the service, which saves what it holds in a copy",
			errUnavailable, s.path)
	}
	if problem := s.walProblem.Load(); problem != nil {
		return fmt.Errorf("%w: %w", errUnavailable, *problem)
	}
	return nil
}

// checkWAL notes whether the write-ahead log is where the next process looks for it, beside the database. If not, checkWAL copies
// what the log holds, which is still open, to the database, and returns an error if that is in its place. It copies nothing once
// another program has begun a new log: all programs share one index of the log, which then describes the new one. Calls must not
// overlap.
func (s *store) checkWAL() error {
	path := walPath(s.path)
	wal, err := os.Stat(path)
	inPlace := isFile(s.path, s.file)
	gone := inPlace && (err != nil || !os.SameFile(wal, s.wal))
	s.walReplaced = s.walReplaced || gone && err == nil && wal.Size() > 0
	if !inPlace && !s.walReplaced {
		s.emptied = s.emptied || s.emptyWAL() == nil // at once: another program could apply the log to a file that is now at path
		return nil
	}
	s.emptied = false
	if !gone && !s.walReplaced {
		s.walProblem.Store(nil)
		return nil
	}
	problem := fmt.Errorf("%q was moved or deleted", path)
	s.walProblem.Store(&problem) // first: creations must not begin to fill the log again
	const restart = "end all other programs that use the database, and restart the service"
	if s.walReplaced {
		err = fmt.Errorf("%q was replaced, perhaps by another program; any animals that were only in the old one are lost; %s", path, restart)
	} else if err = s.emptyWAL(); err != nil {
		err = fmt.Errorf("%w, and the animals in it could not be saved yet: %w; do not restart the service before they are", problem, err)
	} else {
		err = fmt.Errorf("%w; the animals in it were saved in the database; %s", problem, restart)
	}
	s.walProblem.Store(&err)
	return err
}

// checkLog returns an error if another program still uses a write-ahead log that was deleted. What others then write to the new
// log at its path, which lacks a header, is lost, but the index that all share hides that.
func checkLog(db *sql.DB, path string) error {
	for range 20 { // another program may be emptying the log between the two looks
		var busy, frames, copied int
		db.QueryRow("PRAGMA wal_checkpoint(NOOP)").Scan(&busy, &frames, &copied) // an error, as after damage, leaves frames 0
		header := make([]byte, 2)
		if f, err := os.Open(walPath(path)); err == nil {
			f.Read(header)
			f.Close()
		}
		if frames <= 0 || bytes.Equal(header, []byte{0x37, 0x7f}) { // see sqlite.org/fileformat2.html
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("another program uses the database with a write-ahead log that was deleted; end all programs that use the database, and try again")
}

// emptyWAL moves all that the write-ahead log holds to the database. It waits for no lock: another program that holds one could
// begin a new log meanwhile.
func (s *store) emptyWAL() error {
	var busy, frames, copied int
	err := s.watcher.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &copied)
	if busy > 0 {
		err = errors.New("another program is using it")
	}
	return err
}

// walPath returns where SQLite looks for the write-ahead log of the database at path: beside the file that a link leads to.
func walPath(path string) string {
	target, _ := filepath.EvalSymlinks(path)
	return cmp.Or(target, path) + "-wal"
}

// isFile reports whether the file at path is the given one.
func isFile(path string, file os.FileInfo) bool {
	now, err := os.Stat(path)
	return err == nil && os.SameFile(file, now)
}

// syncPath makes the file at path durable, or the names in the folder at path. (Windows cannot do that to a file opened to read.)
func syncPath(path string) error {
	f, err := os.Open(path)
	if err == nil && runtime.GOOS != "windows" {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// watch looks for commits of other programs, and whether the write-ahead log is in its place, until the store is closed. (A look
// at the log before each commit would slow a lone create: the kernel then gives the log a new time with the next write.)
func (s *store) watch() {
	ticks, last := time.Tick(watchInterval), int64(-1)
	for {
		var seen int64
		err := s.watcher.QueryRow("PRAGMA data_version").Scan(&seen)
		if err != nil || seen != last { // it also differs after commits of this process
			s.changes.Add(1)
		}
		last = seen
		s.checkWAL()
		select {
		case <-ticks:
		case <-s.closing:
			return
		}
	}
}

// copyTo writes a consistent copy of a database to the file target, which does not exist or is empty. The copy gets that name once
// it is verified and on disk; after an error, nothing of it is left. If damagedToo, a copy that is damaged is kept, too, and the
// error is errDamaged.
func copyTo(ctx context.Context, db *sql.DB, target string, damagedToo bool) error {
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
	var damage error
	if err == nil && result != "ok" {
		damage = fmt.Errorf("%w: %s", errDamaged, result)
	}
	err = errors.Join(err, written.Close(), temp.Sync(), temp.Close())
	if err != nil || damage != nil && !damagedToo {
		return cmp.Or(err, damage)
	}
	if err := os.Rename(temp.Name(), target); err != nil {
		return err
	}
	return cmp.Or(damage, syncPath(filepath.Dir(target))) // or a loss of power could take the name away
}

var errDamaged = errors.New("the copy is damaged, and perhaps the database")

// openDamaged is a pragma that lets SQLite open a database whose schema is damaged, or whose end is missing.
const openDamaged = "writable_schema(ON)"

// openPool returns a pool of up to size connections to the database in file, at its location. None is open yet.
func openPool(file, mode string, size int, pragmas ...string) *sql.DB {
	db, _ := sql.Open("sqlite", location(file, mode, pragmas...)) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// location returns the URI of the database in file, whose path is absolute, with SQLite's mode ro, rw or rwc. Each connection
// gets the busy timeout, and then the given pragmas.
func location(file, mode string, pragmas ...string) string {
	query := url.Values{"mode": {mode}, "_busy_timeout": {fmt.Sprint(busyTimeout.Milliseconds())}, "_pragma": pragmas, "_error_rc": {"1"}}
	path := "/" + strings.TrimPrefix(filepath.ToSlash(file), "/") // on Windows: /C:/...
	return (&url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}).String()
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

var errForeign = fmt.Errorf("not a database of this service: its application_id is not %d", applicationID)

// checkDatabase returns the schema version of a database, 0 if it is empty. It refuses that of another program or of a newer version.
func checkDatabase(db *sql.DB) (version int, err error) {
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
