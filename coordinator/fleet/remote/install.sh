# Installs the version `version` from what was sent, into a folder of its own that no other version touches.
# `uv` is its path, or else `python` one of a Python; `wanted` is the Python that uv is to take or fetch.
take_turn() { # an installation that nobody waits for any more may still be at work
    until take_lock; do
        say phase "waiting for another installation"
        sleep 1
    done
}

main() {
    target=$root/versions/$version
    sent=$worker/sent
    wheel=$sent/$wheel_name
    mkdir -p "$root/versions"
    take_turn
    rm -rf "$target"
    say phase "making a virtual environment"
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --python "$wanted" "$target" || fail "uv could not make $target"
        say phase "installing packages"
        "$uv" pip install --quiet --python "$target/bin/python" --constraint "$sent/constraints.txt" "$wheel" ||
            fail "uv could not install brigade's packages"
    else
        "$python" -m venv --without-pip "$target" || fail "$python could not make $target"
        say phase "installing packages"
        "$python" -m pip --python "$target/bin/python" --disable-pip-version-check install --quiet \
            --constraint "$sent/constraints.txt" "$wheel" || fail "pip could not install brigade's packages"
    fi
    say phase "trying it"
    (cd "$target" && bin/python -P -c 'import mlx.core, worker.cli') || fail "what was installed does not start"
    keep "$version" "$worker/installed" # so that nobody drops it before this worker has it
    touch "$target/complete"
    rm -rf "$sent"
}
main </dev/null
