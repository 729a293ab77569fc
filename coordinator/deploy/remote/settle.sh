# Puts the files in `parcel` in their places; restarts the worker if `restarts` is yes, and notes what it was `started`
# with. `seen` is the last turn at this worker when look.sh looked.
put() { # FILE PLACE: if it was sent
    [ -f "$1" ] || return 0
    mkdir -p "$(dirname "$2")"
    mv -f "$1" "$2"
}

is_settled() { # whether another launch has started the same worker meanwhile
    [ "$turn" -gt $((seen + 1)) ] && [ "$(cat "$worker/started" 2>/dev/null)" = "$started" ] && alive
}

main() {
    require_kind
    sent=$worker/$parcel
    wait_turn "worker-$name" "another launch" 60
    keep "$version" "$worker/settling" # from now on no script drops it
    is_whole "$root/versions/$version" || fail "another launch has just dropped $version there: launch again"
    if [ "$restarts" = yes ] && is_settled; then
        restarts=no
        say settled yes
    fi
    put "$sent/key.pem" "$worker/keys/$key_file"
    if [ "$restarts" = yes ]; then
        say phase stopping
        "${kind}_stop"
    fi
    put "$sent/cluster.yaml" "$worker/cluster.yaml"
    put "$sent/service" "$(service_file)"
    rm -rf "$sent"
    find "$worker" -name 'sent*' -prune -mmin +60 -exec rm -rf {} + # left by launches that were cut off
    keep "$kind" "$worker/kind"
    if [ "$restarts" = yes ]; then
        say phase starting
        rm -f "$worker/started"
        if [ -n "$(find "$log" -size +20480 2>/dev/null)" ]; then mv -f "$log" "$log.1"; fi # blocks of 512 bytes
        keep "$(cat "$log" 2>/dev/null | wc -c)" "$worker/log_began" # where the lines of this start begin
        "${kind}_start"
        keep "$started" "$worker/started"
    fi
    keep "$version" "$worker/version"
    if has "$worker/installed" "$version"; then rm -f "$worker/installed"; fi # another launch may have written its own
    rm -f "$worker/settling"
    if take_turn versions; then drop_unused; fi # else the script that holds the turn drops them
}

drop_unused() { # versions that no worker of this account has or is getting
    for folder in "$root"/versions/*; do
        if [ ! -d "$folder" ] || is_used "${folder##*/}"; then continue; fi
        mv "$folder/complete" "$folder/dropped" 2>/dev/null # a worker that settles on it meanwhile sees that, or is seen
        if is_used "${folder##*/}"; then mv "$folder/dropped" "$folder/complete" 2>/dev/null; else rm -rf "$folder"; fi
    done
}
main </dev/null
