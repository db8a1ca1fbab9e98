#!/usr/bin/env bash
# Says what `make install` needs of the machine and which apt line brings it. Usage: check_machine.sh PYTHON
set -euo pipefail
python=${1:-python3}

missing=()
command -v git >/dev/null || missing+=(git)
if ! command -v "$python" >/dev/null; then
    missing+=(python3 python3-venv)
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=(python3-venv)
fi
if ((${#missing[@]})); then
    echo "kvbaton needs ${missing[*]}; on Debian or Ubuntu:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "kvbaton needs Python 3.11 or newer; $python is $("$python" -V 2>&1)." >&2
    echo "Install a newer one and name it: make install PYTHON=python3.12" >&2
    exit 1
fi
