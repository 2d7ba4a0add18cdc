#!/bin/sh
# Installs the animal store on a server with systemd, upgrades it, or goes back to an older version:
#
#   sh install.sh BINARY
#
# Run it as root, from any folder, as often as you like. If it is interrupted, run it again.
#
# The first time, it makes an API key, and installs the units beside this script. Later, it leaves
# your keys and units as they are.
#
# If BINARY is not the installed one, it makes a backup, puts BINARY in the place of the old binary,
# and restarts the service. If that does not come up, it puts the old binary back. Otherwise, it
# keeps the old one as /usr/local/bin/animalstore-TIME. To go back, run this with that as BINARY.
set -eu

here=$(dirname "$(realpath "$0")")
bin=/usr/local/bin/animalstore
old=$bin.old # the binary from before, until the new one has come up
db=/var/lib/animalstore/animalstore.db
keys=/etc/animalstore/keys
units=/etc/systemd/system

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

# show prints a property of the service.
show() { systemctl show -P "$1" animalstore; }

# place gives FILE.new the name FILE. At any moment, FILE is missing, as before, or complete.
place() {
    sync "$1.new"
    mv -f "$1.new" "$1"
    sync "${1%/*}"
}

# finds reports whether find, with these arguments, finds something.
finds() { find "$@" 2>/dev/null | grep -q .; }

# check refuses what cannot work, before anything is changed. It leaves BINARY's copy in $bin.new.
check() {
    [ $# -eq 1 ] || fail 'usage: sh install.sh BINARY'
    [ "$(id -u)" -eq 0 ] || fail 'run it as root'
    [ -d /run/systemd/system ] || fail 'this machine does not run systemd'
    binary=$(realpath -e "$1")

    exec 9</usr/local/bin # to lock it
    flock -n 9 || echo 'Waiting for another install.sh to end.'
    flock 9
    trap 'rm -f "$bin.new"' EXIT

    files=/proc/$(show MainPID)/fd # that the service has open
    if finds "$files" -lname '*-wal*' &&
        ! { finds -L "$files" -samefile "$db" && finds -L "$files" -samefile "$db-wal"; }; then
        fail "nothing has changed: $db or its -wal file is not in its place." \
            'Do not stop or restart the service: it may have the only copy open.'
    fi

    # With bash, because sh would take the binary for another processor for a script.
    install -m 755 "$binary" "$bin.new"
    case $(timeout 10 bash -c "$bin.new -version") in
    'animalstore '*) return ;;
    esac
    fail "nothing has changed: $binary is not an animalstore for this machine ($(uname -sm))"
}

# install_files installs all but the binary. What you may have edited stays.
install_files() {
    install -d -m 700 /etc/animalstore
    if [ ! -s "$keys" ]; then
        (umask 077 && od -An -v -tx1 -w32 -N32 /dev/urandom | tr -d ' ' >"$keys.new")
        place "$keys"
        echo "Made an API key. It is in $keys"
    fi

    for command in backup rescue; do
        install -m 755 "$here/$command.sh" /usr/local/sbin/animalstore-$command.new
        place /usr/local/sbin/animalstore-$command
    done
    for unit in animalstore.service animalstore-backup.service animalstore-backup.timer; do
        if [ ! -e "$units/$unit" ]; then
            install -m 644 "$here/$unit" "$units/$unit.new"
            place "$units/$unit"
        elif ! cmp -s "$units/$unit" "$here/$unit"; then
            echo "Left $unit as it is. It differs from the new one: diff $units/$unit $here/$unit"
        fi
    done
    systemctl daemon-reload
    systemctl enable -q animalstore
    systemctl enable -q --now animalstore-backup.timer

    if [ -e /etc/cron.daily/animalstore ]; then # of an earlier version; it may have been edited
        mv -f /etc/cron.daily/animalstore /etc/animalstore/cron.daily-not-used
        echo 'animalstore-backup.timer makes the backups now. /etc/cron.daily/animalstore is now' \
            '/etc/animalstore/cron.daily-not-used'
    fi
}

# swap puts the new binary in place. That one makes the backup, too: if it cannot read the database,
# nothing changes.
swap() {
    if [ -s "$db" ]; then
        if ! output=$(ANIMALSTORE=$bin.new /usr/local/sbin/animalstore-backup upgrade- 2>&1); then
            echo "$output"
            explain "$output" "$binary"
            fail 'the service is as it was: the new binary could not make a backup'
        fi
        echo "Made the backup $output"
    fi
    [ ! -e "$bin" ] || [ -e "$old" ] || ln "$bin" "$old"
    place "$bin"
}

# explain MESSAGES BINARY says what to do if they say that BINARY is too old for the database.
explain() {
    case $1 in *'a newer version of this service has written it'*) ;; *) return 0 ;; esac
    for backup in /var/backups/animalstore/upgrade-*.db; do :; done # the last is the newest
    cat <<TEXT
A newer version has changed the database. To use the older version, without the animals that were
added since the backup from before that change, run:
  systemctl stop animalstore
  $2 -db $db -restore $backup && sh $here/install.sh $2 || systemctl start animalstore
TEXT
}

# runs reports whether the service runs, and is the installed binary.
runs() { systemctl is-active -q animalstore && cmp -s "/proc/$(show MainPID)/exe" "$bin"; }

# started prints the line of the log with which the service has said that it serves.
started() {
    journalctl -q -o cat "_SYSTEMD_INVOCATION_ID=$(show InvocationID)" | grep -m 1 ' msg=started '
}

# comes_up restarts the service, and reports whether it serves then. If the unit has Type=notify,
# systemctl waits for that. With the unit of an earlier version, only the log says so.
comes_up() {
    since=$(date +%s)
    systemctl restart animalstore 9<&- || return 1 # which, if this script is killed, must not lock
    start=$(show InvocationID)
    seconds=0
    while [ "$(show Type)" != notify ] && ! started >/dev/null; do
        [ "$seconds" -lt 300 ] && runs || return 1
        sleep 1
        seconds=$((seconds + 1))
    done
    sleep 2
    runs && [ "$(show InvocationID)" = "$start" ] # and not one that died and was restarted
}

# show_log prints why the service has not come up.
show_log() {
    sleep 1 # its last lines may be late
    log=$(journalctl -q -o cat -u animalstore --since "@$since" | tail -n 20)
    printf 'The service does not come up. The end of its log:\n%s\n' "$log"
}

# go_back puts the old binary back, because the new one does not come up.
go_back() {
    show_log
    if [ -e "$old" ]; then
        echo 'Putting the old binary back.'
        mv -f "$old" "$bin"
        ! comes_up || fail 'the old binary is back, and runs. The new one failed: see above.'
        show_log
    fi
    explain "$log" "$bin"
    fail 'the service does not run. Correct what the log says, and run this again.'
}

# keep_old keeps the old binary, after the new one has come up.
keep_old() {
    ! cmp -s "$old" "$bin" || rm "$old" # after an interruption: it is the installed one
    [ -e "$old" ] || return 0
    kept=$bin-$(date -u +%Y-%m-%d-%H%M%S)
    mv -f "$old" "$kept"
    echo "Kept the old binary: $kept"
}

check "$@"
install_files
! runs || keep_old # of an earlier run that was interrupted
cmp -s "$bin.new" "$bin" || swap
runs || comes_up || go_back
keep_old
summary=$(started | sed -n 's/.* url=\([^ ]*\).* keys=\([0-9]*\).*/ at \1, with API keys: \2/p')
echo "$("$bin" -version) runs$summary"
