#!/bin/sh
# Saves the animals after files of the database were moved, deleted or replaced while the service
# runs. Run it as root, before you stop or restart the service, which may have the only copy open:
#
#   sh rescue.sh
#
# It freezes the service, copies the database and the write-ahead log that it has open, and verifies
# that copy. Then it starts the service with the copy. The files that were there are kept beside it.
# If the copy fails, the service goes on as it was.
set -eu

folder=/var/lib/animalstore
db=$folder/animalstore.db
copy=/var/backups/animalstore/rescue-$(date -u +%Y-%m-%d-%H%M%S)

fail() {
    echo "rescue.sh: $*" >&2
    exit 1
}

# is_open reports whether the service has the file open that has this name now.
is_open() { find -L "/proc/$pid/fd" -samefile "$1" 2>/dev/null | grep -q .; }

# copy_open_files copies the database and its log, which are known by their first bytes, because
# their names may have changed.
copy_open_files() {
    for file in "/proc/$pid/fd"/*; do
        [ -f "$file" ] || continue
        case $(head -c 4 "$file" | od -An -tx1 | tr -d ' ') in
        53514c69) cp "$file" "$copy/rescued.db" ;;
        377f0682 | 377f0683) cp "$file" "$copy/rescued.db-wal" ;;
        esac
    done
}

[ "$(id -u)" -eq 0 ] || fail 'run it as root'
pid=$(systemctl show -P MainPID animalstore)
[ "$pid" -gt 0 ] || fail 'the service does not run, so it has nothing open. Restore a backup.'
! { is_open "$db" && is_open "$db-wal"; } ||
    fail 'the service has the files open that are there: there is nothing to rescue.'

install -d -m 700 "${copy%/*}"
mkdir "$copy"
trap 'exit 1' HUP INT TERM
trap 'kill -CONT "$pid"' EXIT
kill -STOP "$pid"
copy_open_files
/usr/local/bin/animalstore -db "$copy/rescued.db" -backup "$copy.db"

# From here on, an interrupt would leave the service without a database.
trap '' HUP INT TERM
trap - EXIT
systemctl kill -s KILL animalstore
systemctl stop animalstore
find "$folder/" -maxdepth 1 -name 'animalstore.db*' -exec mv -t "$copy" {} +
cp "$copy.db" "$db"
chown --reference="$folder/" "$db"
systemctl start animalstore
echo "Rescued $copy.db, with which the service runs. The other files are in $copy."
