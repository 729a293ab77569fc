# Puts what was sent in its place; starts the worker anew if `restarts` says so, and keeps what it was `started` with.
put() { # FILE PLACE: if it was sent
    [ -f "$1" ] || return 0
    mkdir -p "$(dirname "$2")"
    mv -f "$1" "$2"
}

main() {
    require_kind
    sent=$worker/sent
    put "$sent/key.pem" "$worker/keys/$key_file"
    if [ "$restarts" = yes ]; then
        say phase stopping
        "${kind}_stop"
    fi
    put "$sent/cluster.yaml" "$worker/cluster.yaml"
    put "$sent/service" "$(service_file)"
    rm -rf "$sent"
    keep "$kind" "$worker/kind"
    if [ "$restarts" = yes ]; then
        say phase starting
        rm -f "$worker/started"
        if [ -n "$(find "$log" -size +20480 2>/dev/null)" ]; then mv -f "$log" "$log.1"; fi # blocks of 512 bytes
        "${kind}_start"
        keep "$started" "$worker/started"
    fi
    keep "$version" "$worker/version"
    rm -f "$worker/installed"
    if take_lock; then drop_unused; fi # or else whoever has it drops them, once that worker is settled
}

drop_unused() { # versions that no worker of this account has, or will have
    for folder in "$root"/versions/*; do
        [ -d "$folder" ] && [ "${folder##*/}" != lock ] || continue
        used=no
        for each in "$root"/worker-*/version "$root"/worker-*/installed; do
            if [ "$(cat "$each" 2>/dev/null)" = "$(basename "$folder")" ]; then used=yes; fi
        done
        [ "$used" = yes ] || rm -rf "$folder"
    done
}
main </dev/null
