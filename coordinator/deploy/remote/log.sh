# Prints the last `lines` of the log of the worker `name`, or of its lines `since_start`; with `follow` it goes on until
# standard input ends.
main() {
    [ -f "$log" ] || fail "$log does not exist there; expected a worker that brigade launch has started"
    if [ "${since_start:-no}" = yes ]; then
        tail -c "+$(($(cat "$worker/log_began" 2>/dev/null) + 1))" "$log" </dev/null | tail -n "$lines"
        return
    fi
    if [ "$follow" != yes ]; then
        tail -n "$lines" "$log" </dev/null
        return
    fi
    tail -n "$lines" -F "$log" 2>/dev/null </dev/null &
    cat >/dev/null # until standard input ends
    kill "$!"
}
main
