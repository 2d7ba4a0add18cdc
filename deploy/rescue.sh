#!/bin/sh
# Saves the animals after files of the database were moved, deleted or replaced while the service
# runs. Run it as root, before you stop or restart the service, which may have the only copy open:
#
#   animalstore-rescue
#
# It freezes the service, copies the database and the write-ahead log that it has open, and verifies
# that copy. Then it starts the service with the copy. If the copy fails, the service goes on as it
# was. The files that are in their place now are kept.
#
# install.sh copies this file to /usr/local/sbin/animalstore-rescue, each time that it runs.
set -eu

folder=/var/lib/animalstore
db=$folder/animalstore.db
name=rescue-$(date -u +%Y-%m-%d-%H%M%S)-$$ # with the number of the process, to be new
copy=/var/backups/animalstore/$name
kept=$folder/before-$name

fail() {
    echo "animalstore-rescue: $*" >&2
    exit 1
}

# is_open reports whether the service has the file open that has this name now.
is_open() { find -L "/proc/$pid/fd" -samefile "$1" 2>/dev/null | grep -q .; }

# copy_open_files copies the database and its log, which are known by their first bytes, because
# their names may have changed.
copy_open_files() {
    for file in "/proc/$pid/fd"/*; do
        [ -f "$file" ] || continue
        case $(head -c 4 "$file" 2>/dev/null | od -An -tx1 | tr -d ' ') in
        53514c69) cp "$file" "$copy/rescued.db" ;;
        377f0682 | 377f0683) cp "$file" "$copy/rescued.db-wal" ;;
        esac
    done
}

[ "$(id -u)" -eq 0 ] || fail 'run it as root'
pid=$(systemctl show -P MainPID animalstore)
[ "$pid" -gt 0 ] || fail 'the service does not run: if files are missing, restore a backup.'
! { is_open "$db" && is_open "$db-wal" && is_open "$db-shm"; } ||
    fail 'the service has the files open that are there: there is nothing to rescue.'

install -d -m 700 "${copy%/*}"
mkdir "$copy"
trap 'exit 1' HUP INT TERM
trap 'kill -CONT "$pid"' EXIT
kill -STOP "$pid"
copy_open_files
/usr/local/bin/animalstore -db "$copy/rescued.db" -backup "$copy.db"
cp "$copy.db" "$folder/rescued.db" # now, while there may be no space for it
chown --reference="$folder/" "$folder/rescued.db"
sync "$folder/rescued.db"
mkdir "$kept"

# From here on, an interrupt would leave the service without a database.
trap '' HUP INT TERM
trap - EXIT
systemctl kill -s KILL animalstore
systemctl stop animalstore
find "$folder/" -maxdepth 1 -name 'animalstore.db*' -exec mv -t "$kept" {} +
mv "$folder/rescued.db" "$db"
systemctl start animalstore
echo "The service runs with $copy.db. The files that were in its place are in $kept."
