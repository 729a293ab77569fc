# What is there: the machine, uv, installed versions, and the worker `name` with what it was started with.
find_uv() {
    for uv in "$(command -v uv)" "$home/.local/bin/uv" "$home/.cargo/bin/uv" /opt/homebrew/bin/uv /usr/local/bin/uv; do
        if [ -x "$uv" ]; then say uv "$uv" && return; fi
    done
}

lingers() { # or its services end with the last session
    [ "$(loginctl show-user "$uid" --property=Linger --value 2>/dev/null)" = yes ] || loginctl enable-linger 2>/dev/null
}

kind_here() {
    if [ "$(uname -s)" = Darwin ]; then
        echo launchd
    elif systemctl --user show-environment >/dev/null 2>&1 && lingers; then
        echo systemd
    else
        echo daemon
    fi
}

main() {
    echo # after whatever a login shell's greeting ended with
    say system "$(uname -s)"
    say home "$home"
    say free "$(df -Pk . | tail -n 1)"
    find_uv
    for version in "$root"/versions/*/complete; do
        if [ -f "$version" ]; then say version "$(basename "$(dirname "$version")")"; fi
    done
    kind=$(cat "$worker/kind" 2>/dev/null) || kind=$(kind_here)
    require_kind
    say kind "$kind"
    say turn "$(last_turn "worker-$name")"
    say config "$(digest "$worker/cluster.yaml")"
    say key "$(digest "$worker/keys/$key_file")"
    say service "$(digest "$(service_file)")"
    if [ -f "$worker/started" ]; then say started "$(cat "$worker/started")"; fi
    if alive; then say alive yes; fi
}
main </dev/null
