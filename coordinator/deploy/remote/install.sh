# Installs the version `version` from the files in `parcel`, into a folder of its own. `uv` is the path of uv; if it is
# empty, `python` is that of a Python. `wanted` is the Python version for uv.
make() { # FOLDER
    rm -rf "$1"
    say phase "making a virtual environment"
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --python "$wanted" "$1" || fail "uv could not make $1"
        say phase "installing packages"
        "$uv" pip install --quiet --python "$1/bin/python" --constraint "$sent/constraints.txt" "$wheel" ||
            fail "uv could not install brigade's packages"
    else
        "$python" -m venv --without-pip "$1" || fail "$python could not make $1"
        say phase "installing packages"
        "$python" -m pip --python "$1/bin/python" --disable-pip-version-check install --quiet \
            --constraint "$sent/constraints.txt" "$wheel" || fail "pip could not install brigade's packages"
    fi
    say phase "trying it"
    (cd "$1" && bin/python -P -c 'import mlx.core, worker.cli') || fail "what was installed does not start"
}

main() {
    target=$root/versions/$version
    sent=$worker/$parcel
    wheel=$sent/$wheel_name
    trap 'rm -rf "$sent"' EXIT
    mkdir -p "$root/versions"
    wait_turn versions "another installation" 900 # which may belong to a launch that was cut off
    if ! is_whole "$target" && ! (make "$target"); then # else the other installation made it
        rm -rf "$target"
        exit 1
    fi
    keep "$version" "$worker/installed" # no script drops it before this worker has it
    touch "$target/complete"
}
main </dev/null
