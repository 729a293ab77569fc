# The common part of all scripts. A script arrives on standard input, after assignments such as name=mini. It ends with a
# call of its main, so nothing runs before all of it has arrived.
set -u
umask 077
cd || exit 1
home=$PWD
root=$home/.brigade
worker=$root/worker-${name:-}
log=$worker/worker.log
uid=$(id -u)
export PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin"
[ -n "${XDG_RUNTIME_DIR:-}" ] || [ ! -d "/run/user/$uid" ] || export XDG_RUNTIME_DIR="/run/user/$uid"

say() { # WORD TEXT: to the launch that sent this script
    printf '@brigade %s %s\n' "$1" "$2"
}

fail() { # WHY: shown before the rest of standard error
    echo "@brigade $*" >&2
    exit 1
}

keep() { # TEXT FILE: write it atomically
    { echo "$1" >"$2.new" && mv -f "$2.new" "$2"; } || fail "cannot write $2"
}

has() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; } # FILE TEXT

is_whole() { [ -f "$1/complete" ] && [ -x "$1/bin/python" ]; } # FOLDER: of a version; its Python may be gone again

is_used() { # VERSION: whether a worker of this account has it, or is getting it
    for use in "$root"/worker-*/version "$root"/worker-*/installed "$root"/worker-*/settling; do
        if has "$use" "$1"; then return 0; fi
    done
    return 1
}

digest() { # FILE: nothing for a missing one
    [ -f "$1" ] || return 0
    if command -v sha256sum >/dev/null; then sha256sum <"$1"; else shasum -a 256 <"$1"; fi | cut -d ' ' -f 1
}

# A script that changes what all share holds a turn at it until its process ends. Turns are numbered links that name their
# process. Only the last one counts, and it stays until there is a later one, so no turn can be taken twice.
turns=$root/turns
wait_turn() { # THING WHAT SECONDS: take the turn, or fail after so many seconds
    waited=0
    until take_turn "$1"; do
        [ "$waited" -lt "$3" ] || fail "$2 is not done after $3 s: see its process ${holder%% *} there, or end that"
        say phase "waiting for $2 (process ${holder%% *} there)"
        sleep 1
        waited=$((waited + 1))
    done
}
take_turn() { # THING: take it as number `turn`, unless the process `holder` has it
    mkdir -p "$turns/$1" || fail "cannot write $turns/$1"
    last=$(last_turn "$1")
    holder=$(readlink "$turns/$1/$last")
    if is_running "$holder"; then return 1; fi
    own=$(process "$$")
    is_running "$own" || fail "cannot tell when a process has begun there"
    turn=$((last + 1))
    if ! ln -s "$own" "$turns/$1/$turn" 2>/dev/null; then
        [ "$(last_turn "$1")" != "$last" ] || fail "cannot write $turns/$1/$turn"
        return 1 # another was quicker
    fi
    if [ "$(last_turn "$1")" != "$turn" ]; then # so much quicker that this number is over and removed
        rm -f "$turns/$1/$turn"
        return 1
    fi
    for earlier in "$turns/$1"/*; do
        if [ "${earlier##*/}" -lt "$turn" ]; then rm -f "$earlier"; fi
    done
}
last_turn() { # THING: its number, 0 before the first
    last_found=$(ls "$turns/$1" 2>/dev/null | sort -n | tail -n 1)
    echo "${last_found:-0}"
}
process() { echo "$1 $(began "$1")"; } # NUMBER: unique, since numbers are used again
is_running() { [ -n "${1#* }" ] && [ "$(process "${1%% *}")" = "$1" ]; }
began() { # NUMBER: when that process began, in any form; nothing if it has ended
    if [ "$(uname -s)" = Darwin ]; then
        LC_ALL=C TZ=UTC0 ps -o lstart= -p "$1"
    else
        cut -d ' ' -f 22 "/proc/$1/stat" 2>/dev/null # proc_pid_stat(5)
    fi
}

wait_until() { # SECONDS COMMAND...: until it succeeds; fails if it never does
    left=$(($1 * 5))
    shift
    until "$@"; do
        [ "$left" -gt 0 ] || return 1
        left=$((left - 1))
        sleep 0.2
    done
}

# A service of each kind: its file, whether its process runs, start, stop. `kind` says which is meant.
require_kind() {
    case $kind in
    launchd | systemd | daemon) ;;
    *) fail "expected launchd, systemd or daemon in $worker/kind, found '$kind': remove it, launch again" ;;
    esac
}
service_file() { "${kind}_file"; }
alive() { "${kind}_alive"; }
gone() { ! alive; }

launchd_file() { echo "$home/Library/LaunchAgents/brigade.worker.$name.plist"; }
launchd_domains() { # of a user's agents: with a login at the screen, and without
    for domain in "gui/$uid" "user/$uid"; do
        if launchctl print "$domain" >/dev/null 2>&1; then echo "$domain"; fi
    done
}
launchd_known() { # the domains that have the agent
    for domain in $(launchd_domains); do
        if launchctl print "$domain/brigade.worker.$name" >/dev/null 2>&1; then echo "$domain"; fi
    done
}
launchd_unknown() { [ -z "$(launchd_known)" ]; }
launchd_alive() {
    for domain in $(launchd_known); do
        if launchctl print "$domain/brigade.worker.$name" | grep -q '^[[:space:]]*pid = [0-9]'; then return 0; fi
    done
    return 1
}
launchd_start() {
    for domain in $(launchd_domains); do
        launchctl enable "$domain/brigade.worker.$name"
        if launchd_load "$(launchd_file)" || { launchd_narrow && launchd_load "$worker/agent.plist"; }; then return 0; fi
    done
    fail "launchd took $(launchd_file) in no domain of this user"
}
launchd_load() { # FILE: into the domain; tells in one line what launchd says if it does not
    told=$(launchctl bootstrap "$domain" "$1" 2>&1) && return
    echo "$domain: $told" | tr '\n' ' ' >&2
    echo >&2
    return 1
}
launchd_narrow() { # a copy for the session of the domain alone: some macOS refuse a list of sessions
    case $domain in gui/*) session=Aqua ;; *) session=Background ;; esac
    cp "$(launchd_file)" "$worker/agent.plist" &&
        plutil -replace LimitLoadToSessionType -string "$session" "$worker/agent.plist" >&2
}
launchd_stop() { # SIGTERM, and SIGKILL after ExitTimeOut; bootout returns before that
    for domain in $(launchd_known); do
        launchctl bootout "$domain/brigade.worker.$name" || true
    done
    wait_until 30 launchd_unknown || fail "launchd has not ended brigade.worker.$name after 30 s"
}

systemd_unit() { echo "brigade-worker-$name.service"; }
systemd_file() { echo "${XDG_CONFIG_HOME:-$home/.config}/systemd/user/$(systemd_unit)"; }
systemd_alive() { systemctl --user --quiet is-active "$(systemd_unit)"; }
systemd_start() {
    systemctl --user daemon-reload
    systemctl --user --quiet enable "$(systemd_unit)"
    systemctl --user restart "$(systemd_unit)" || fail "systemd has not started $(systemd_unit)"
}
systemd_stop() {
    [ -f "$(systemd_file)" ] || return 0
    systemctl --user --quiet disable --now "$(systemd_unit)" 2>/dev/null || true
    if systemd_alive; then fail "systemd has not stopped $(systemd_unit)"; fi
}

daemon_file() { echo "$worker/start.sh"; }
daemon_pid() { cat "$worker/worker.pid" 2>/dev/null; }
daemon_alive() { # its arguments tell it from a later process of that number
    pid=$(daemon_pid) && [ -r "/proc/$pid/cmdline" ] &&
        tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -e "$worker/cluster.yaml" -e "$worker/start.sh"
}
daemon_start() {
    rm -f "$worker/worker.pid"
    setsid /bin/sh "$(daemon_file)" >>"$log" 2>&1 </dev/null &
    wait_until 10 daemon_alive || true # it may have ended already, which watch.sh tells
}
daemon_stop() {
    daemon_alive || return 0
    kill -TERM "$(daemon_pid)"
    if ! wait_until 20 gone; then kill -KILL "$(daemon_pid)" && wait_until 5 gone; fi
    rm -f "$worker/worker.pid"
}

