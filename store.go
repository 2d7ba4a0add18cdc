package main

import (
	"context"
	"database/sql"
	"encoding/json"
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
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	busyTimeout            = 2 * time.Second // how long a statement waits for a lock
	idempotencyKeyLifetime = 24 * time.Hour  // how long an Idempotency-Key is remembered

	// applicationID is PRAGMA application_id of each database of this service: "Pets" in ASCII.
	applicationID = 0x50657473

	// maxName is the greatest length of a name in characters (Unicode code points). openapi.json
	// and a CHECK in migrations have it, too.
	maxName = 255
)

// petStatuses has the values of PetStatus. openapi.json and a CHECK in migrations have them, too.
var petStatuses = []string{"available", "pending", "sold"}

// NewPet is a pet as a client sends it: the NewPet of the API. Its status is never empty, because
// parseNewPet fills in the default. Add no pointers: replay compares two of them by ==.
type NewPet struct {
	Name       string `json:"name"`
	CategoryID int64  `json:"categoryId"`
	Status     string `json:"status"`
}

// Pet is a pet that is stored, and so has an id.
type Pet struct {
	ID int64 `json:"id"`
	NewPet
}

// petColumns are the columns of a Pet, in the order of fields.
const petColumns = "id, name, category_id, status"

// fields returns pointers to the fields of p, to scan petColumns.
func (p *Pet) fields() []any { return []any{&p.ID, &p.Name, &p.CategoryID, &p.Status} }

// The SQL of the prepared statements.
const (
	selectPetsSQL     = `SELECT ` + petColumns + ` FROM pets WHERE id > ? ORDER BY id LIMIT ?`
	selectByStatusSQL = `SELECT ` + petColumns + ` FROM pets WHERE status = ? AND id > ?
		ORDER BY id LIMIT ?`
	selectPetSQL = `SELECT ` + petColumns + ` FROM pets WHERE id = ?`

	insertPetSQL      = `INSERT INTO pets (name, category_id, status) VALUES (?, ?, ?)`
	selectResponseSQL = `SELECT response FROM idempotency_keys
		WHERE caller = ? AND key = ? AND created >= ?`
	// REPLACE, because there may be an expired row with this key.
	insertResponseSQL = `REPLACE INTO idempotency_keys (caller, key, created, response)
		VALUES (?, ?, ?, ?)`
	deleteExpiredSQL = `DELETE FROM idempotency_keys WHERE rowid IN
		(SELECT rowid FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT 2)`
)

// listOptions says which pets to list.
type listOptions struct {
	limit  int    // the most pets
	status string // "" for any
	after  int64  // list only greater ids
}

// store keeps the pets in an SQLite database. While it is open, that has three files:
//   - The database itself.
//   - Its write-ahead log (WAL), with the suffix -wal. A commit appends to the WAL and syncs it.
//     Now and then, SQLite copies the WAL to the database, and begins it anew.
//   - The index of the WAL, and its locks, with the suffix -shm.
//
// When the last connection of all programs closes, SQLite copies the WAL to the database, and
// deletes the -wal and the -shm. A kill leaves them behind, for the next program that opens the
// database. See https://sqlite.org/wal.html.
//
// The end of this file guards the three files: people move, delete and replace them.
//
// list, get, create and checkHealth may be called concurrently. They take no context: a query is
// short, and a client that disconnects must not roll back the other pets of a transaction.
type store struct {
	path   string
	files  map[string]os.FileInfo // the files that were opened, by suffix: see checkFiles
	logger *slog.Logger

	readers        *sql.DB
	selectPets     *sql.Stmt
	selectByStatus *sql.Stmt
	selectPet      *sql.Stmt

	writerMu       sync.Mutex // held while a batch is stored; lock it before nextMu
	writer         *sql.DB    // one connection, for creates
	insertPet      *sql.Stmt
	selectResponse *sql.Stmt // the first response to an Idempotency-Key
	insertResponse *sql.Stmt
	deleteExpired  *sql.Stmt // Idempotency-Keys

	nextMu sync.Mutex // guards next and next.creations
	next   *batch     // new creations join it, until commit replaces it; never nil
}

// list returns the pets that o selects, by ascending id. Its error may be errUnavailable.
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
	fields := p.fields()
	for rows.Next() {
		if err := rows.Scan(fields...); err != nil {
			return nil, err
		}
		pets = append(pets, p)
	}
	return pets, markUnavailable(rows.Err())
}

// get returns the pet with this id. Its error may be errNotFound or errUnavailable.
func (s *store) get(id int64) (p Pet, err error) {
	defer s.exitOnPanic()
	err = s.selectPet.QueryRow(id).Scan(p.fields()...)
	if errors.Is(err, sql.ErrNoRows) {
		return p, errNotFound
	}
	return p, markUnavailable(err)
}

// creation is a call of create: its arguments, and the results that insert sets. The results count
// only if the batch is committed.
type creation struct {
	caller         []byte
	idempotencyKey string
	pet            NewPet

	stored   Pet
	replayed bool
	err      error // of this pet alone, such as errIdempotencyKeyReused or errRefused
}

// batch has the creations that one transaction stores. This is group commit:
//  1. Each creation joins s.next, and calls once.Do. The first call runs commit.
//  2. commit waits until the batch before is stored. Meanwhile, more creations join.
//  3. commit puts a new batch in s.next. From then on, nothing joins the old one.
//  4. commit stores the creations of the old batch. Then Do returns to all of them.
//
// So there are at most two batches at a time: one is being stored, and s.next waits for it.
type batch struct {
	creations []*creation
	once      sync.Once // runs commit
	err       error     // of the transaction
}

// create stores a pet, and returns it with its id once it is on disk. caller is the SHA-256 sum of
// an API key, and idempotencyKey is "" for none.
//
// If the caller has used the Idempotency-Key within idempotencyKeyLifetime, create stores nothing.
// It returns the pet of the first response, and replayed is true, or it returns
// errIdempotencyKeyReused if the two pets differ.
//
// After errIdempotencyKeyReused, errRefused or errUnavailable, the pet is not stored. After any
// other error, it may be stored. While another program locks the database, create waits at most
// twice busyTimeout: first the batch before waits for the lock, and then the batch of this pet.
func (s *store) create(
	caller []byte, idempotencyKey string, pet NewPet,
) (stored Pet, replayed bool, err error) {
	c := &creation{caller: caller, idempotencyKey: idempotencyKey, pet: pet}

	s.nextMu.Lock()
	b := s.next
	b.creations = append(b.creations, c)
	s.nextMu.Unlock()

	// The first call for b runs commit. The others wait until that has returned.
	b.once.Do(func() { s.commit(b) })
	if b.err != nil {
		return Pet{}, false, b.err
	}
	return c.stored, c.replayed, c.err
}

// commit stores the creations of b, which is s.next at first, and sets their results: see batch.
func (s *store) commit(b *batch) {
	defer s.exitOnPanic()

	s.writerMu.Lock() // waits until the batch before is stored
	defer s.writerMu.Unlock()

	s.nextMu.Lock()
	s.next = new(batch) // so b.creations is complete
	s.nextMu.Unlock()

	b.err = markUnavailable(inTx(s.writer, func(tx *sql.Tx) error {
		// Look at the files and the time after BEGIN, which may have waited for a lock.
		if err := s.checkFiles(fileSuffixes...); err != nil {
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
// results of c. If it returns an error, tx must be rolled back.
func (s *store) insert(tx *sql.Tx, c *creation, now time.Time) error {
	oldest := now.Add(-idempotencyKeyLifetime).Unix() // Idempotency-Keys from before have expired

	if c.idempotencyKey != "" {
		var response []byte
		err := tx.Stmt(s.selectResponse).QueryRow(c.caller, c.idempotencyKey, oldest).Scan(&response)
		if err == nil {
			c.replay(response)
			return nil
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}

	inserted, err := tx.Stmt(s.insertPet).Exec(c.pet.Name, c.pet.CategoryID, c.pet.Status)
	if sqliteCode(err) == sqlite3.SQLITE_CONSTRAINT {
		// SQLite has undone this statement alone, so the transaction can go on. (Only a trigger
		// could undo more, and deploy/README.md forbids triggers.)
		c.err = fmt.Errorf("%w: %w", errRefused, err)
		return nil
	}
	if err != nil {
		return err
	}
	id, _ := inserted.LastInsertId() // the error is always nil
	c.stored = Pet{ID: id, NewPet: c.pet}

	if c.idempotencyKey == "" {
		return nil
	}
	response, _ := json.Marshal(c.stored) // never fails for a Pet
	_, err = tx.Stmt(s.insertResponse).Exec(c.caller, c.idempotencyKey, now.Unix(), string(response))
	if err != nil {
		return err
	}
	// Delete up to two expired rows for each new one, so that they do not pile up.
	_, err = tx.Stmt(s.deleteExpired).Exec(oldest)
	return err
}

// replay sets the results of c from the first response to its Idempotency-Key.
func (c *creation) replay(response []byte) {
	c.replayed = true
	// A response from before a member was added to NewPet lacks it. Take that member from c.pet, so
	// that it does not count as a difference.
	c.stored.NewPet = c.pet
	c.err = json.Unmarshal(response, &c.stored)
	if c.err == nil && c.stored.NewPet != c.pet {
		c.err = errIdempotencyKeyReused
	}
}

// exitOnPanic, deferred, ends the program with status 1 after a panic in list, get or commit.
//
// After a panic in Query or Exec, the connection and its locks stay in use for ever. A deferred
// tx.Rollback would wait for them for ever, so inTx does not defer it. A deferred rows.Close does
// not wait.
//
// If commit panics, sync.Once.Do returns to all other creates of the batch as if commit had
// succeeded, and they would return pets that are not stored.
func (s *store) exitOnPanic() {
	if p := recover(); p != nil {
		s.logger.Error("panic in the store", "panic", p, "stack", string(debug.Stack()))
		os.Exit(1)
	}
}

// openStore opens the database at path. If that is missing or empty, it makes one, with a warning.
func openStore(path string, logger *slog.Logger) (*store, error) {
	s := &store{
		path:    path,
		files:   map[string]os.FileInfo{},
		logger:  logger,
		readers: newPool(path, "ro", max(4, runtime.GOMAXPROCS(0))), // some may wait for the disk
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
	if err := checkPath(s.path); err != nil {
		return err
	}

	// migrate refuses a foreign database. It comes before journal_mode, which would change the
	// file.
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

	if err := s.syncWAL(); err != nil {
		return err
	}
	for _, suffix := range fileSuffixes {
		if s.files[suffix], err = os.Stat(s.path + suffix); err != nil {
			return err
		}
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

// syncWAL brings the whole WAL to disk before there are requests. A process that was killed may
// have written pets to it that it could not sync. SQLite reads them from the cache of the system,
// so a repeat of their creates would get a 201, although a loss of power could still lose them.
//
// A commit syncs the WAL, even this one: it writes the schema version once more. In a new database,
// it also creates the WAL and the -shm.
func (s *store) syncWAL() error {
	_, err := s.writer.Exec(fmt.Sprintf("PRAGMA user_version = %d", len(migrations)))
	return err
}

// prepare prepares the statements, up to the first error.
func (s *store) prepare() (err error) {
	statement := func(db *sql.DB, query string) (prepared *sql.Stmt) {
		if err == nil {
			prepared, err = db.Prepare(query)
		}
		return prepared
	}

	s.selectPets = statement(s.readers, selectPetsSQL)
	s.selectByStatus = statement(s.readers, selectByStatusSQL)
	s.selectPet = statement(s.readers, selectPetSQL)
	s.insertPet = statement(s.writer, insertPetSQL)
	s.selectResponse = statement(s.writer, selectResponseSQL)
	s.insertResponse = statement(s.writer, insertResponseSQL)
	s.deleteExpired = statement(s.writer, deleteExpiredSQL)
	return err
}

// openReaders opens all connections of the readers now. Later, clients may have used up the file
// descriptors. Or there may be another database at the path, and new connections would read that.
func (s *store) openReaders() error {
	for range s.readers.Stats().MaxOpenConnections {
		rows, err := s.selectPets.Query(0, 1)
		if err != nil {
			return err
		}
		defer rows.Close() // after the loop, so that each query needs another connection
	}
	return nil
}

// checkHealth returns an error if a file is not in its place, or the database cannot be read.
func (s *store) checkHealth() error {
	if err := s.checkFiles(fileSuffixes...); err != nil {
		return err
	}
	_, err := s.list(listOptions{limit: 1})
	return err
}

// close waits until the batch in progress is stored, and closes the store. If a file is not in its
// place, close first saves the animals: see closeMisplaced.
func (s *store) close() error {
	s.writerMu.Lock()
	defer s.writerMu.Unlock()

	if err := s.checkFiles(fileSuffixes...); err != nil {
		return s.closeMisplaced(err)
	}
	// The writer closes last, because a read-only connection cannot delete the WAL.
	return errors.Join(s.readers.Close(), s.writer.Close())
}

// migrations[v] takes a database from schema version v to version v+1. The version is PRAGMA
// user_version, which is 0 in a new database. All of them together make this schema:
//   - pets (id, name, category_id, status). With AUTOINCREMENT, no id is used again.
//   - pets_by_status, an index on (status). It also has the id, as each index has the rowid.
//   - idempotency_keys (caller, key, created, response): the first response, a Pet in JSON, to the
//     Idempotency-Key of a caller. created is in Unix seconds; an index has it, too. Leave these
//     columns as they are: deploy/animalstore-merge copies them.
//
// The CHECKs are for edits by other programs, and are not all rules of the API.
//
// To change the schema, append to this list. Never edit a string that was released: a database that
// already has its version would not get the edit.
var migrations = []string{
	`PRAGMA application_id = 0x50657473;

	CREATE TABLE pets (
		id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0),
		name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
		category_id INTEGER NOT NULL,
		status TEXT NOT NULL DEFAULT 'available'
			CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
	) STRICT;
	CREATE INDEX pets_by_status ON pets (status, id, name, category_id);

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

	// In version 1, pets_by_status and idempotency_keys had the columns of each pet, too.
	`DROP INDEX pets_by_status;
	CREATE INDEX pets_by_status ON pets (status);

	CREATE TABLE responses (
		caller BLOB NOT NULL,
		key TEXT NOT NULL,
		created INTEGER NOT NULL,
		response TEXT NOT NULL,
		PRIMARY KEY (caller, key)
	) STRICT;
	INSERT INTO responses SELECT caller, key, created, json_object(
		'id', id, 'name', name, 'categoryId', category_id, 'status', status) FROM idempotency_keys;
	DROP TABLE idempotency_keys;
	ALTER TABLE responses RENAME TO idempotency_keys;
	CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created);`,
}

// migrate brings the schema of a database up to date in one transaction, and returns the version
// that it had before. steps is migrations; tests pass others. If the database is not one of this
// service, or a newer version has written it, migrate changes nothing and returns an error.
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

// readSchemaVersion returns the schema version of a database, 0 if it is empty. It returns an error
// if the database is of another program, or of a version above newest.
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
		return 0, errors.New("a newer version of this service has written the database; use that version")
	}
	return version, nil
}

// backup writes a copy of the database at path, which may be in use, to the new file target: see
// copyTo.
func backup(ctx context.Context, path, target string) error {
	if err := checkPath(path); err != nil {
		return err
	}
	// SQLite would apply an old -wal or -journal of this name to the copy.
	for _, name := range []string{target, target + "-wal", target + "-journal"} {
		if _, err := os.Lstat(name); err == nil {
			return fmt.Errorf("%q exists already; name a new file", name)
		}
	}
	// If the service is stopped, SQLite makes a -wal and a -shm. With "ro", it could not delete
	// them.
	db := newPool(path, "rw", 1)
	defer db.Close()
	return copyTo(ctx, db, target)
}

// copyTo writes a copy of db to the new file target, which gets that name only after the copy is
// verified and on disk.
func copyTo(ctx context.Context, db *sql.DB, target string) error {
	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()

	// VACUUM INTO refuses a file that exists, unless it is empty, as temp is.
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", temp.Name()); err != nil {
		return err
	}
	if err := verify(ctx, temp.Name()); err != nil {
		return err
	}

	// Sync applies to the file, and so to what SQLite has written through another descriptor.
	if err := errors.Join(temp.Sync(), temp.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp.Name(), target); err != nil {
		return err
	}
	// Make the name durable. Windows and some file systems cannot: ignore errors.
	if folder, err := os.Open(filepath.Dir(target)); err == nil {
		folder.Sync()
		folder.Close()
	}
	return nil
}

// verify returns an error if the database at path is empty or damaged, is not one of this service,
// or was written by a newer version.
func verify(ctx context.Context, path string) error {
	db := newPool(path, "rw", 1) // with "ro", SQLite ignores the CHECK constraints of the schema
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

// inTx runs f in a transaction of db, and commits that if f returns nil. Otherwise it rolls back,
// and returns the error of f.
func inTx(db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	if err := f(tx); err != nil {
		tx.Rollback() // not deferred: see exitOnPanic
		return err
	}
	return tx.Commit() // if COMMIT fails, the driver rolls back
}

// newPool returns a pool of up to size connections to the database at path. None is open yet. mode
// is one of SQLite's: ro, rw, or rwc, which creates a missing file.
func newPool(path, mode string, size int) *sql.DB {
	query := url.Values{ // see https://pkg.go.dev/modernc.org/sqlite#Driver.Open
		"mode":      {mode},
		"_error_rc": {"1"}, // errors have their own message, and not that of an earlier error
		// BEGIN waits for the write lock. After a plain BEGIN and a SELECT, an INSERT would not
		// wait, but fail.
		"_txlock": {"immediate"},
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

// markUnavailable adds errUnavailable to an error of SQLite that is likely to be temporary, and
// that leaves nothing stored. (After SQLITE_IOERR, as of a failed sync, pets may be stored.)
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

// The rest guards the files of the database. Operators and other programs move, delete and replace
// files. SQLite does not notice, and goes on with the files that it has open. So animals can be
// lost:
//
//   - While the service runs, because after a kill, nobody would find what is added to such files.
//     So creates and checkHealth fail until all files are in their places (checkFiles). Reads go on.
//   - At a stop, because only the service has such files open, and it closes them. So it first
//     saves a copy (closeMisplaced).
//   - At a start, if there is a WAL without a database, a -shm without a WAL, or a copy that a stop
//     has saved: the service would go on without their animals, and give their ids to others. So a
//     start is refused, and a backup, too (checkPath).

// fileSuffixes has the suffixes of the files of an open database: see store.
var fileSuffixes = []string{"", "-wal", "-shm"}

// checkFiles returns an error unless the files with these suffixes are those that were opened.
func (s *store) checkFiles(suffixes ...string) error {
	for _, suffix := range suffixes {
		file, err := os.Stat(s.path + suffix)
		if err == nil && !os.SameFile(file, s.files[suffix]) {
			err = fmt.Errorf("%q is another file", s.path+suffix)
		}
		if err != nil {
			return fmt.Errorf("the database is not in its place: %w", err)
		}
	}
	return nil
}

// closeMisplaced closes the store while a file is not in its place, which cause says. It saves a
// copy of the database first. Its error names the copy, or says why there is none.
//
// If only the -wal or the -shm was removed, SQLite still copies the WAL to the database when the
// last connection closes. If no animal is missing then, closeMisplaced deletes the copy, logs a
// warning, and returns nil.
func (s *store) closeMisplaced(cause error) error {
	saved, err := s.saveCopy()
	databaseMoved := s.checkFiles("") != nil // and not only the -wal or the -shm
	if databaseMoved {
		// SQLite leaves the WAL of a moved database behind, and would apply it to the next database
		// at the path, and damage that. So empty the WAL. (If another program reads it, it stays.)
		s.writer.Exec("PRAGMA wal_checkpoint(TRUNCATE)")
	}
	s.readers.Close()
	s.writer.Close()

	switch {
	case err != nil:
		return fmt.Errorf("%w; its animals cannot be saved: %w", cause, err)
	case !databaseMoved && hasAll(s.path, saved):
		s.logger.Warn("the database has all animals again", "cause", cause)
		return os.Remove(saved)
	}
	return fmt.Errorf("%w; all its animals are in %q", cause, saved)
}

// saveCopy saves a copy of the open database in the first of saveFolders where that is possible,
// and returns its path.
func (s *store) saveCopy() (saved string, err error) {
	name := filepath.Base(s.path) + savedInfix + time.Now().UTC().Format("2006-01-02-150405")
	for _, folder := range saveFolders(s.path) {
		saved = filepath.Join(folder, name)
		if err = copyTo(context.Background(), s.writer, saved); err == nil {
			break
		}
	}
	return saved, err
}

// savedInfix is in the name of a saved copy, between the name of the database and the time.
const savedInfix = ".rescued-"

// saveFolders returns where a stop may save a copy of the database at path: in its folder or, if
// that is gone or full, in the one above, or in the working directory. (For systemd, that is the
// folder of the backups: see deploy/animalstore.service.)
func saveFolders(path string) []string {
	folder := filepath.Dir(path)
	workingDirectory, _ := os.Getwd() // fails if that is gone
	return []string{folder, filepath.Join(folder, ".."), workingDirectory}
}

// hasAll reports whether the database at path has all rows of the database saved.
func hasAll(path, saved string) (ok bool) {
	db := newPool(path, "rw", 1)
	defer db.Close()
	// An error leaves ok false.
	db.Exec("ATTACH ? AS saved", saved)
	db.QueryRow(`SELECT NOT EXISTS (SELECT * FROM saved.pets EXCEPT SELECT * FROM main.pets)
		AND NOT EXISTS (SELECT * FROM saved.idempotency_keys EXCEPT SELECT * FROM main.idempotency_keys)
		AND NOT EXISTS (SELECT * FROM saved.sqlite_sequence EXCEPT SELECT * FROM main.sqlite_sequence)`,
	).Scan(&ok)
	return ok
}

// checkPath returns an error if a stop has saved a copy of the database at path, or if one of its
// files is missing, although SQLite would open what is left.
//
// It refuses a symbolic link, too: SQLite keeps the WAL beside the file that the link leads to, and
// the functions here look beside path.
func checkPath(path string) error {
	database, _ := os.Lstat(path)
	if database != nil && database.Mode().Type() == os.ModeSymlink {
		return errors.New("it is a symbolic link: name the file that it leads to")
	}
	for _, folder := range saveFolders(path) {
		pattern := filepath.Join(folder, filepath.Base(path)+savedInfix+"????-??-??-??????")
		pattern = strings.ReplaceAll(pattern, "[", "?") // for Glob, [ begins a class of characters
		if saved, _ := filepath.Glob(pattern); saved != nil {
			return fmt.Errorf("a stop has saved all animals in %q: restore it, or rename or delete it", saved[0])
		}
	}

	const missing = "%q is missing or empty: put it back beside %q, or restore a backup"
	wal, _ := os.Stat(path + "-wal")
	if (database == nil || database.Size() == 0) && wal != nil && wal.Size() > 0 {
		return fmt.Errorf(missing, path, path+"-wal") // SQLite would delete the WAL
	}
	// SQLite makes the WAL before the -shm, and deletes the -shm before the WAL.
	if shm, _ := os.Stat(path + "-shm"); shm != nil && wal == nil {
		return fmt.Errorf(missing, path+"-wal", path+"-shm")
	}
	return nil
}
