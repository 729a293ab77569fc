# Stops the worker `name`; only the next launch starts it again.
main() {
    kind=$(cat "$worker/kind" 2>/dev/null) || { say was absent && return; }
    require_kind
    wait_turn "worker-$name" "a launch" 60
    if alive; then say was running; else say was stopped; fi
    "${kind}_stop"
    rm -f "$(service_file)" "$worker/started"
}
main </dev/null
