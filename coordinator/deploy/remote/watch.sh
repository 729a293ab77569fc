# Runs as long as the worker `name` does. Once ssh has ended, `say` ends it.
main() {
    kind=$(cat "$worker/kind") || exit 1
    require_kind
    while alive; do
        say alive yes
        sleep 1
    done
}
main </dev/null
