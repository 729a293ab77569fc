# Goes on as long as the worker `name` runs. Once whoever asked has left, `say` ends it.
main() {
    kind=$(cat "$worker/kind") || exit 1
    require_kind
    while alive; do
        say alive yes
        sleep 1
    done
}
main </dev/null
