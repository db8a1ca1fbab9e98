# What each call on a rented machine begins with; sourced from the repository's root.
# OUT: where results go. .whl/: wheels that the machine lacks, and kernels.zip, FlashInfer's modules built beforehand by
# `python -m benchmarks.gpu_modules .whl/kernels.zip`.
# DRY_RUN=1: the same calls on a machine without a GPU, with a tiny shape.
set -uo pipefail
export OUT=${OUT:-$PWD/.gpu-out} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
python=${PYTHON:-python3}
mkdir -p "$OUT"

if compgen -G '.whl/*.whl' >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
    export PYTHONPATH=/tmp/site:$PWD
fi
if [[ -f .whl/kernels.zip ]]; then
    "$python" -m zipfile -e .whl/kernels.zip /tmp/site/flashinfer/data || exit 1
    export FLASHINFER_DISABLE_JIT=1 # a module that was not built beforehand is an error, not minutes of compiling
fi

if (($(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1) > 40000000)); then
    export TMPDIR=/dev/shm # checkpoints in memory
fi

dry=${DRY_RUN:+--dry-run}
marker=${DRY_RUN:+not }gpu
bench=("$python" -m benchmarks.gpu $dry --out "$OUT")
# Each test has a line of its own in the log, so that a failure is known even if the time is over before the summary.
tests=("$python" -m pytest -c tests/gpu/alone.ini --rootdir . -v -p no:cacheprovider -m "$marker")

failed=0
patience=${DRY_RUN:+3} # a machine without a GPU may be busy and slow
# part SECONDS NAME COMMAND...: runs it, logs it and its exit status (124: too long), and goes on. What takes too long is
# interrupted, so that it can write what it has found.
part() {
    local limit=$1 name=$2 status start=$SECONDS
    shift 2
    echo "== $name" | tee -a "$OUT/log"
    timeout --signal=INT --kill-after=10 $((limit * ${patience:-1})) "$@" 2>&1 | tee -a "$OUT/log"
    status=${PIPESTATUS[0]}
    echo "== $name: exit status $status after $((SECONDS - start)) s" | tee -a "$OUT/log"
    ((status == 0)) || failed=1
}

# finish: writes the names of the tests and parts that failed, as the last lines of the log too, of which the caller sees the
# end, and ends the script.
finish() {
    { grep -hoE '^(FAILED|ERROR) [^ ]+|^tests/[^ ]+ (FAILED|ERROR)' "$OUT/log" || true
        grep -hE '^== .*: exit status [1-9]' "$OUT/log" || true; } | sort -u >"$OUT/failures"
    echo "== failures" | tee -a "$OUT/log"
    tee -a "$OUT/log" <"$OUT/failures"
    exit "$failed"
}
