package main

import (
	"database/sql/driver"
	"errors"
	"testing"

	"modernc.org/sqlite"
)

// This file has the ways in which tests make SQLite fail.

// registerSQL adds three SQL functions to SQLite: fail(message) returns an error, panic_now()
// panics, and await_others() waits for the other lists of TestListsOfAMovedDatabase, and is true.
func registerSQL() {
	register := func(name string, args int32, f func(args []driver.Value) error) {
		sqlite.MustRegisterScalarFunction(name, args,
			func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
				return int64(1), f(args)
			})
	}
	register("fail", 1, func(args []driver.Value) error { return errors.New(args[0].(string)) })
	register("panic_now", 0, func([]driver.Value) error { panic("a mistake") })
	register("await_others", 0, func([]driver.Value) error {
		others.Done()
		others.Wait()
		return nil
	})
}

// replaceByView renames a table to real, and puts a view in its place: SELECT with these columns,
// FROM and WHERE. A SELECT from the table then calls the functions in the view, once for each row.
// (SQLite notices that the schema has changed, and prepares the statements of the service again.)
func replaceByView(t *testing.T, file, table, view string) {
	t.Helper()
	execSQL(t, file, "ALTER TABLE "+table+" RENAME TO real; CREATE VIEW "+table+" AS SELECT "+view)
}

// beforeInsert lets each INSERT into a table call a function first.
func beforeInsert(t *testing.T, file, table, call string) {
	t.Helper()
	execSQL(t, file, "CREATE TRIGGER sabotage BEFORE INSERT ON "+table+" BEGIN SELECT "+call+"; END")
}

// breakCommit makes each COMMIT of an animal named Rex fail: with Rex, a trigger inserts a row that
// refers to a missing animal, and SQLite checks such a deferred reference at COMMIT.
func breakCommit(t *testing.T, s *service) {
	t.Helper()
	s.pragma(t, "foreign_keys = ON")
	execSQL(t, s.file, `CREATE TABLE friends (id REFERENCES pets DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER sabotage AFTER INSERT ON pets WHEN new.name = 'Rex'
		BEGIN INSERT INTO friends VALUES (-1); END`)
}

// breakIndex damages pets_by_status: it makes the index anew, of names, and then changes only its
// SQL back, as writable_schema permits. So SQLite misses the statuses in the index.
func breakIndex(t *testing.T, file string) {
	t.Helper()
	execSQL(t, file, `DROP INDEX pets_by_status;
		CREATE INDEX pets_by_status ON pets (name);
		PRAGMA writable_schema = ON;
		UPDATE sqlite_schema SET sql = replace(sql, '(name)', '(status)')
			WHERE name = 'pets_by_status'`)
}

// pragma runs a PRAGMA on the connection that stores animals.
func (s *service) pragma(t testing.TB, pragma string) {
	t.Helper()
	_, err := s.writer.Exec("PRAGMA " + pragma)
	must(t, err)
}
