# Lists the Pythons; only the first of the version `wanted` if that one is whole.
look_at() { # PYTHON
    # Apple's is too old, and where it is missing, calling it opens a window that offers to install it
    [ -x "$1" ] && [ "$(uname -s) $1" != "Darwin /usr/bin/python3" ] || return 1
    told=$("$1" -I -c '
import sys, importlib.util
is_whole = importlib.util.find_spec("venv") and importlib.util.find_spec("pip")
print("%d.%d.%d" % sys.version_info[:3], "whole" if is_whole else "bare")
' 2>/dev/null) || return 1
    say python "$told $1"
}

main() {
    IFS=:
    folders=$PATH:$home/.local/bin:/opt/homebrew/bin:/usr/local/bin
    for folder in $folders; do
        if look_at "$folder/python$wanted" && [ "${told#* }" = whole ]; then return; fi
    done
    for folder in $folders; do
        for python in "$folder"/python3 "$folder"/python3.[0-9] "$folder"/python3.[0-9][0-9]; do
            look_at "$python" || true
        done
    done
}
main </dev/null
