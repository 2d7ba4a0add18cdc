package main

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
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

	// watchInterval is the time between two looks for commits of other programs.
	watchInterval = 250 * time.Millisecond

	// idempotencyKeyLifetime is how long an Idempotency-Key is remembered.
	idempotencyKeyLifetime = 24 * time.Hour

	// applicationID is the PRAGMA application_id of this service's databases: "Pets" in ASCII.
	applicationID = 0x50657473
)

// newPet is the API's NewPet, with its status filled in.
type newPet struct {
	Name       string `json:"name"`
	CategoryID int64  `json:"categoryId"`
	Status     string `json:"status"`
}

// pet is the API's Pet: a newPet that has been stored, and so has an id.
type pet struct {
	ID int64 `json:"id"`
	newPet
}

// filter selects the pets to list.
type filter struct {
	limit  int
	status string // "" for any
	after  int64  // list only greater ids
}

// caller identifies a client by the SHA-256 sum of its API key. The key itself is not kept. Each
// caller has its own Idempotency-Keys. The zero caller is nobody.
type caller [sha256.Size]byte

// migrations[v] takes a database from schema version v to version v+1. The version is PRAGMA
// user_version, which is 0 in a new database.
//
// To change the schema, append to this list. Never edit what was released: databases that went
// through it stay as they are.
var migrations = []string{
	fmt.Sprintf(`PRAGMA application_id = %d;

	-- AUTOINCREMENT: no id is used twice. The CHECKs also hold for edits by other programs.
	-- They do not use IN, for which SQLite would build a b-tree at each insert.
	CREATE TABLE pets (
		id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0),
		name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
		category_id INTEGER NOT NULL,
		status TEXT NOT NULL DEFAULT 'available'
			CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
	) STRICT;
	CREATE INDEX pets_by_status ON pets (status, id, name, category_id); -- a covering index

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
	CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created);`, applicationID),
}

// store keeps the pets in an SQLite database in WAL mode: a commit appends to a write-ahead log
// (WAL), the file with the suffix -wal, and a checkpoint copies that to the database later. See
// https://sqlite.org/wal.html.
//
// All methods but close may be called concurrently.
type store struct {
	path string
	info os.FileInfo // of the database when it was opened, for checkPlace

	// While generation stays the same, responses that were read in it are true. It grows after each
	// commit: before create returns for those of this process, and within watchInterval for those of
	// other programs. It may also grow without a commit, which costs the cache a few reads.
	generation atomic.Int64
	watcher    *sql.DB        // one connection, for watch
	closing    chan struct{}  // closed by close, to end watch
	watching   sync.WaitGroup // the goroutine of watch

	// Pets are read on a pool of connections. slots is a semaphore with a slot for each connection:
	// it serves waiting requests in their order. The pool itself serves them at random, so that a
	// few of many would wait very long.
	readers            *sql.DB
	slots              chan struct{}
	selectPet          *sql.Stmt
	selectPage         *sql.Stmt
	selectPageByStatus *sql.Stmt

	// Pets are created on one connection, in batches. writing is held while a batch is written.
	writing               sync.Mutex
	writer                *sql.DB
	insertPet             *sql.Stmt
	selectIdempotencyKey  *sql.Stmt
	insertIdempotencyKey  *sql.Stmt
	deleteIdempotencyKeys *sql.Stmt

	// nextMu guards next, the batch that creations can join, or nil. A batch whose transaction has
	// begun is no longer next, and so does not grow. nextMu may be taken while writing is held.
	nextMu sync.Mutex
	next   *batch
}

// openStore opens the database at path, which is absolute. If there is none, it creates one, and
// logs a warning.
func openStore(path string, logger *slog.Logger) (*store, error) {
	if err := refuseOrphanedWAL(path); err != nil {
		return nil, err
	}

	size := max(4, runtime.GOMAXPROCS(0))
	s := &store{
		path:    path,
		watcher: openPool(path, "ro", 1),
		closing: make(chan struct{}),
		readers: openPool(path, "ro", size),
		slots:   make(chan struct{}, size),
		writer:  openPool(path, "rwc", 1),
	}
	isNew, err := s.openDatabase()
	if err != nil {
		s.closeAll()
		return nil, explain(err)
	}
	if isNew {
		logger.Warn("the database is new and empty", "database", path)
	}

	s.watching.Go(s.watch)
	return s, nil
}

// openDatabase brings the database up to date, prepares the statements and opens the connections.
func (s *store) openDatabase() (isNew bool, err error) {
	isNew, err = migrate(s.writer, migrations)
	if err != nil {
		return false, err
	}
	if _, err := s.writer.Exec("PRAGMA journal_mode = WAL"); err != nil {
		return false, err
	}

	// A killed process may have left commits in the WAL that are not on disk yet. A repeated
	// request must not acknowledge them before they are. A full disk is no reason to refuse the
	// start: lists work.
	_, err = s.writer.Exec("PRAGMA wal_checkpoint")
	if err != nil && sqliteCode(err) != sqlite3.SQLITE_FULL {
		return false, err
	}

	s.info, err = os.Stat(s.path)
	if err != nil {
		return false, err
	}
	if err := s.prepareStatements(); err != nil {
		return false, err
	}
	return isNew, s.openReaders()
}

// prepareStatements prepares all statements, and returns the first error.
func (s *store) prepareStatements() (err error) {
	prepare := func(db *sql.DB, query string) *sql.Stmt {
		if err != nil {
			return nil
		}
		var statement *sql.Stmt
		statement, err = db.Prepare(query)
		return statement
	}

	s.selectPet = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE id = ?`)
	s.selectPage = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE id > ? ORDER BY id LIMIT ?`)
	s.selectPageByStatus = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE status = ? AND id > ? ORDER BY id LIMIT ?`)

	s.insertPet = prepare(s.writer, `INSERT INTO pets (name, category_id, status)
		VALUES (?, ?, ?)`)
	s.selectIdempotencyKey = prepare(s.writer, `SELECT id, name, category_id, status
		FROM idempotency_keys WHERE caller = ? AND key = ? AND created >= ?`)

	// REPLACE: an expired row with the same caller and key may still be there.
	s.insertIdempotencyKey = prepare(s.writer, `REPLACE INTO idempotency_keys
		(caller, key, created, id, name, category_id, status) VALUES (?, ?, ?, ?, ?, ?, ?)`)
	s.deleteIdempotencyKeys = prepare(s.writer, `DELETE FROM idempotency_keys
		WHERE (caller, key) IN (SELECT caller, key FROM idempotency_keys
			WHERE created < ? ORDER BY created LIMIT ?)`)
	return err
}

// openReaders opens all connections of the readers. Lists should go on when the database is moved,
// and a connection that is opened then would not find it.
func (s *store) openReaders() error {
	for range cap(s.slots) {
		rows, err := s.selectPage.Query(0, 1)
		if err != nil {
			return err
		}
		defer rows.Close() // gives the connection back when all are open
	}
	return nil
}

// close waits for the batch that is being written, and closes the store. It returns an error if the
// database is not in its place. Call close only once.
func (s *store) close() error {
	close(s.closing)
	s.watching.Wait()
	s.writing.Lock()
	defer s.writing.Unlock()

	// The last connection to be closed copies the WAL into the database and deletes it, but not if
	// the database was moved: the WAL stays, and would damage another database at the path. So copy
	// it into the database that is open, wherever that is, and empty it.
	if err := s.checkPlace(); err != nil {
		_, checkpointErr := s.writer.Exec("PRAGMA wal_checkpoint(TRUNCATE)")
		return errors.Join(err, checkpointErr, s.closeAll())
	}
	return s.closeAll()
}

// closeAll closes all connections. The writer's comes last, because the others may not write, and
// so would leave the WAL behind.
func (s *store) closeAll() error {
	return errors.Join(s.watcher.Close(), s.readers.Close(), s.writer.Close())
}

// watch looks for commits of other programs every watchInterval, until the store is closed.
func (s *store) watch() {
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

// checkHealth returns errUnavailable, wrapped, if the database is not in its place, or cannot be
// read.
func (s *store) checkHealth() error {
	if err := s.checkPlace(); err != nil {
		return unavailable(err)
	}
	if _, _, err := s.list(filter{limit: 1}); err != nil {
		return unavailable(err)
	}
	return nil
}

// checkPlace returns an error if the file at the path is not the database that was opened. SQLite
// would go on with that, wherever it is, and the next process would not find what it stores there.
func (s *store) checkPlace() error {
	info, err := os.Stat(s.path)
	if err == nil && !os.SameFile(info, s.info) {
		err = fmt.Errorf("%q is another file", s.path)
	}
	if err != nil {
		return fmt.Errorf("the database is not in its place: %w", err)
	}
	return nil
}

// list returns a page of pets, by ascending id, and whether more follow.
//
// Reads have no context: an index and a LIMIT keep them short, and database/sql would start a
// goroutine for each that can be cancelled.
func (s *store) list(f filter) (pets []pet, more bool, err error) {
	statement, args := s.selectPage, []any{f.after, f.limit + 1}
	if f.status != "" {
		statement, args = s.selectPageByStatus, []any{f.status, f.after, f.limit + 1}
	}

	s.slots <- struct{}{}
	defer func() { <-s.slots }()
	defer exitOnPanic()

	rows, err := statement.Query(args...)
	if err != nil {
		return nil, false, wrapTransient(err)
	}

	pets = make([]pet, 0, f.limit+1)
	var p pet
	columns := []any{&p.ID, &p.Name, &p.CategoryID, &p.Status}
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			rows.Close() // not deferred: see exitOnPanic
			return nil, false, err
		}
		pets = append(pets, p)
	}
	if err := rows.Err(); err != nil { // Next has closed the rows
		return nil, false, wrapTransient(err)
	}

	more = len(pets) > f.limit
	return pets[:min(len(pets), f.limit)], more, nil
}

// get returns the pet with this id, or errNotFound.
func (s *store) get(id int64) (p pet, err error) {
	s.slots <- struct{}{}
	defer func() { <-s.slots }()
	defer exitOnPanic()

	err = s.selectPet.QueryRow(id).Scan(&p.ID, &p.Name, &p.CategoryID, &p.Status)
	if errors.Is(err, sql.ErrNoRows) {
		return pet{}, errNotFound
	}
	return p, wrapTransient(err)
}

// batch is a set of creations that share one transaction, and so one wait for the disk (group
// commit; BenchmarkCreates shows what that gains).
//
// The goroutine of the first creation writes the batch. Others can join it until its transaction
// has begun.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
	err       error         // of the whole batch, such as a full disk
}

// creation is a pet waiting to be stored, and then the result.
type creation struct {
	newPet
	caller         caller
	idempotencyKey string // "" for none

	stored   pet
	replayed bool  // stored is from the first response to idempotencyKey
	err      error // of this creation alone
}

// create stores p and returns it, with its id, once it is on disk.
//
// If who has already used idempotencyKey ("" for none) within idempotencyKeyLifetime, it stores
// nothing, and returns the first result with replayed set, or errIdempotencyKeyReused if p differs.
//
// After errIdempotencyKeyReused or errUnavailable p is not stored. After another error it may be.
//
// There is no context: a client that disconnects must not break the commit that it shares with
// others.
func (s *store) create(who caller, idempotencyKey string, p newPet) (
	stored pet, replayed bool, err error,
) {
	cr := &creation{newPet: p, caller: who, idempotencyKey: idempotencyKey}
	b, first := s.join(cr)
	if first {
		s.write(b)
	}
	<-b.done

	if b.err != nil {
		return pet{}, false, b.err
	}
	return cr.stored, cr.replayed, cr.err
}

// join adds cr to the next batch. The first creation of a batch must write it.
func (s *store) join(cr *creation) (b *batch, first bool) {
	s.nextMu.Lock()
	defer s.nextMu.Unlock()

	if s.next == nil {
		s.next = &batch{done: make(chan struct{})}
		first = true
	}
	s.next.creations = append(s.next.creations, cr)
	return s.next, first
}

// endJoining ends the batch that creations can join: the next creation begins a new one.
func (s *store) endJoining() {
	s.nextMu.Lock()
	defer s.nextMu.Unlock()
	s.next = nil
}

// write stores b, sets its results and closes b.done.
func (s *store) write(b *batch) {
	defer exitOnPanic()

	s.writing.Lock() // meanwhile, creations join b
	b.err = s.transact(b)

	// Before Unlock, so that the clients that this wakes up can join the next batch.
	close(b.done)
	s.writing.Unlock()
}

// transact stores b in a transaction.
func (s *store) transact(b *batch) error {
	tx, err := s.writer.Begin()
	s.endJoining() // not before: Begin may wait for another program, and creations join meanwhile
	if err != nil {
		return unavailable(err) // whatever it is, nothing is stored
	}

	if err := s.insertAll(tx, b); err != nil {
		tx.Rollback() // not deferred: see exitOnPanic
		return wrapTransient(err)
	}

	err = tx.Commit()   // if it fails, the driver rolls back
	s.generation.Add(1) // even after an error: the pets may be on disk
	return wrapTransient(err)
}

// insertAll stores the pets of b in tx.
func (s *store) insertAll(tx *sql.Tx, b *batch) error {
	if err := s.checkPlace(); err != nil {
		return unavailable(err)
	}

	now := time.Now()
	insertPet := tx.Stmt(s.insertPet) // once for the batch, because it costs a few percent of a create
	idempotencyKeys := 0
	for _, cr := range b.creations {
		if err := s.insert(tx, insertPet, cr, now); err != nil {
			return err
		}
		if cr.idempotencyKey != "" {
			idempotencyKeys++
		}
	}
	if idempotencyKeys == 0 {
		return nil
	}

	// Two expired Idempotency-Keys go for each one that comes, so that they cannot pile up.
	oldest := now.Add(-idempotencyKeyLifetime).Unix()
	_, err := tx.Stmt(s.deleteIdempotencyKeys).Exec(oldest, 2*idempotencyKeys)
	return err
}

// insert stores cr in tx, or finds the first response to its Idempotency-Key. An error fails the
// whole batch. What is wrong with cr alone is left in cr.err.
func (s *store) insert(tx *sql.Tx, insertPet *sql.Stmt, cr *creation, now time.Time) error {
	if cr.idempotencyKey != "" {
		found, err := s.replay(tx, cr, now)
		if found || err != nil {
			return err
		}
	}

	result, err := insertPet.Exec(cr.Name, cr.CategoryID, cr.Status)
	if err != nil {
		return err
	}
	// A trigger can leave the pet out without an error. The last id is then of another one.
	if inserted, _ := result.RowsAffected(); inserted == 0 {
		cr.err = errors.New("a trigger in the database left the animal out")
		return nil
	}
	id, _ := result.LastInsertId()
	cr.stored = pet{ID: id, newPet: cr.newPet}

	if cr.idempotencyKey == "" {
		return nil
	}
	_, err = tx.Stmt(s.insertIdempotencyKey).Exec(cr.caller[:], cr.idempotencyKey, now.Unix(),
		id, cr.Name, cr.CategoryID, cr.Status)
	return err
}

// replay looks for the first response to the Idempotency-Key of cr. If it is found, cr has its
// result.
func (s *store) replay(tx *sql.Tx, cr *creation, now time.Time) (found bool, err error) {
	p := &cr.stored
	oldest := now.Add(-idempotencyKeyLifetime).Unix()
	err = tx.Stmt(s.selectIdempotencyKey).QueryRow(cr.caller[:], cr.idempotencyKey, oldest).
		Scan(&p.ID, &p.Name, &p.CategoryID, &p.Status)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}

	cr.replayed = true
	if p.newPet != cr.newPet {
		cr.err = errIdempotencyKeyReused
	}
	return true, nil
}

// backup writes a copy of the database at path, which may be in use, to the new file target. The
// copy gets that name once it is verified and on disk.
func backup(ctx context.Context, path, target string) error {
	if err := refuseOrphanedWAL(path); err != nil {
		return err
	}
	target, err := filepath.Abs(target)
	if err != nil {
		return err
	}
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

	if err := copyDatabase(ctx, path, temp.Name()); err != nil {
		return explain(err)
	}
	if err := verify(ctx, temp.Name()); err != nil {
		return explain(err)
	}

	if err := errors.Join(temp.Sync(), temp.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp.Name(), target); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(target))
}

// copyDatabase writes a copy of the database at path to the empty file target.
func copyDatabase(ctx context.Context, path, target string) error {
	db := openPool(path, "rw", 1)
	defer db.Close()

	_, err := db.ExecContext(ctx, "VACUUM INTO ?", target)
	return err
}

// verify returns an error if the database at path is empty, damaged, or not one of this version of
// the service or of an earlier one.
func verify(ctx context.Context, path string) error {
	db := openPool(path, "rw", 1) // with "ro", SQLite would not verify the CHECKs
	defer db.Close()

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	err = verifyContent(tx)
	tx.Rollback()
	return err
}

// verifyContent does what verify says.
func verifyContent(tx *sql.Tx) error {
	version, err := readSchemaVersion(tx, len(migrations))
	if err != nil {
		return err
	}
	if version == 0 {
		return errors.New("the database is empty")
	}

	var result string
	if err := tx.QueryRow("PRAGMA integrity_check(1)").Scan(&result); err != nil {
		return err
	}
	if result != "ok" {
		return errors.New("the database is damaged: " + result)
	}
	return nil
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

// migrate brings the schema of db, a pool of one connection, up to date, in one transaction. It
// reports whether the database is new.
//
// It changes nothing, and returns an error, if the database is not one of this service, was
// written by a newer version, or cannot be written.
func migrate(db *sql.DB, migrations []string) (isNew bool, err error) {
	tx, err := db.Begin()
	if err != nil {
		return false, err
	}

	oldVersion, err := runMigrations(tx, migrations)
	if err != nil {
		tx.Rollback() // not deferred: see exitOnPanic
		return false, err
	}
	return oldVersion == 0, tx.Commit()
}

// runMigrations runs those of the migrations that the database has not had yet. It returns the
// version before.
func runMigrations(tx *sql.Tx, migrations []string) (oldVersion int, err error) {
	oldVersion, err = readSchemaVersion(tx, len(migrations))
	if err != nil {
		return 0, err
	}

	for version := oldVersion; version < len(migrations); version++ {
		if _, err := tx.Exec(migrations[version]); err != nil {
			return 0, err
		}
		if _, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
			return 0, err
		}
	}

	return oldVersion, checkWritable(tx)
}

// checkWritable returns an error if the database cannot be written. SQLite opens such a file, to
// read it, and even BEGIN IMMEDIATE succeeds.
func checkWritable(tx *sql.Tx) error {
	// There is no such pet, so this needs no space on a full disk, where lists should work.
	_, err := tx.Exec("DELETE FROM pets WHERE id = 0")
	return err
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
		return 0, errors.New("a newer version of this service has written it; run that version")
	}
	return version, nil
}

// refuseOrphanedWAL returns an error if there is a WAL for the database at path, but no database.
// SQLite would take that for a new database, and delete the WAL.
func refuseOrphanedWAL(path string) error {
	walExists := fileSize(path+"-wal") > 0   // first: another process may be creating the database
	databaseIsMissing := fileSize(path) <= 1 // SQLite takes a file of one byte for an empty one
	if walExists && databaseIsMissing {
		return fmt.Errorf("there is no database, but %q is the write-ahead log of one; "+
			"put that database back, or move the log away to start with an empty database", path+"-wal")
	}
	return nil
}

// fileSize returns the size of a file in bytes, or 0 if that cannot be found out.
func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// openPool returns a pool of up to size connections to the database at path, which is absolute.
// mode is SQLite's: ro, rw or rwc. None is open yet.
//
// The parameters with an underscore are described at https://pkg.go.dev/modernc.org/sqlite#Driver.Open.
func openPool(path, mode string, size int) *sql.DB {
	query := url.Values{
		"mode":      {mode},
		"_txlock":   {"immediate"},
		"_error_rc": {"1"}, // or an error could quote the message of another one
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()),
			"synchronous(FULL)",
			"fullfsync(ON)", // on macOS, fsync leaves data in the cache of the disk
			"checkpoint_fullfsync(ON)",
			"journal_size_limit(64000000)", // bytes, to which the WAL is cut after a burst
		},
	}
	path = "/" + strings.TrimPrefix(filepath.ToSlash(path), "/") // on Windows: /C:/...
	location := url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}

	db, _ := sql.Open("sqlite", location.String()) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// exitOnPanic, deferred, ends the program after a panic in the store, with the stack and status 2.
//
// A panic in a handler is recovered, and becomes a 500 for that request alone (see callHandler). A
// panic in database/sql or below leaves its locks held, a connection in use, or a transaction open.
// The program must not go on with that, but be started again. For the same reason, requests do not
// defer tx.Rollback and rows.Close: after a panic these would wait for such a lock, and the program
// would not end.
func exitOnPanic() {
	if p := recover(); p != nil {
		fmt.Fprintf(os.Stderr, "panic: %v\n%s", p, debug.Stack())
		os.Exit(2)
	}
}

// unavailable returns errUnavailable, with err as the cause for the log.
func unavailable(err error) error {
	return fmt.Errorf("%w: %w", errUnavailable, err)
}

// wrapTransient wraps an error of SQLite in errUnavailable if its cause may pass and nothing is
// stored: another program holds a lock, or the disk is full. It returns all others as they are.
func wrapTransient(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL:
		return unavailable(err)
	}
	return err
}

// explain adds to an error of SQLite what the operator can do.
func explain(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		return fmt.Errorf("%w: it must be a file in an existing folder, and both must be writable", err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: it is damaged: put a backup in its place", err)
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
