package main

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// These tests let the service lose files of its database: while it runs, or after a kill. See store
// in store.go for what these files are, and its end for the links to them.

// ending is what comes of lost files when the program has ended.
type ending struct {
	stopStatus int  // of the program, if it was stopped
	refused    bool // a start and a backup are refused, until the files are put back
}

var (
	starts           = ending{stopStatus: 0}
	startsAfterError = ending{stopStatus: 1}
	refuses          = ending{stopStatus: 1, refused: true}
)

// TestLostFiles lets the program lose its files by a command of an operator, and then stops or
// kills it. Nothing that was acknowledged may be lost by that.
func TestLostFiles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		why             string
		commands        []string // one of them runs in the folder of animals.db
		afterStop       ending
		afterSharedStop ending // another program keeps the database open
		afterKill       ending // alone, or beside another program
	}{
		{
			why: "only the links have the database",
			commands: []string{
				"rm animals.db", "mv animals.db moved", "cp animals.db new; mv new animals.db",
				"rm animals.db animals.db-wal", "rm animals.db*",
				"mkdir new; cp animals.db* new; mv new/* .",
			},
			afterStop:       refuses,
			afterSharedStop: refuses,
			afterKill:       refuses,
		},
		{
			why: "the last close of all programs copies the WAL to the database",
			commands: []string{
				"rm animals.db-wal", "mv animals.db-wal moved", ": >new; mv new animals.db-wal",
			},
			afterStop:       starts,
			afterSharedStop: refuses,
			afterKill:       refuses,
		},
		{
			why:             "a stop does not close the database without the -shm",
			commands:        []string{"rm animals.db-wal animals.db-shm"},
			afterStop:       refuses,
			afterSharedStop: refuses,
			afterKill:       refuses,
		},
		{
			why:             "beside the WAL, a start puts the -shm back",
			commands:        []string{"rm animals.db-shm"},
			afterStop:       startsAfterError,
			afterSharedStop: startsAfterError,
			afterKill:       starts,
		},
		{
			why:             "beside the WAL, another -shm is refused",
			commands:        []string{"cp animals.db-shm new; mv new animals.db-shm"},
			afterStop:       refuses,
			afterSharedStop: refuses,
			afterKill:       refuses,
		},
	} {
		for _, command := range c.commands {
			for _, end := range []struct {
				name   string
				signal os.Signal
				shared bool // another program keeps the database open
				want   ending
			}{
				{"stop", syscall.SIGTERM, false, c.afterStop},
				{"stop beside another program", syscall.SIGTERM, true, c.afterSharedStop},
				{"kill", syscall.SIGKILL, false, c.afterKill},
				{"kill beside another program", syscall.SIGKILL, true, c.afterKill},
			} {
				t.Run(c.why+": "+command+", "+end.name, func(t *testing.T) {
					t.Parallel()
					file := newFile(t)
					p := start(t, file, withAPIKey)
					p.create(rex).wantNew(t, 1)
					if end.shared {
						keepOpen(t, file)
					}

					inFolder(t, file, command)
					wantNotInItsPlace(t, p.service)
					must(t, p.cmd.Process.Signal(end.signal))
					status := p.wait(t)
					if end.signal == syscall.SIGTERM && status != end.want.stopStatus {
						t.Errorf("the status of the stop is %d, want %d", status, end.want.stopStatus)
					}
					if end.want.refused {
						wantLost(t, file)
						inFolder(t, file, putBack)
					}
					startAgain(t, file)
				})
			}
		}
	}
}

// putBack is the command that puts lost files back. deploy/README.md has it, too.
const putBack = "cp -lf .animals.db.links/* ."

// keepOpen lets another program open a database, and keep it open.
func keepOpen(t *testing.T, file string) (other *sql.DB) {
	t.Helper()
	other = connect(t, file)
	_, err := other.Exec("SELECT * FROM pets")
	must(t, err)
	return other
}

// inFolder runs a shell command in the folder of a file.
func inFolder(t *testing.T, file, command string) {
	t.Helper()
	c := exec.Command("sh", "-c", command)
	c.Dir = filepath.Dir(file)
	if output, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, output)
	}
}

// wantNotInItsPlace checks that a service refuses to add animals, but returns them.
func wantNotInItsPlace(t *testing.T, s *service) {
	t.Helper()
	s.create(rex).wantError(t, 503, "unavailable", unavailable)
	s.get("/healthz").wantError(t, 503, "unavailable", unavailable)
	s.get("/v1/pets/1").want(t, 200)
}

// wantLost checks that a start and a backup are refused, and say where the files are. They are
// processes of their own: in one process, SQLite uses one -shm for all names of a database.
func wantLost(t *testing.T, file string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // in case it starts
	defer cancel()
	for _, args := range [][]string{
		{"-addr", "127.0.0.1:0", "-db", file},
		{"-db", file, "-backup", file + ".copy"},
	} {
		output, err := program(ctx, t, withAPIKey, args...).CombinedOutput()
		want := fmt.Sprintf("all animals are in %q", filepath.Dir(file)+"/.animals.db.links")
		if err == nil || !strings.Contains(string(output), want) {
			t.Fatalf("%q = %v, %s, want %s", args, err, output, want)
		}
	}
}

// startAgain starts the program with a database, in which Rex must be the only animal, with the id
// 1. The next animal must get the id 2.
func startAgain(t *testing.T, file string) {
	t.Helper()
	p := start(t, file, withAPIKey)
	p.get("/v1/pets").want(t, 200).
		wantBody(t, `[{"id":1,"name":"Rex","categoryId":7,"status":"available"}]`+"\n")
	p.create(rex).wantNew(t, 2)
	wantSQL(t, file, "PRAGMA integrity_check", "ok")
}

// TestAfterKill does something to the files of a program that was killed, with Rex in its WAL.
func TestAfterKill(t *testing.T) {
	t.Parallel()
	// look reads the database as another program does. When it ends, SQLite copies the WAL to the
	// database, and deletes the WAL.
	look := func(t *testing.T, file string) { wantPetCount(t, file, 1) }
	for _, c := range []struct {
		name string
		do   func(t *testing.T, file string)

		refused bool // a start and a backup are refused, until the files are put back
	}{
		{"nothing", func(*testing.T, string) {}, false},
		{"the -shm is deleted", func(t *testing.T, file string) {
			inFolder(t, file, "rm animals.db-shm")
		}, false},
		{"another program looks", look, false},
		{"one looks, and one keeps the database open", func(t *testing.T, file string) {
			look(t, file)
			keepOpen(t, file) // with a new WAL
		}, false},
		{"one looks, and one makes the database grow", func(t *testing.T, file string) {
			look(t, file)
			execSQL(t, file, "CREATE TABLE t (c); INSERT INTO t VALUES (zeroblob(100000))")
		}, false},

		{"the -wal is deleted", func(t *testing.T, file string) {
			inFolder(t, file, "rm animals.db-wal")
		}, true},
		{"the -wal is deleted, and another program looks", func(t *testing.T, file string) {
			inFolder(t, file, "rm animals.db-wal")
			wantPetCount(t, file, 0)
		}, true},
		{"the -wal and the -shm are deleted, and the database was half copied",
			func(t *testing.T, file string) {
				// Page 3 has sqlite_sequence. SQLite has written it to the WAL with Rex, too.
				inFolder(t, file, "rm animals.db-wal animals.db-shm; "+
					"dd if=/dev/zero of=animals.db bs=4096 seek=2 count=1 conv=notrunc")
			}, true},
		{"all is deleted, and only the database is put back", func(t *testing.T, file string) {
			inFolder(t, file, "rm animals.db*; mv .animals.db.links/animals.db .")
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := newFile(t)
			p := start(t, file, withAPIKey)
			// An id of another table tells nothing of the animals. Empty the WAL, so that it has
			// only Rex.
			execSQL(t, file, `CREATE TABLE others (id INTEGER PRIMARY KEY AUTOINCREMENT);
				INSERT INTO others VALUES (1000); PRAGMA wal_checkpoint(TRUNCATE)`)
			p.create(rex).wantNew(t, 1)
			p.kill(t)

			c.do(t, file)
			if c.refused {
				wantLost(t, file)
				inFolder(t, file, putBack)
			}
			startAgain(t, file)
		})
	}
}

// killedWithRex returns the name of a database with Rex, whose program was killed.
func killedWithRex(t *testing.T) (file string) {
	t.Helper()
	file = newFile(t)
	p := start(t, file, withAPIKey)
	p.create(rex).wantNew(t, 1)
	p.kill(t)
	return file
}

// TestAnimalAddedAfterKill adds an animal by SQL to the database of a program that was killed: the
// WAL that is linked then has fewer animals than the database.
func TestAnimalAddedAfterKill(t *testing.T) {
	t.Parallel()
	file := killedWithRex(t)
	execSQL(t, file, "INSERT INTO pets (name, category_id) VALUES ('Tom', 1)")
	start(t, file, withAPIKey).create(rex).wantNew(t, 3)
}

// TestLostWALBesideAnotherProgram deletes the WAL of a program that was killed. Then another
// program opens the database, and uses the -shm with a new, empty WAL.
func TestLostWALBesideAnotherProgram(t *testing.T) {
	t.Parallel()
	file := killedWithRex(t)
	inFolder(t, file, "rm animals.db-wal")
	other := keepOpen(t, file)

	wantLost(t, file)
	must(t, other.Close())
	inFolder(t, file, putBack)
	startAgain(t, file)
}

// TestCopiedWALBesideAnotherProgram stops the program beside another one, which copies the WAL to
// the database. Then the WAL is deleted. No animal is lost, but a start would make a new WAL, and
// the other program would use its -shm, which is still there, for both WALs.
func TestCopiedWALBesideAnotherProgram(t *testing.T) {
	t.Parallel()
	file := newFile(t)
	p := start(t, file, withAPIKey)
	p.create(rex).wantNew(t, 1)
	other := keepOpen(t, file)
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	p.wait(t)
	_, err := other.Exec("PRAGMA wal_checkpoint")
	must(t, err)
	inFolder(t, file, "rm animals.db-wal")

	wantLost(t, file)
	must(t, other.Close())
	inFolder(t, file, putBack)
	startAgain(t, file)
}

// TestUnreadableLinks empties the database of a program that was killed, which is the same file as
// its link, and deletes its WAL. Nobody can tell whether animals are lost. A start that went on
// would delete the link to the WAL.
func TestUnreadableLinks(t *testing.T) {
	t.Parallel()
	file := killedWithRex(t)
	inFolder(t, file, "rm animals.db-wal animals.db-shm; : >animals.db")
	err := checkLinks(file)
	if err == nil || !strings.Contains(err.Error(), "looking for lost animals: ") {
		t.Fatalf("checkLinks = %v, want an error of the search", err)
	}
}

// TestMovedFolder moves the folder of a running program, with the links in it, and stops it.
func TestMovedFolder(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "folder")
	must(t, os.Mkdir(folder, 0o700))
	file := filepath.Join(folder, "animals.db")
	p := start(t, file, withAPIKey)
	p.create(rex).wantNew(t, 1)
	must(t, os.Rename(folder, folder+".away"))

	wantNotInItsPlace(t, p.service)
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if status := p.wait(t); status != 1 {
		t.Fatalf("the status of the stop is %d, want 1", status)
	}
	p.log.wantText(t, "animalstore: the database is not in its place", "; look for its files in ")
	wantRefusal(t, filepath.Dir(folder), withAPIKey, 1, "unable to open database file (14)",
		"-addr", "127.0.0.1:0", "-db", file)
	must(t, os.Rename(folder+".away", folder))
	startAgain(t, file)
}

// TestFilesPutBack moves each file of a running service away, and puts it back. Creates must get
// 503 while it is away.
func TestFilesPutBack(t *testing.T) {
	t.Parallel()
	for _, suffix := range fileSuffixes {
		t.Run("animals.db"+suffix, func(t *testing.T) {
			t.Parallel()
			s := newService(t)
			s.create(rex).wantNew(t, 1)
			must(t, os.Rename(s.file+suffix, s.file+".away"))
			wantNotInItsPlace(t, s)
			s.log.wantText(t, "level=ERROR", "the database is not in its place")

			must(t, os.Rename(s.file+".away", s.file+suffix))
			s.get("/healthz").want(t, 200)
			s.create(rex).wantNew(t, 2)
			must(t, s.close())
			wantOnly(t, filepath.Dir(s.file), "animals.db") // no WAL, and no links
			wantPetCount(t, s.file, 2)
		})
	}
}

// TestDatabasePutBackFromItsLink deletes the database of a running service, and moves its link
// back: the stop must find that nothing is lost, although the link is gone.
func TestDatabasePutBackFromItsLink(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).wantNew(t, 1)
	inFolder(t, s.file, "rm animals.db; mv .animals.db.links/animals.db .")
	must(t, s.close())
	wantOnly(t, filepath.Dir(s.file), "animals.db")
	startAgain(t, s.file)
}

// TestDeletedSHM deletes the -shm of a running service, and starts another one: it must put the
// -shm back, because it has the locks that keep them from writing at the same time.
func TestDeletedSHM(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).wantNew(t, 1)
	must(t, os.Remove(s.file+"-shm"))
	other := openService(t, s.file)
	other.create(rex).wantNew(t, 2)
	s.create(rex).wantNew(t, 3)

	must(t, other.close()) // s still needs the links
	wantOnly(t, filepath.Dir(linkOf(s.file)), "animals.db", "animals.db-shm", "animals.db-wal")
}

// TestMoveDuringACreate moves the database while a create waits for a lock: it must get 503. After
// the stop, the moved file must have all animals, and the WAL must be empty: SQLite would apply it
// to that file when it is moved back.
func TestMoveDuringACreate(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).wantNew(t, 1)
	unlock := lock(t, s.file)
	created := make(chan reply, 1)
	go func() { created <- s.create(rex) }()
	s.awaitCreate()
	must(t, os.Rename(s.file, s.file+".away"))
	unlock()
	(<-created).wantError(t, 503, "unavailable", unavailable)

	if err := s.close(); err == nil || !strings.Contains(err.Error(), "all animals are in ") {
		t.Fatalf("close = %v, want that animals are in the links", err)
	}
	wantPetCount(t, s.file+".away", 1)
	if wal := readFile(t, s.file+"-wal"); wal != "" {
		t.Fatalf("the WAL has %d bytes, want none", len(wal))
	}
}

// others is what the SQL function await_others() waits for.
var others sync.WaitGroup

// TestListsOfAMovedDatabase sends four lists, each of which waits in SQLite for the others: so the
// service needs four connections at a time, which is the least number that it has. It must have
// opened them before the database was moved.
func TestListsOfAMovedDatabase(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	replaceByView(t, s.file, "pets", "* FROM real WHERE await_others()")
	must(t, os.Rename(s.file, s.file+".away"))

	var replies [4]reply
	others.Add(len(replies))
	var lists sync.WaitGroup
	for i := range replies {
		lists.Go(func() { replies[i] = s.get("/v1/pets") })
	}
	lists.Wait()
	for _, r := range replies {
		r.want(t, 200).
			wantBody(t, `[{"id":1,"name":"Rex","categoryId":7,"status":"available"}]`+"\n")
	}
}

// TestIdleReaders lets a day pass, under a fake clock. The service must keep its connections open.
// The database is moved first, so a new connection could not read it.
func TestIdleReaders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		must(t, os.Rename(s.file, s.file+".away"))
		time.Sleep(24 * time.Hour)
		s.get("/v1/pets").want(t, 200)
	})
}

// TestStartAfterKill opens the database of a program that was killed. The start must commit
// something, to sync the WAL, because the newest animals may not be on disk. It must make new
// links.
func TestStartAfterKill(t *testing.T) {
	t.Parallel()
	file := killedWithRex(t)
	before := readFile(t, file+"-wal")
	link := linkOf(file)
	writeFile(t, filepath.Join(filepath.Dir(link), "old"), "")

	openService(t, file)
	if readFile(t, file+"-wal") == before {
		t.Fatal("the start has committed nothing")
	}
	wantOnly(t, filepath.Dir(link), "animals.db", "animals.db-shm", "animals.db-wal")
	for _, suffix := range fileSuffixes {
		if differs(file+suffix, link+suffix) {
			t.Fatalf("%s leads to another file", link+suffix)
		}
	}
}

// TestTruncatedWAL stops a service after another program has copied the WAL to the database, and
// then emptied it: the stop must find that nothing is lost.
func TestTruncatedWAL(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.create(rex).want(t, 201)
	execSQL(t, s.file, "PRAGMA wal_checkpoint(TRUNCATE)")
	must(t, s.close())
	wantOnly(t, filepath.Dir(s.file), "animals.db")
}

// TestWithoutLinks opens a database with a name that is too long for a folder of links: the service
// must warn, and serve. A stop must notice that the database was moved.
func TestWithoutLinks(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), strings.Repeat("x", 250)) // the longest name has 255 bytes
	must(t, os.Rename(newClosedDatabase(t), file))
	s := openService(t, file)
	s.log.wantText(t, `level=WARN msg="the files of the database have no links"`)
	s.create(rex).wantNew(t, 2)
	s.get("/healthz").want(t, 200)

	moved := filepath.Join(filepath.Dir(file), "moved")
	must(t, os.Rename(file, moved))
	if err := s.close(); err == nil || !strings.Contains(err.Error(), "not in its place") {
		t.Fatalf("close = %v, want that the database is not in its place", err)
	}
	wantPetCount(t, moved, 2)
}
