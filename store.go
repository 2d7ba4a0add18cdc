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
// parseNewPet fills in the default. Give a new field that may be missing a default, too, and not a
// pointer: replay compares two of them by ==.
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

	nextMu sync.Mutex // guards next and next.calls
	next   *batch     // new calls of create join it, until storeBatch replaces it; never nil
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

// createCall is a call of create: its arguments, and the results that insert sets. The results
// count only if the transaction is committed.
type createCall struct {
	caller         []byte
	idempotencyKey string
	pet            NewPet

	stored   Pet
	replayed bool
	err      error // of this pet alone, such as errIdempotencyKeyReused or errRefused
}

// batch has the calls of create that one transaction stores. This is group commit:
//  1. Each call joins s.next, and calls once.Do. The first of them runs storeBatch.
//  2. storeBatch waits until the batch before is stored. Meanwhile, more calls join.
//  3. storeBatch puts a new batch in s.next. From then on, nothing joins the old one.
//  4. storeBatch stores the pets of the old batch. Then Do returns to all of its calls.
//
// So there are at most two batches at a time: one is being stored, and s.next waits for it.
type batch struct {
	calls []*createCall
	once  sync.Once // runs storeBatch
	err   error     // of the transaction
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
	c := &createCall{caller: caller, idempotencyKey: idempotencyKey, pet: pet}

	s.nextMu.Lock()
	b := s.next
	b.calls = append(b.calls, c)
	s.nextMu.Unlock()

	// The first call of b runs storeBatch. The others wait until that has returned.
	b.once.Do(func() { s.storeBatch(b) })
	if b.err != nil {
		return Pet{}, false, b.err
	}
	return c.stored, c.replayed, c.err
}

// storeBatch stores the pets of b, which is s.next at first, and sets the results: see batch.
func (s *store) storeBatch(b *batch) {
	defer s.exitOnPanic()

	s.writerMu.Lock() // waits until the batch before is stored
	defer s.writerMu.Unlock()

	s.nextMu.Lock()
	s.next = new(batch) // so b.calls is complete
	s.nextMu.Unlock()

	b.err = markUnavailable(inTx(s.writer, func(tx *sql.Tx) error {
		// Look at the files and the time after BEGIN, which may have waited for a lock.
		if err := s.checkFiles(fileSuffixes...); err != nil {
			return fmt.Errorf("%w: %w", errUnavailable, err)
		}
		now := time.Now()
		for _, c := range b.calls {
			if err := s.insert(tx, c, now); err != nil {
				return err
			}
		}
		return nil
	}))
}

// insert inserts the pet of c in tx, unless its Idempotency-Key was used before, and sets the
// results of c. If it returns an error, tx must be rolled back.
func (s *store) insert(tx *sql.Tx, c *createCall, now time.Time) error {
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
func (c *createCall) replay(response []byte) {
	c.replayed = true
	// A response from before a member was added to NewPet lacks it. Take that member from c.pet, so
	// that it does not count as a difference.
	c.stored.NewPet = c.pet
	c.err = json.Unmarshal(response, &c.stored)
	if c.err == nil && c.stored.NewPet != c.pet {
		c.err = errIdempotencyKeyReused
	}
}

// exitOnPanic, deferred, ends the program with status 1 after a panic in list, get or storeBatch.
// The program cannot go on:
//   - The connection and its locks stay in use for ever. (A deferred tx.Rollback would wait for
//     them, and exitOnPanic would not be reached. So inTx does not defer it. A deferred rows.Close
//     does not wait.)
//   - sync.Once.Do returns to the other calls of a batch as if storeBatch had succeeded. They would
//     return pets that are not stored.
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
	if err := checkLinks(s.path); err != nil {
		return err
	}

	// The -shm may have been deleted, while another program has it open with this WAL. All programs
	// must use the same one, because it has their locks. So put it back. (If it is there, Link
	// changes nothing.)
	if link := linkOf(s.path); !differs(s.path+"-wal", link+"-wal") {
		os.Link(link+"-shm", s.path+"-shm") // fails if there are no links
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
	// A transaction has the write lock, so only one start at a time makes links.
	if err := inTx(s.writer, func(*sql.Tx) error { s.linkFiles(); return nil }); err != nil {
		return err
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
// A commit syncs the WAL if the transaction has written something. So syncWAL writes the schema
// version, which stays the same. In a new database, this also creates the WAL and the -shm.
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
		// Until the rows are closed, they keep their connection, and the next query needs another
		// one. So close all of them at the end.
		defer rows.Close()
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

// migrations[v] takes a database from schema version v to version v+1. The version is PRAGMA
// user_version, which is 0 in a new database.
//
// To change the schema, append to this list. Never edit a string that was released: a database that
// already has its version would not get the edit.
var migrations = []string{
	// Before the first release, version 1 had other tables. readSchemaVersion refuses such a
	// database.
	`PRAGMA application_id = 0x50657473;`,

	// The CHECKs are for edits by other programs, and are not all rules of the API. With
	// AUTOINCREMENT, no id is used again. The index on status also has the id, as each index has the
	// rowid.
	//
	// A row of idempotency_keys has the first response, a Pet in JSON, to the Idempotency-Key of a
	// caller. created is in Unix seconds. deploy/animalstore-merge copies these rows.
	`CREATE TABLE pets (
		id INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0),
		name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
		category_id INTEGER NOT NULL,
		status TEXT NOT NULL DEFAULT 'available'
			CHECK (status = 'available' OR status = 'pending' OR status = 'sold')
	) STRICT;
	CREATE INDEX pets_by_status ON pets (status);

	CREATE TABLE idempotency_keys (
		caller BLOB NOT NULL,
		key TEXT NOT NULL,
		created INTEGER NOT NULL,
		response TEXT NOT NULL,
		PRIMARY KEY (caller, key)
	) STRICT;
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
	ours := id == applicationID && version > 1 // version 1 was never released
	if !empty && !ours {
		return 0, fmt.Errorf("not a database of this service: "+
			"its application_id is %d, and its user_version %d", id, version)
	}
	if version > newest {
		return 0, errors.New("a newer version of this service has written the database; use that version")
	}
	return version, nil
}

// backup writes a copy of the database at path, which may be in use, to the new file target, which
// gets that name only after the copy is verified and on disk.
func backup(ctx context.Context, path, target string) error {
	if err := checkLinks(path); err != nil {
		return err
	}
	// SQLite would apply an old -wal or -journal of this name to the copy.
	for _, name := range []string{target, target + "-wal", target + "-journal"} {
		if _, err := os.Lstat(name); err == nil {
			return fmt.Errorf("%q exists already; name a new file", name)
		}
	}

	temp, err := os.CreateTemp(filepath.Dir(target), filepath.Base(target)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer os.Remove(temp.Name() + "-journal") // SQLite leaves one if the disk is full
	defer temp.Close()

	// If the service is stopped, SQLite makes a -wal and a -shm. With "ro", it could not delete
	// them.
	db := newPool(path, "rw", 1)
	defer db.Close()
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
	query := url.Values{
		"mode": {mode},
		// BEGIN waits for the write lock. After a plain BEGIN and a SELECT, an INSERT would not
		// wait, but fail.
		"_txlock": {"immediate"},
		"_pragma": {
			"synchronous(FULL)",
			"fullfsync(ON)", // on macOS, fsync leaves data in the cache of the disk
			"checkpoint_fullfsync(ON)",
		},
	}
	db := newDB(path, query.Encode())
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// newDB returns a database/sql.DB for the database at path, whose statements wait for locks. query
// has more parameters of the driver: see https://pkg.go.dev/modernc.org/sqlite#Driver.Open.
func newDB(path, query string) *sql.DB {
	// With _error_rc, an error has its own message, and not that of an earlier one.
	name := fmt.Sprintf("file:%s?_error_rc=1&_pragma=busy_timeout(%d)&%s",
		url.PathEscape(filepath.ToSlash(path)), busyTimeout.Milliseconds(), query)
	db, _ := sql.Open("sqlite", name) // fails only if there is no such driver
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

// The rest guards the files of the database. People and programs move, delete and replace files.
// SQLite goes on with the files that it has open. When it closes a file that has no name any more,
// the animals in that are gone. The next start would make a new database, and give their ids to
// other animals. So:
//   - While a file is not in its place, creates and checkHealth fail: see checkFiles.
//   - While the service runs, and after a kill, each file has a second name: a hard link in a
//     hidden folder. See linkFiles.
//   - While files must be put back from the links, a start, a backup and a stop fail. Their error
//     says where the links are. See mustPutBack.

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

// linkOf returns the name of the link to the database at path, in a hidden folder. With a suffix,
// it is the name of the link to another file.
func linkOf(path string) string {
	folder, name := filepath.Split(path)
	return filepath.Join(folder, "."+name+".links", name)
}

// linkFiles makes the links to the files, in place of those of an earlier start. If that fails, as
// on a file system without hard links, it logs a warning.
func (s *store) linkFiles() {
	link := linkOf(s.path)
	folder := filepath.Dir(link)
	err := errors.Join(os.RemoveAll(folder), os.Mkdir(folder, 0o700))
	for _, suffix := range fileSuffixes {
		err = errors.Join(err, os.Link(s.path+suffix, link+suffix))
	}
	if err != nil {
		os.RemoveAll(folder) // some links without the others are of no use
		s.logger.Warn("the files of the database have no links", "error", err)
	}
}

// close waits until the batch in progress is stored, and closes the store. It returns an error if
// the database or its -shm is not in its place, or files must be put back from the links.
// Otherwise, it deletes the links, unless another program may need them.
func (s *store) close() error {
	s.writerMu.Lock()
	defer s.writerMu.Unlock()

	if err := s.checkFiles("-shm"); err != nil {
		// Other programs may have changed the WAL since, and this -shm, the index of the WAL, does
		// not know. To close a connection, SQLite would copy the WAL by this index, and damage the
		// database. So leave the connections open, as a kill does.
		return fmt.Errorf("%w; look for its files in %q", err, filepath.Dir(linkOf(s.path)))
	}
	moved := s.checkFiles("") // the error if the database was moved
	if moved != nil {
		// To close a connection, SQLite does not copy the WAL to a database that was moved. A
		// checkpoint does, so that this file has all animals. (If it fails, the WAL has them.)
		mode := "FULL"
		if errors.Is(moved, os.ErrNotExist) {
			// Empty the WAL, too. If the database is used elsewhere, and then moved back, SQLite
			// would apply an old WAL to it. (If another database has taken its place, somebody may
			// have opened that with this -shm, which then is wrong.)
			mode = "TRUNCATE"
		}
		s.writer.Exec("PRAGMA wal_checkpoint(" + mode + ")")
	}
	// The writer closes last, because a read-only connection cannot delete the WAL.
	if err := errors.Join(s.readers.Close(), s.writer.Close()); err != nil {
		return err
	}

	if err := checkLinks(s.path); err != nil {
		return err
	}
	if moved != nil {
		return moved // the folder was moved, with the links in it, or there are no links
	}
	// While there is a WAL, another program has the database open, and may need the links.
	if _, err := os.Stat(s.path + "-wal"); errors.Is(err, os.ErrNotExist) {
		os.RemoveAll(filepath.Dir(linkOf(s.path))) // if this fails, the next start does it
	}
	return nil
}

// checkLinks returns an error if files of the database at path must be put back from their links.
// It refuses a symbolic link, too: SQLite keeps the WAL beside the file that this leads to, and the
// functions here look beside path.
func checkLinks(path string) error {
	if file, err := os.Lstat(path); err == nil && file.Mode().Type() == os.ModeSymlink {
		return errors.New("it is a symbolic link: name the file that it leads to")
	}
	must, err := mustPutBack(path)
	if err != nil {
		return fmt.Errorf("looking for lost animals: %w", err)
	}
	if must {
		return fmt.Errorf("a file of the database was moved, deleted or replaced; all animals are "+
			"in %q: end all programs that use the database, and move all files of this folder back",
			filepath.Dir(linkOf(path)))
	}
	return nil
}

// mustPutBack reports whether files of the database at path must be put back from their links. It
// looks at them in this order:
//   - The database: yes, if it is not the linked file.
//   - The -shm, if there is one: yes, if only one of the -shm and the WAL is the linked file. They
//     belong together. Another program may have the lost one open, and SQLite would damage the
//     database.
//   - The WAL: no, if it is the linked file.
//   - Otherwise, neither is: when the last connection of all programs closes, SQLite copies the WAL
//     to the database, and deletes both. So yes, if the linked WAL has a greater id than the
//     database. (If a kill has interrupted a commit, and another program closed the last
//     connection, the WAL has a greater id, too, although nothing is lost.)
func mustPutBack(path string) (bool, error) {
	link := linkOf(path)
	_, err := os.ReadDir(filepath.Dir(link))
	if errors.Is(err, os.ErrPermission) {
		return false, err // this user cannot see whether there are links
	}
	if differs(path, link) {
		return true, nil
	}
	walDiffers := differs(path+"-wal", link+"-wal")
	_, err = os.Stat(path + "-shm")
	if err == nil && walDiffers != differs(path+"-shm", link+"-shm") {
		return true, nil
	}
	if !walDiffers {
		return false, nil
	}

	// SQLite finds the lost WAL by the name of the link to the database. If that was moved back
	// alone, make it again.
	os.Link(path, link)
	// SQLite takes it for damage if an old WAL tells of fewer pages than the database has by now, but
	// not with writable_schema.
	withWAL, err := lastID(link, "mode=ro&_pragma=writable_schema(ON)")
	if err != nil {
		return false, err
	}
	alone, err := lastID(path, "immutable=1") // reads the database without any WAL
	if err != nil {
		return true, nil // SQLite has copied only a part of the WAL, and needs it
	}
	return withWAL > alone, nil
}

// differs reports whether there is a link, and path is another file.
func differs(path, link string) bool {
	linked, err := os.Stat(link)
	if err != nil {
		return false
	}
	file, err := os.Stat(path)
	return err != nil || !os.SameFile(file, linked)
}

// lastID returns the greatest id that a database has given, or 0. query is that of newDB.
func lastID(path, query string) (id int64, err error) {
	db := newDB(path, query)
	defer db.Close()
	err = db.QueryRow(`SELECT coalesce(max(seq), 0) FROM sqlite_sequence
		WHERE name = 'pets'`).Scan(&id)
	return id, err
}
