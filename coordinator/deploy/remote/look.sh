# Reports the machine, uv, installed versions, and the worker `name` with what it was started with.
find_uv() {
    for uv in "$(command -v uv)" "$home/.local/bin/uv" "$home/.cargo/bin/uv" /opt/homebrew/bin/uv /usr/local/bin/uv; do
        if [ -x "$uv" ]; then say uv "$uv" && return; fi
    done
}

lingers() { # else its services end with its last session
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

half_made() { # incomplete versions that no worker has
    for folder in "$root"/versions/*; do
        if [ -d "$folder" ] && [ ! -f "$folder/complete" ] && ! is_used "${folder##*/}"; then echo "$folder"; fi
    done
}

drop_half_made() { # left by launches that were cut off; an installation holds the turn
    if [ -n "$(half_made)" ] && take_turn versions; then
        half_made | while read -r folder; do rm -rf "$folder"; done
    fi
}

main() {
    say home "$home"
    say free "$(df -Pk . | tail -n 1)"
    find_uv
    for version in "$root"/versions/*; do
        if is_whole "$version"; then say version "${version##*/}"; fi
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
    drop_half_made
}
main </dev/null
