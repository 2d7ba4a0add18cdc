#!/bin/sh
# Makes a backup of the animals while the service runs, or while it is stopped. Run it as root:
#
#   animalstore-backup [KIND-]
#
# It prints the name of the backup: /var/backups/animalstore/[KIND-]YYYY-MM-DD-HHMMSS.db (UTC). It
# keeps the newest 30 of each kind, so a backup of another kind, such as change-, is not in the way
# of the daily ones.
#
# install.sh copies this file to /usr/local/sbin/animalstore-backup, each time that it runs.
set -eu
umask 077

kind=${1-}
program=${ANIMALSTORE:-/usr/local/bin/animalstore} # install.sh names the new one
folder=/var/backups/animalstore
time='[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-[0-9][0-9][0-9][0-9][0-9][0-9]'

case $kind in
-* | *[!a-z-]* | *[!-])
    echo 'usage: animalstore-backup [KIND-], where KIND is of small letters, such as change-' >&2
    exit 2
    ;;
esac

install -d -m 700 "$folder"
# A backup that was killed leaves a file behind. A younger one may belong to one that still runs.
find "$folder" -maxdepth 1 -type f -name "*$time.db.*.tmp*" -mtime +0 -delete

# If there is one of this second, the next second has another name.
until new=$folder/$kind$(date -u +%Y-%m-%d-%H%M%S).db && [ ! -e "$new" ]; do sleep 1; done
"$program" -db /var/lib/animalstore/animalstore.db -backup "$new"
echo "$new"

# Their names sort by age. The new one stays even if the clock is wrong.
# shellcheck disable=SC2086 # $time is a pattern
set -- "$folder/$kind"$time.db
while [ $# -gt 30 ]; do
    [ "$1" = "$new" ] || rm -f "$1"
    shift
done
