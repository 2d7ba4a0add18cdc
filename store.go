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

	// watchInterval is the time between two looks for commits of other programs.
	watchInterval = 250 * time.Millisecond

	// idempotencyKeyLifetime is how long an Idempotency-Key is remembered.
	idempotencyKeyLifetime = 24 * time.Hour

	// applicationID is the PRAGMA application_id of this service's databases: "Pets" in ASCII.
	applicationID = 0x50657473
)

// The errors of the store that clients see, too. They may be wrapped, with a cause for the log.
var (
	errNotFound             = errors.New("there is no animal with this id")
	errIdempotencyKeyReused = errors.New("this Idempotency-Key was used for another animal")

	// errRefused means that the operator has added a constraint or a trigger to the database, which
	// the pet breaks.
	errRefused = errors.New("a rule in the database of the shop refuses this animal")

	// errUnavailable means that the cause may pass. For a create, it also means that nothing was
	// stored.
	errUnavailable = errors.New("the database is temporarily unavailable")
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
	limit  int    // the most pets on a page
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

// store keeps the pets in an SQLite database in WAL mode: a commit appends to a write-ahead log
// (WAL), the file with the suffix -wal, and a checkpoint copies that to the database later. See
// https://sqlite.org/wal.html.
//
// create, list, get and checkHealth may be called concurrently.
type store struct {
	path   string
	info   os.FileInfo // of the database when it was opened, for checkPath
	logger *slog.Logger

	// While generation stays the same, responses that were read in it are true, except that
	// commits of other programs may be noticed only after watchInterval. It grows after each
	// commit, before create returns. It may also grow without a commit, which costs the cache a
	// few reads.
	generation atomic.Int64
	watcher    *sql.DB        // one connection, for watch
	closing    chan struct{}  // closed by close, to end watch
	watching   sync.WaitGroup // the goroutine of watch

	// Pets are read on a pool of connections. readSlots is a semaphore with a slot for each of
	// them, which serves waiting requests in their order. The pool itself serves them at random,
	// so that a few of many would wait very long.
	readers            *sql.DB
	readSlots          chan struct{}
	selectPage         *sql.Stmt
	selectPageByStatus *sql.Stmt

	// Pets are created on one connection, in batches. writing is held while a batch is stored.
	writing              sync.Mutex
	writer               *sql.DB
	insertPet            *sql.Stmt
	selectIdempotencyKey *sql.Stmt
	insertIdempotencyKey *sql.Stmt
	deleteExpiredKeys    *sql.Stmt

	// gatheringMu guards gathering, the batch that creations join. Once a batch is being stored,
	// it is no longer this one, and so does not grow.
	gatheringMu sync.Mutex
	gathering   *batch
}

// openStore opens the database at path, which is absolute. If there is none, it creates one, and
// logs a warning.
func openStore(path string, logger *slog.Logger) (*store, error) {
	if err := refuseOrphanedWAL(path); err != nil {
		return nil, err
	}
	if err := syncWAL(path); err != nil {
		return nil, err
	}

	size := max(4, runtime.GOMAXPROCS(0))
	s := &store{
		path:      path,
		logger:    logger,
		watcher:   openPool(path, "ro", 1),
		closing:   make(chan struct{}),
		readers:   openPool(path, "ro", size),
		readSlots: make(chan struct{}, size),
		writer:    openPool(path, "rwc", 1),
		gathering: newBatch(),
	}
	isNew, err := s.openDatabase()
	if err != nil {
		s.closeAll()
		return nil, withAdvice(err)
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
	var mode string
	err = s.writer.QueryRow("PRAGMA journal_mode = WAL").Scan(&mode)
	if err != nil {
		return false, err
	}
	if mode != "wal" {
		return false, errors.New("SQLite cannot use a write-ahead log here")
	}

	// Start with a short WAL. A full disk is no reason to refuse the start: lists work.
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

// prepareStatements prepares all statements. It returns the error of the first that fails.
func (s *store) prepareStatements() error {
	var errs []error
	prepare := func(db *sql.DB, query string) *sql.Stmt {
		statement, err := db.Prepare(query)
		errs = append(errs, err)
		return statement
	}

	s.selectPage = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE id > ? ORDER BY id LIMIT ?`)
	s.selectPageByStatus = prepare(s.readers, `SELECT id, name, category_id, status FROM pets
		WHERE status = ? AND id > ? ORDER BY id LIMIT ?`)

	s.insertPet = prepare(s.writer, `INSERT INTO pets (name, category_id, status)
		VALUES (?, ?, ?)`)
	s.selectIdempotencyKey = prepare(s.writer, `SELECT id, name, category_id, status
		FROM idempotency_keys WHERE caller = ? AND key = ? AND created >= ?`)

	// An expired row with the same caller and key may still be there.
	s.insertIdempotencyKey = prepare(s.writer, `INSERT INTO idempotency_keys
		(caller, key, created, id, name, category_id, status) VALUES (?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (caller, key) DO UPDATE SET created = excluded.created, id = excluded.id,
			name = excluded.name, category_id = excluded.category_id, status = excluded.status`)
	s.deleteExpiredKeys = prepare(s.writer, `DELETE FROM idempotency_keys
		WHERE (caller, key) IN (SELECT caller, key FROM idempotency_keys
			WHERE created < ? ORDER BY created LIMIT 2)`)
	return cmp.Or(errs...)
}

// openReaders opens all connections of the readers. Lists must go on when the database is moved,
// and a connection that is opened then would not find it.
func (s *store) openReaders() error {
	for range cap(s.readSlots) {
		rows, err := s.selectPage.Query(0, 1)
		if err != nil {
			return err
		}
		defer rows.Close() // gives the connection back when all are open
	}
	return nil
}

// close closes the store. It returns an error if the database is not in its place. Call close only
// once.
func (s *store) close() error {
	close(s.closing)
	s.watching.Wait()

	// Wait for the batch that is being stored, and for all reads, and let no others begin: the
	// writer's connection must be the last to be closed. Lock and slots are never given back.
	s.writing.Lock()
	for range cap(s.readSlots) {
		s.readSlots <- struct{}{}
	}

	// The last connection to be closed copies the WAL into the database and deletes it, but not if
	// the database was moved: the WAL stays, and would damage another database at the path. So copy
	// it into the database that is open, wherever that is, and empty it.
	if err := s.checkPath(); err != nil {
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

// checkHealth returns errUnavailable, wrapped, if the database is not in its place, or cannot be
// read.
func (s *store) checkHealth() error {
	if err := s.checkPath(); err != nil {
		return unavailable(err)
	}
	_, _, err := s.list(listOptions{limit: 1})
	return unavailable(err)
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

// list returns a page of pets, by ascending id, and whether more follow.
//
// There is no context: an index and a LIMIT keep the query short, and database/sql starts a
// goroutine for each query that can be cancelled, which costs 15 % of the lists in a second.
func (s *store) list(o listOptions) (pets []Pet, more bool, err error) {
	statement, args := s.selectPage, []any{o.after, o.limit + 1}
	if o.status != "" {
		statement, args = s.selectPageByStatus, []any{o.status, o.after, o.limit + 1}
	}

	s.readSlots <- struct{}{}
	defer func() { <-s.readSlots }()
	defer s.exitOnPanic()

	rows, err := statement.Query(args...)
	if err != nil {
		return nil, false, wrapTransient(err)
	}
	defer rows.Close()

	pets = make([]Pet, 0, o.limit+1)
	var p Pet
	columns := []any{&p.ID, &p.Name, &p.CategoryID, &p.Status}
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, false, err
		}
		pets = append(pets, p)
	}
	if err := rows.Err(); err != nil {
		return nil, false, wrapTransient(err)
	}

	more = len(pets) > o.limit
	return pets[:min(len(pets), o.limit)], more, nil
}

// get returns the pet with this id, or errNotFound.
func (s *store) get(id int64) (Pet, error) {
	if id < 1 {
		return Pet{}, errNotFound
	}
	pets, _, err := s.list(listOptions{after: id - 1, limit: 1})
	if err != nil {
		return Pet{}, err
	}
	if len(pets) == 0 || pets[0].ID != id {
		return Pet{}, errNotFound
	}
	return pets[0], nil
}

// errNoResult would be a mistake in commit. It makes sure that such a mistake is not taken for success.
var errNoResult = errors.New("the creation has no result")

// creation is a pet to be stored, and then the result.
type creation struct {
	NewPet
	caller         caller
	idempotencyKey string // "" for none

	result // set once it is final
}

// result is what a client gets for a creation.
type result struct {
	pet      Pet
	replayed bool // pet is from the first response to the Idempotency-Key
	err      error
}

// batch is a set of creations that are stored together, with one wait for the disk (group commit;
// BenchmarkCreates shows what that gains). It gathers them while the batch before it is being
// stored.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
}

// newBatch returns an empty batch.
func newBatch() *batch {
	return &batch{done: make(chan struct{})}
}

// create stores p and returns it, with its id, once it is on disk.
//
// If who has already used idempotencyKey ("" for none) within idempotencyKeyLifetime, it stores
// nothing, and returns the first result with replayed set, or errIdempotencyKeyReused if p differs.
//
// After errIdempotencyKeyReused, errRefused or errUnavailable p is not stored. After another error
// it may be.
//
// There is no context: a client that disconnects must not break the commit that it shares with
// others.
func (s *store) create(who caller, idempotencyKey string, p NewPet) (
	stored Pet, replayed bool, err error,
) {
	c := &creation{NewPet: p, caller: who, idempotencyKey: idempotencyKey}
	c.err = errNoResult // until commit sets it
	b, first := s.join(c)

	// The first creation of a batch stores it. A goroutine of its own for that would be easier to
	// read, but switching to it and back costs a lone client a fifth of its creates in a second.
	if first {
		s.storeBatch(b)
	}
	<-b.done
	return c.pet, c.replayed, c.err
}

// join adds c to the batch that gathers, and reports whether it is the first there.
func (s *store) join(c *creation) (b *batch, first bool) {
	s.gatheringMu.Lock()
	defer s.gatheringMu.Unlock()

	b = s.gathering
	b.creations = append(b.creations, c)
	return b, len(b.creations) == 1
}

// endGathering lets later creations join a new batch.
func (s *store) endGathering() {
	s.gatheringMu.Lock()
	defer s.gatheringMu.Unlock()
	s.gathering = newBatch()
}

// storeBatch waits until the batch before b is stored, and then stores b.
func (s *store) storeBatch(b *batch) {
	s.writing.Lock() // meanwhile, creations join b
	defer s.writing.Unlock()
	defer s.exitOnPanic() // before Unlock

	s.endGathering() // not before Lock: b gathers as long as it waits
	s.commit(b.creations)
	close(b.done)
}

// commit stores creations in their order, and sets their results. They share one transaction,
// unless one of them cannot be stored. Then those before that one get a transaction of their own,
// and that one begins the next: if it fails there, it is left out. So a creation is refused only
// because of what is stored. None is inserted more than three times, unless a rule refuses what it
// has accepted before (as one with random() does).
func (s *store) commit(pending []*creation) {
	attempt := pending // the first ones of pending, for the next transaction
	for len(pending) > 0 {
		results, err := s.insertTogether(attempt)
		failed, ok := errors.AsType[*creationError](err)
		switch {
		case err == nil: // go on with the rest
			for i, c := range attempt {
				c.result = results[i]
			}
			pending = pending[len(attempt):]
			attempt = pending
		case ok && failed.index > 0: // first those before it
			attempt = pending[:failed.index]
		case ok: // it was the first, so it alone is to blame
			pending[0].err = failed.cause
			pending = pending[1:]
			attempt = pending
		default: // the database fails: do not try on, because each transaction may wait for a lock
			for _, c := range pending {
				c.err = err
			}
			return
		}
	}
}

// creationError means that one creation cannot be stored, because of what the operator has added to
// the database. The others may be.
type creationError struct {
	index int // of the creation
	cause error
}

func (e *creationError) Error() string { return e.cause.Error() }

// asCreationError returns err as a creationError if it may be due to the creation with this index
// alone: if that breaks a constraint, or a trigger fails.
func asCreationError(err error, index int) error {
	code := sqliteCode(err)
	if code == sqlite3.SQLITE_CONSTRAINT { // RAISE in a trigger has this code, too
		err = fmt.Errorf("%w: %w", errRefused, err)
	}
	switch {
	case errors.Is(err, errRefused),
		code == sqlite3.SQLITE_ERROR, code == sqlite3.SQLITE_MISMATCH, code == sqlite3.SQLITE_TOOBIG:
		return &creationError{index, err}
	}
	return err
}

// insertTogether stores creations in one transaction, and returns their results. After an error,
// which may be a creationError, it has none.
func (s *store) insertTogether(creations []*creation) (results []result, err error) {
	err = inTx(context.Background(), s.writer, func(tx *sql.Tx) error {
		if err := s.checkPath(); err != nil {
			return unavailable(err)
		}
		now := time.Now()
		for i, c := range creations {
			r, err := s.insert(tx, c, now)
			if err != nil {
				return asCreationError(err, i)
			}
			results = append(results, r)
		}
		return nil
	})
	s.generation.Add(1) // even after an error: the pets may be on disk
	if err != nil {
		return nil, wrapTransient(err)
	}
	return results, nil
}

// insert stores c in tx, or finds the first response to its Idempotency-Key.
func (s *store) insert(tx *sql.Tx, c *creation, now time.Time) (result, error) {
	if c.idempotencyKey != "" {
		first, found, err := s.replay(tx, c, now)
		if found || err != nil {
			return first, err
		}
	}

	id, err := insertRow(tx.Stmt(s.insertPet), c.Name, c.CategoryID, c.Status)
	if err != nil {
		return result{}, err
	}
	if c.idempotencyKey != "" {
		if err := s.remember(tx, c, id, now); err != nil {
			return result{}, err
		}
	}
	return result{pet: Pet{ID: id, NewPet: c.NewPet}}, nil
}

// insertRow runs an INSERT of one row, and returns its rowid, the id of a pet. It returns
// errRefused, wrapped, if a trigger leaves the row out, which SQLite does not report.
//
// With RETURNING id, many clients would get 0.9 times as many creates in a second.
func insertRow(statement *sql.Stmt, args ...any) (id int64, err error) {
	r, err := statement.Exec(args...)
	if err != nil {
		return 0, err
	}
	inserted, err := r.RowsAffected()
	if err != nil {
		return 0, err
	}
	if inserted == 0 {
		return 0, fmt.Errorf("%w: a trigger left it out", errRefused)
	}
	return r.LastInsertId()
}

// remember stores id and c as the first response to the Idempotency-Key of c. It deletes two keys
// that have expired, so that they cannot pile up.
func (s *store) remember(tx *sql.Tx, c *creation, id int64, now time.Time) error {
	_, err := insertRow(tx.Stmt(s.insertIdempotencyKey), c.caller[:], c.idempotencyKey, now.Unix(),
		id, c.Name, c.CategoryID, c.Status)
	if err != nil {
		return err
	}
	_, err = tx.Stmt(s.deleteExpiredKeys).Exec(now.Add(-idempotencyKeyLifetime).Unix())
	return err
}

// replay looks for the first response to the Idempotency-Key of c.
func (s *store) replay(tx *sql.Tx, c *creation, now time.Time) (first result, found bool, err error) {
	p := &first.pet
	oldest := now.Add(-idempotencyKeyLifetime).Unix()
	err = tx.Stmt(s.selectIdempotencyKey).QueryRow(c.caller[:], c.idempotencyKey, oldest).
		Scan(&p.ID, &p.Name, &p.CategoryID, &p.Status)
	if errors.Is(err, sql.ErrNoRows) {
		return result{}, false, nil
	}
	if err != nil {
		return result{}, false, err
	}

	first.replayed = true
	if p.NewPet != c.NewPet {
		first.err = errIdempotencyKeyReused
	}
	return first, true, nil
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
	for _, suffix := range []string{"", "-wal", "-journal"} { // a log of another database would damage it
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

	if err := copyDatabase(ctx, path, temp.Name()); err != nil {
		return withAdvice(err)
	}
	if err := verify(ctx, temp.Name()); err != nil {
		return withAdvice(err)
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

	return inTx(ctx, db, func(tx *sql.Tx) error {
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
// reports whether the database is new. steps is migrations, but for tests.
//
// It changes nothing, and returns an error, if the database is not one of this service, was written
// by a newer version, or cannot be written.
func migrate(db *sql.DB, steps []string) (isNew bool, err error) {
	err = inTx(context.Background(), db, func(tx *sql.Tx) error {
		version, err := readSchemaVersion(tx, len(steps))
		if err != nil {
			return err
		}
		isNew = version == 0

		for ; version < len(steps); version++ {
			if _, err := tx.Exec(steps[version]); err != nil {
				return err
			}
			if _, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
				return err
			}
		}
		return checkWritable(tx)
	})
	return isNew, err
}

// inTx runs f in a transaction of db, and commits that if f returns nil. Otherwise it rolls back,
// and returns the error of f.
func inTx(ctx context.Context, db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := f(tx); err != nil {
		// Not deferred: after a panic in a statement, it would wait for a lock for ever. Its own
		// error says nothing new: SQLite may have rolled back already.
		tx.Rollback()
		return err
	}
	return tx.Commit()
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
		return 0, errors.New("a newer version of this service has written it; use that version")
	}
	return version, nil
}

// refuseOrphanedWAL returns an error if there is a WAL for the database at path, but no database.
// SQLite would take that for a new database, and delete the WAL.
func refuseOrphanedWAL(path string) error {
	wal := walPath(path)
	walExists := fileSize(wal) > 0           // first: another process may be creating the database
	databaseIsMissing := fileSize(path) <= 1 // SQLite takes a file of one byte for an empty one
	if walExists && databaseIsMissing {
		return fmt.Errorf("there is no database, but %q is the write-ahead log of one; "+
			"put that database back, or move the log away to start with an empty database", wal)
	}
	return nil
}

// walPath returns the path of the WAL of the database at path. If that is a link, the WAL is beside
// its target, even if there is no file yet.
func walPath(path string) string {
	for range 100 { // links may lead in a circle
		target, err := os.Readlink(path)
		if err != nil {
			break // not a link
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		path = target
	}
	return path + "-wal"
}

// syncWAL makes durable what a killed process may have left in the WAL of the database at path: a
// repeated request must not acknowledge it before. A checkpoint would not do, because it syncs
// nothing while another program, such as Litestream, reads the WAL.
func syncWAL(path string) error {
	wal, err := os.OpenFile(walPath(path), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer wal.Close()
	return wal.Sync()
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
// The parameters with an underscore are described at
// https://pkg.go.dev/modernc.org/sqlite#Driver.Open.
func openPool(path, mode string, size int) *sql.DB {
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
	path = "/" + strings.TrimPrefix(filepath.ToSlash(path), "/") // on Windows: /C:/...
	location := url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}

	db, _ := sql.Open("sqlite", location.String()) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// exitOnPanic, deferred, ends the program after a panic in the store, with status 1.
//
// A panic in a handler becomes a 500 for that request alone (see callHandler). A panic in
// database/sql or below leaves a connection in use, or a transaction open. The program must not go
// on with that, but be started again.
func (s *store) exitOnPanic() {
	if p := recover(); p != nil {
		s.logger.Error("panic in the store", "panic", p, "stack", string(debug.Stack()))
		os.Exit(1)
	}
}

// unavailable wraps err in errUnavailable, unless err is nil or wrapped already.
func unavailable(err error) error {
	if err == nil || errors.Is(err, errUnavailable) {
		return err
	}
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

// withAdvice adds to an error of SQLite what the operator can do.
func withAdvice(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY:
		return fmt.Errorf("%w: it must be a file in an existing folder, and both must be writable", err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: it is damaged, or not an SQLite database: "+
			"check the path, or put a backup in its place", err)
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
