# Stops the worker `name`; only the next launch starts it again.
has_service() { # which stays if the worker's folder was removed; sets its kind
    for kind in launchd systemd; do
        if [ -f "$(service_file)" ]; then return; fi
    done
    return 1
}

main() {
    kind=$(cat "$worker/kind" 2>/dev/null) || has_service || { say was absent && return; }
    require_kind
    wait_turn "worker-$name" "a launch" 60
    if alive; then say was running; else say was stopped; fi
    "${kind}_stop"
    rm -f "$(service_file)" "$worker/started"
}
main </dev/null
