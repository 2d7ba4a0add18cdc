package main

import (
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
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	// busyTimeout is how long a create waits for the lock of another program.
	busyTimeout = 5 * time.Second

	// watchInterval is the time between two looks at what other programs have changed.
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
	-- the animal of the first response.
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

// store keeps the animals in an SQLite database in WAL mode: new animals go to a write-ahead log
// (WAL), the file with the suffix -wal, and a checkpoint moves them to the database itself. The
// file with the suffix -shm is the index of the WAL, which all processes share.
//
// If a file is not in its place any more, the store is sealed: until a restart, it lists animals,
// but creates none.
//
// All methods but close may be called concurrently.
type store struct {
	reader    *reader    // lists and gets animals
	committer *committer // creates animals
	watcher   *watcher   // notices what other programs do to the database and its files
}

// openStore opens the database at path, which is absolute. If there is none, it creates one, and
// logs a warning. What happens to the files later is logged, too.
func openStore(path string, logger *slog.Logger) (*store, error) {
	path, err := resolve(path)
	if err != nil {
		return nil, err
	}
	if err := refuseOrphanedWAL(path); err != nil {
		return nil, err
	}
	if err := syncWAL(path); err != nil {
		return nil, err
	}

	c := newCommitter(path)
	s := &store{
		reader:    newReader(path),
		committer: c,
		watcher:   newWatcher(path, c, logger),
	}
	isNew, err := s.openParts(path)
	if err != nil {
		s.closeAll()
		return nil, explain(err)
	}
	if isNew {
		logger.Warn("the database is new and empty", "database", path)
	}

	go s.watcher.watch()
	return s, nil
}

// openParts migrates the database at path, and opens all connections to it.
func (s *store) openParts(path string) (isNew bool, err error) {
	isNew, err = migrate(s.committer.db)
	if err != nil {
		return false, err
	}
	if err := setWALMode(s.committer.db); err != nil {
		return false, err
	}
	if err := s.reader.open(); err != nil {
		return false, err
	}
	if err := s.committer.open(); err != nil {
		return false, err
	}
	if err := openConnections(s.watcher.db, 1); err != nil {
		return false, err
	}

	files, err := openedFiles(path)
	if err != nil {
		return false, err
	}
	s.committer.mainFile = files[0] // the database itself
	s.watcher.files = files
	return isNew, nil
}

// close waits for a transaction in progress and closes the store.
//
// If the store is sealed, close returns the reason and closes no connection: SQLite would delete
// whatever WAL is at the path. Call close only once.
func (s *store) close() error {
	s.watcher.stop()
	s.committer.mu.Lock()
	defer s.committer.mu.Unlock()
	if err := s.committer.checkSealed(); err != nil {
		return err
	}
	return s.closeAll()
}

// closeAll closes all connections. The committer's comes last: the last connection makes a
// checkpoint and deletes the WAL, if it may write.
func (s *store) closeAll() error {
	return errors.Join(s.reader.db.Close(), s.watcher.db.Close(), s.committer.db.Close())
}

// checkHealth returns errUnavailable, wrapped, if the store is sealed, or if the database is not in
// its place or cannot be read.
func (s *store) checkHealth() error {
	if err := s.committer.checkPlace(); err != nil {
		return err
	}
	if _, _, err := s.list(filter{limit: 1}); err != nil {
		return fmt.Errorf("%w: %w", errUnavailable, err)
	}
	return nil
}

// list returns a page of animals, by ascending id, and whether more follow.
func (s *store) list(f filter) (pets []pet, more bool, err error) {
	return s.reader.list(f)
}

// get returns the animal with this id, or errNotFound.
func (s *store) get(id int64) (pet, error) {
	return s.reader.get(id)
}

// create stores p, as committer.create says.
func (s *store) create(who caller, idempotencyKey string, p newPet) (
	stored pet, replayed bool, err error,
) {
	return s.committer.create(who, idempotencyKey, p)
}

// changes returns a number that grows with every commit: of this process at once, of other programs
// within watchInterval.
func (s *store) changes() int64 {
	return s.committer.changes.Load()
}

// reader reads animals, on a pool of read-only connections.
//
// Its statements run without a context: an index and a LIMIT keep them short, and those that can
// be cancelled are slower.
type reader struct {
	db   *sql.DB
	size int // connections

	// slots is a semaphore with a slot for each connection. It serves callers in their order.
	// database/sql does not: with 1,000 clients, some of them waited for two seconds.
	slots chan struct{}

	selectPet          *sql.Stmt
	selectPage         *sql.Stmt
	selectPageByStatus *sql.Stmt
}

func newReader(path string) *reader {
	size := max(4, runtime.GOMAXPROCS(0))
	return &reader{
		db:    newPool(path, "ro", size),
		size:  size,
		slots: make(chan struct{}, size),
	}
}

// open prepares the statements and opens all connections.
func (r *reader) open() error {
	err := prepare(r.db, map[**sql.Stmt]string{
		&r.selectPet: `SELECT id, name, category_id, status FROM pets
			WHERE id = ?`,
		&r.selectPage: `SELECT id, name, category_id, status FROM pets
			WHERE id > ? ORDER BY id LIMIT ?`,
		&r.selectPageByStatus: `SELECT id, name, category_id, status FROM pets
			WHERE status = ? AND id > ? ORDER BY id LIMIT ?`,
	})
	if err != nil {
		return err
	}
	return openConnections(r.db, r.size)
}

// list does what store.list says.
func (r *reader) list(f filter) (pets []pet, more bool, err error) {
	statement, args := r.selectPage, []any{f.after, f.limit + 1}
	if f.status != "" {
		statement, args = r.selectPageByStatus, []any{f.status, f.after, f.limit + 1}
	}

	r.slots <- struct{}{}
	defer func() { <-r.slots }()
	defer exitOnPanic()

	rows, err := statement.Query(args...)
	if err != nil {
		return nil, false, asUnavailable(err)
	}
	defer rows.Close()

	pets = make([]pet, 0, f.limit+1)
	var p pet
	columns := []any{&p.ID, &p.Name, &p.CategoryID, &p.Status}
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, false, err
		}
		pets = append(pets, p)
	}
	if err := rows.Err(); err != nil {
		return nil, false, asUnavailable(err)
	}

	more = len(pets) > f.limit
	return pets[:min(len(pets), f.limit)], more, nil
}

// get does what store.get says.
func (r *reader) get(id int64) (p pet, err error) {
	r.slots <- struct{}{}
	defer func() { <-r.slots }()
	defer exitOnPanic()

	err = r.selectPet.QueryRow(id).Scan(&p.ID, &p.Name, &p.CategoryID, &p.Status)
	if errors.Is(err, sql.ErrNoRows) {
		return pet{}, errNotFound
	}
	return p, asUnavailable(err)
}

// committer stores animals with group commit: creations that wait at the same time share one
// transaction, and so one wait for the disk. With 64 clients, that is ten times as fast as a
// transaction for each. The goroutine of the first creation writes the whole batch.
//
// The transactions are made with prepared statements on the one connection of a pool:
// database/sql's Tx would parse BEGIN and COMMIT each time.
type committer struct {
	db       *sql.DB    // one connection, so that its statements form one transaction
	mainFile openedFile // the database itself, without its WAL; set by openParts

	begin                 *sql.Stmt
	commit                *sql.Stmt
	insertPet             *sql.Stmt
	selectIdempotencyKey  *sql.Stmt
	insertIdempotencyKey  *sql.Stmt
	deleteIdempotencyKeys *sql.Stmt

	// sealed is the reason why nothing can be created any more, or nil.
	sealed atomic.Pointer[error]

	changes atomic.Int64 // see store.changes

	// mu is held during a transaction, or to prevent one.
	mu sync.Mutex

	// nextMu guards next, the batch that creations can join, or nil. A batch that is being written
	// is no longer next, and so does not grow. nextMu may be taken while mu is held.
	nextMu sync.Mutex
	next   *batch
}

// batch is a set of creations that share one transaction.
type batch struct {
	creations []*creation
	done      chan struct{} // closed when all results are final
	err       error         // of the whole batch, such as a full disk
}

// creation is an animal waiting to be stored, and then the result.
type creation struct {
	newPet
	caller         caller
	idempotencyKey string // "" for none

	stored   pet
	replayed bool  // stored is from the first response to idempotencyKey
	err      error // of this creation alone
}

func newCommitter(path string) *committer {
	const walLimit = "journal_size_limit(64000000)" // bytes, to which SQLite cuts it after a burst
	return &committer{db: newPool(path, "rwc", 1, "synchronous(FULL)", walLimit)}
}

// open prepares the statements and opens the connection.
func (c *committer) open() error {
	err := prepare(c.db, map[**sql.Stmt]string{
		&c.begin:  `BEGIN IMMEDIATE`,
		&c.commit: `COMMIT`,
		&c.insertPet: `INSERT INTO pets (name, category_id, status)
			VALUES (?, ?, ?)`,
		&c.selectIdempotencyKey: `SELECT id, name, category_id, status FROM idempotency_keys
			WHERE caller = ? AND key = ? AND created >= ?`,
		&c.insertIdempotencyKey: `REPLACE INTO idempotency_keys
			(caller, key, created, id, name, category_id, status)
			VALUES (?, ?, ?, ?, ?, ?, ?)`,
		&c.deleteIdempotencyKeys: `DELETE FROM idempotency_keys WHERE (caller, key) IN
			(SELECT caller, key FROM idempotency_keys WHERE created < ? ORDER BY created LIMIT ?)`,
	})
	if err != nil {
		return err
	}
	return openConnections(c.db, 1)
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
func (c *committer) create(who caller, idempotencyKey string, p newPet) (
	stored pet, replayed bool, err error,
) {
	if err := c.checkSealed(); err != nil { // at once, even while another program has the lock
		return pet{}, false, err
	}

	cr := &creation{newPet: p, caller: who, idempotencyKey: idempotencyKey}
	b, first := c.join(cr)
	if first {
		c.write(b)
	}
	<-b.done

	if b.err != nil {
		return pet{}, false, b.err
	}
	return cr.stored, cr.replayed, cr.err
}

// join adds cr to the next batch. The first creation of a batch must write it.
func (c *committer) join(cr *creation) (b *batch, first bool) {
	c.nextMu.Lock()
	defer c.nextMu.Unlock()

	if c.next == nil {
		c.next = &batch{done: make(chan struct{})}
		first = true
	}
	c.next.creations = append(c.next.creations, cr)
	return c.next, first
}

// endJoining ends the batch that creations can join: the next creation begins a new one.
func (c *committer) endJoining() {
	c.nextMu.Lock()
	defer c.nextMu.Unlock()
	c.next = nil
}

// write stores the batch b, sets its results and closes b.done.
func (c *committer) write(b *batch) {
	defer exitOnPanic()

	c.mu.Lock()
	b.err = c.transact(b)
	if b.err != nil {
		c.db.Exec("ROLLBACK") // fails, harmlessly, if no transaction is open
	}

	// Before Unlock: the clients that this wakes up can then join the next batch, which makes
	// creates by 64 clients 12 % faster.
	close(b.done)
	c.mu.Unlock()
}

// transact stores the batch b in a transaction. After an error, the transaction may be open.
func (c *committer) transact(b *batch) error {
	_, beginErr := c.begin.Exec() // while it waits for another program, creations join b
	c.endJoining()
	if err := c.checkPlace(); err != nil {
		return err // even if there is a beginErr: this is the cause
	}
	if beginErr != nil { // whatever it is, nothing is stored
		return fmt.Errorf("%w: %w", errUnavailable, beginErr)
	}

	now := time.Now()
	idempotencyKeys := 0
	for _, cr := range b.creations {
		if err := c.insert(cr, now); err != nil {
			return asUnavailable(err)
		}
		if cr.idempotencyKey != "" {
			idempotencyKeys++
		}
	}

	// Two expired Idempotency-Keys go for each one that comes, so that they cannot pile up.
	if idempotencyKeys > 0 {
		oldest := now.Add(-idempotencyKeyLifetime).Unix()
		if _, err := c.deleteIdempotencyKeys.Exec(oldest, 2*idempotencyKeys); err != nil {
			return asUnavailable(err)
		}
	}

	_, err := c.commit.Exec()
	c.changes.Add(1) // even after an error: the animals may be on disk
	return asUnavailable(err)
}

// insert stores cr in the open transaction, or finds the first response to its Idempotency-Key.
//
// An error of SQLite, also one that a trigger raises, is returned, and fails the whole batch: the
// transaction may have ended. An error of cr alone is left in cr.err.
func (c *committer) insert(cr *creation, now time.Time) error {
	if cr.idempotencyKey != "" {
		found, err := c.replay(cr, now)
		if found || err != nil {
			return err
		}
	}

	result, err := c.insertPet.Exec(cr.Name, cr.CategoryID, cr.Status)
	if err != nil {
		return err
	}
	// A trigger can leave the animal out without an error, and LastInsertId is then that of
	// another animal.
	if inserted, _ := result.RowsAffected(); inserted == 0 {
		cr.err = errors.New("a trigger in the database left the animal out")
		return nil
	}
	id, _ := result.LastInsertId()
	cr.stored = pet{ID: id, newPet: cr.newPet}

	if cr.idempotencyKey == "" {
		return nil
	}
	_, err = c.insertIdempotencyKey.Exec(cr.caller[:], cr.idempotencyKey, now.Unix(),
		id, cr.Name, cr.CategoryID, cr.Status)
	return err
}

// replay looks for the first response to the Idempotency-Key of cr. If it is found, cr has its
// result.
func (c *committer) replay(cr *creation, now time.Time) (found bool, err error) {
	p := &cr.stored
	oldest := now.Add(-idempotencyKeyLifetime).Unix()
	err = c.selectIdempotencyKey.QueryRow(cr.caller[:], cr.idempotencyKey, oldest).
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

// seal makes all creations fail from now on. Nothing undoes it.
func (c *committer) seal(reason error) {
	err := fmt.Errorf("%w: %w", errUnavailable, reason)
	c.sealed.Store(&err)
}

// checkSealed returns errUnavailable, wrapped, if c is sealed.
func (c *committer) checkSealed() error {
	if err := c.sealed.Load(); err != nil {
		return *err
	}
	return nil
}

// checkPlace returns errUnavailable, wrapped, if c is sealed, or if the database is not in its
// place.
//
// It does not look at the WAL: after a look, Linux updates the time of that file at the next write,
// which makes a create slower by a seventh. So after the WAL was deleted, animals are acknowledged
// until the watcher looks, and saves them.
func (c *committer) checkPlace() error {
	if err := c.checkSealed(); err != nil {
		return err
	}
	if !c.mainFile.inPlace() {
		return fmt.Errorf("%w: %q is not in its place", errUnavailable, c.mainFile.path)
	}
	return nil
}

// watcher looks for commits of other programs, and for files of the database that were moved,
// deleted or replaced.
//
// SQLite goes on with the files that it has opened, wherever they are now, and what is stored in
// them would be lost. So the watcher then seals the committer, for good, and saves the WAL in the
// database. Otherwise, the next process would not find the WAL, or would apply it to another
// database.
type watcher struct {
	db        *sql.DB      // one connection, which waits for no lock
	files     []openedFile // of the database; set by openParts
	committer *committer
	logger    *slog.Logger
	closing   chan struct{} // stop sends on it

	// These belong to the goroutine of watch, and after it to stop.
	dataVersion int64  // PRAGMA data_version at the last look
	moved       string // the file that was not in its place, or ""
	saved       bool   // what the WAL held when that was noticed is in the database
	logged      string // the last advice in the log
}

func newWatcher(path string, c *committer, logger *slog.Logger) *watcher {
	return &watcher{
		db:        newPool(path, "rw", 1, "busy_timeout(0)"),
		committer: c,
		logger:    logger,
		closing:   make(chan struct{}),
	}
}

// watch looks every watchInterval, until stop is called.
func (w *watcher) watch() {
	ticks := time.Tick(watchInterval)
	for {
		w.lookForCommits()
		w.lookForMovedFiles()

		select {
		case <-ticks:
		case <-w.closing:
			return
		}
	}
}

// stop ends watch, and looks for moved files once more.
func (w *watcher) stop() {
	w.closing <- struct{}{} // watch receives it between two looks
	w.lookForMovedFiles()
}

// lookForCommits counts a change if there was a commit since the last look. (It also counts those
// of this process a second time.)
func (w *watcher) lookForCommits() {
	var dataVersion int64
	err := w.db.QueryRow("PRAGMA data_version").Scan(&dataVersion)
	if err != nil || dataVersion != w.dataVersion {
		w.committer.changes.Add(1)
	}
	w.dataVersion = dataVersion
}

// lookForMovedFiles seals the committer if a file is not in its place, and saves the WAL. As long
// as other programs prevent that, later calls try again.
func (w *watcher) lookForMovedFiles() {
	if w.saved {
		return
	}
	if w.moved == "" {
		w.moved = w.findMovedFile()
		if w.moved == "" {
			return
		}
		w.sealAndLog("do not restart it yet") // before saveWAL, which may have to wait
	}

	err := w.saveWAL()
	switch {
	case err == nil:
		w.saved = true
		w.sealAndLog("the write-ahead log is saved: end all other programs that use the database, " +
			"rescue the database if it is gone (see README.md), and restart")
	case errors.Is(err, errNewWAL):
		w.sealAndLog(fmt.Sprintf("%v: end all other programs that use the database, "+
			"rescue the open files (see README.md), and restart", err))
	default:
		w.sealAndLog(fmt.Sprintf("do not restart it yet, "+
			"but end all other programs that use the database: %v", err))
	}
}

// findMovedFile returns the first file that is not in its place, or "".
func (w *watcher) findMovedFile() string {
	for _, f := range w.files {
		if !f.inPlace() {
			return f.path
		}
	}
	return ""
}

// sealAndLog seals the committer, with advice for the operator, and logs that unless it has just
// been logged.
func (w *watcher) sealAndLog(advice string) {
	if advice == w.logged {
		return
	}
	w.logged = advice
	reason := fmt.Errorf("%q was moved, deleted or replaced while the service ran; %s",
		w.moved, advice)
	w.committer.seal(reason)
	w.logger.Error("nothing can be created any more", "error", reason)
}

// errNewWAL means that the WAL at the path, or its index, is no longer the one that was opened.
var errNewWAL = errors.New("another program has begun a new write-ahead log or index, " +
	"so that the old one cannot be saved")

// saveWAL moves what the WAL holds to the database, wherever both are now. It returns errNewWAL if
// that would damage the database.
//
// It waits for a transaction of the committer, which may wait for the lock of another program. It
// does not wait for readers of the WAL. As the committer is sealed, nothing fills the WAL again.
func (w *watcher) saveWAL() error {
	w.committer.mu.Lock()
	defer w.committer.mu.Unlock()

	// If another program has begun a new WAL, or a new index of it, a checkpoint would damage the
	// database.
	for _, f := range w.files[1:] {
		now, err := os.Lstat(f.path)
		if err == nil && now.Mode().IsRegular() && now.Size() > 0 && !os.SameFile(now, f.info) {
			return errNewWAL
		}
	}

	var busy, frames, copied int
	err := w.db.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &copied)
	if err == nil && busy != 0 {
		err = errors.New("the write-ahead log is in use")
	}
	return err
}

// openedFile is a file that was opened at path.
type openedFile struct {
	path string
	info os.FileInfo
}

// openedFiles returns the files of the open database at path: itself, its WAL and the index.
func openedFiles(path string) (files []openedFile, err error) {
	for _, suffix := range []string{"", "-wal", "-shm"} {
		info, err := os.Lstat(path + suffix)
		if err != nil {
			return nil, err
		}
		files = append(files, openedFile{path: path + suffix, info: info})
	}
	return files, nil
}

// inPlace reports whether the file is still at its path.
func (f openedFile) inPlace() bool {
	now, err := os.Lstat(f.path)
	if err != nil { // others than these two say nothing about the file
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR)
	}
	return os.SameFile(now, f.info)
}

// backup writes a copy of the database at path, which may be in use, to the new file target. The
// copy gets that name once it is verified and on disk.
func backup(ctx context.Context, path, target string) error {
	path, err := resolve(path)
	if err != nil {
		return err
	}
	target, err = filepath.Abs(target)
	if err != nil {
		return err
	}
	if err := refuseOrphanedWAL(path); err != nil {
		return err
	}
	// SQLite would apply an old -wal or -journal to the copy.
	for _, file := range []string{target, target + "-wal", target + "-journal"} {
		if _, err := os.Lstat(file); err == nil {
			return fmt.Errorf("%q exists already; name a new file", file)
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
	return syncPath(filepath.Dir(target))
}

// copyDatabase writes a copy of the database at path to the empty file target.
func copyDatabase(ctx context.Context, path, target string) error {
	db := newPool(path, "rw", 1)
	defer db.Close()

	version, err := readSchemaVersion(db)
	if err != nil {
		return err
	}
	if version == 0 {
		return fmt.Errorf("%q is empty", path)
	}
	_, err = db.ExecContext(ctx, "VACUUM INTO ?", target)
	return err
}

// verify returns an error if the database at path is damaged.
func verify(ctx context.Context, path string) error {
	db := newPool(path, "rw", 1) // with "ro", SQLite would not verify the CHECKs
	defer db.Close()

	var result string
	if err := db.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result); err != nil {
		return err
	}
	if result != "ok" {
		return errors.New("the database is damaged: " + result)
	}
	return nil
}

// migrate brings the schema of db, a pool of one connection, up to date, in one transaction.
//
// It changes nothing, and returns an error, if the database is not one of this service, was
// written by a newer version, or cannot be written.
func migrate(db *sql.DB) (isNew bool, err error) {
	if _, err := db.Exec("BEGIN IMMEDIATE"); err != nil {
		return false, err
	}
	defer db.Exec("ROLLBACK") // fails, harmlessly, after COMMIT

	version, err := readSchemaVersion(db)
	if err != nil {
		return false, err
	}
	isNew = version == 0

	for ; version < len(migrations); version++ {
		if _, err := db.Exec(migrations[version]); err != nil {
			return false, err
		}
		if _, err := db.Exec(fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
			return false, err
		}
	}

	// This fails if the file is read-only, where BEGIN IMMEDIATE alone succeeds. It deletes nothing,
	// and so writes nothing: a start should succeed on a full disk, because lists work there.
	if _, err := db.Exec("DELETE FROM pets WHERE id = 0"); err != nil {
		return false, err
	}

	_, err = db.Exec("COMMIT")
	return isNew, err
}

// readSchemaVersion returns the schema version of a database, 0 if it is empty. It returns an
// error if the database is of another program, or of a newer version of this one.
func readSchemaVersion(db *sql.DB) (version int, err error) {
	var id, objects int
	err = db.QueryRow(`SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
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
	if version > len(migrations) {
		return 0, errors.New("a newer version of this service has written it; run that version")
	}
	return version, nil
}

// resolve follows a link to the database, because SQLite keeps the other files beside its target.
// If there is nothing at path, it returns path.
func resolve(path string) (string, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return path, nil
	}
	return filepath.EvalSymlinks(path)
}

// refuseOrphanedWAL returns an error if there is a WAL for the database at path, but no database.
// SQLite would take that for a new database, and delete the WAL.
func refuseOrphanedWAL(path string) error {
	_, walErr := os.Lstat(path + "-wal") // first: another process may be creating the database
	info, err := os.Stat(path)
	missing := err != nil || info.Size() <= 1 // SQLite takes a file of one byte for empty
	if walErr == nil && missing {
		return fmt.Errorf("there is no database, but %q is the write-ahead log of one; "+
			"put that database back, or move the log away to start with an empty database", path+"-wal")
	}
	return nil
}

// syncWAL makes the WAL of the database at path durable, if there is one.
//
// A killed process may have left commits in it that are not on disk yet. SQLite recovers them
// without a sync. A replayed 201 would then acknowledge an animal that a loss of power can still
// take.
func syncWAL(path string) error {
	info, err := os.Stat(path + "-wal")
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	if err := syncPath(path + "-wal"); err != nil {
		return err
	}
	return syncPath(filepath.Dir(path))
}

// syncPath makes the file at path durable, or the names in the folder at path.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if runtime.GOOS == "windows" {
		return nil // it cannot sync what was opened to read, or folders
	}
	return f.Sync()
}

// newPool returns a pool of up to size connections to the database at path, which is absolute.
// None is open yet. mode is SQLite's: ro, rw or rwc. The pragmas may override busyTimeout.
// fullfsync makes a difference on macOS, where fsync leaves data in the cache of the disk.
func newPool(path, mode string, size int, pragmas ...string) *sql.DB {
	query := url.Values{
		"mode":          {mode},
		"_busy_timeout": {fmt.Sprint(busyTimeout.Milliseconds())},
		"_error_rc":     {"1"}, // or an error could quote the message of another one
		"_pragma":       append(pragmas, "fullfsync(ON)", "checkpoint_fullfsync(ON)"),
	}
	path = "/" + strings.TrimPrefix(filepath.ToSlash(path), "/") // on Windows: /C:/...
	location := url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}

	db, _ := sql.Open("sqlite", location.String()) // fails only if there is no such driver
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return db
}

// setWALMode puts a database into WAL mode, in which it stays. It waits for another first start of
// the service, as SQLite itself does not do here.
func setWALMode(db *sql.DB) error {
	deadline := time.Now().Add(busyTimeout)
	for {
		var mode string
		err := db.QueryRow("PRAGMA journal_mode = WAL").Scan(&mode)
		if sqliteCode(err) == sqlite3.SQLITE_BUSY && time.Now().Before(deadline) {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if err == nil && mode != "wal" {
			err = errors.New("this file system does not allow WAL mode; use a local disk")
		}
		return err
	}
}

// openConnections opens all connections of db, a pool of this size, for good: one opened later
// would open whatever is at the path by then.
func openConnections(db *sql.DB, size int) error {
	for range size {
		// SQLite opens the WAL with the first read, which Query begins.
		rows, err := db.Query("SELECT 1 FROM pets LIMIT 1")
		if err != nil {
			return err
		}
		defer rows.Close() // gives the connection back to db, when all are open
	}
	return nil
}

// prepare prepares the statements with these queries.
func prepare(db *sql.DB, queries map[**sql.Stmt]string) (err error) {
	for statement, query := range queries {
		*statement, err = db.Prepare(query)
		if err != nil {
			return err
		}
	}
	return nil
}

// exitOnPanic, deferred, ends the program after a panic in the store.
//
// If the panic were recovered, as those of handlers are, the program would go on without one of
// its connections, or with a transaction that stays open.
func exitOnPanic() {
	if p := recover(); p != nil {
		time.AfterFunc(time.Second, func() { os.Exit(2) }) // in case nobody reads standard error
		fmt.Fprintf(os.Stderr, "panic: %v\n%s", p, debug.Stack())
		os.Exit(2)
	}
}

// asUnavailable wraps an error of SQLite in errUnavailable if its cause may pass and nothing is
// stored.
func asUnavailable(err error) error {
	switch sqliteCode(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL:
		return fmt.Errorf("%w: %w", errUnavailable, err)
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
