# What each call on a lent machine begins with; sourced from the repository's root.
# OUT: where results go. .whl/: wheels that the machine lacks, and kernels.zip, FlashInfer's modules built beforehand.
set -uo pipefail
export OUT=${OUT:-$PWD/.gpu-out} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
mkdir -p "$OUT"

if compgen -G '.whl/*.whl' >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
    export PYTHONPATH=/tmp/site:$PWD
fi
if [[ -f .whl/kernels.zip ]]; then
    python3 -m zipfile -e .whl/kernels.zip /tmp/site/flashinfer/data || exit 1
fi

failed=0
# part SECONDS NAME COMMAND...: runs it, logs it, notes its exit status (124: too long), and goes on.
part() {
    local limit=$1 name=$2 status
    shift 2
    echo "== $name" | tee -a "$OUT/log"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$OUT/log"
    status=${PIPESTATUS[0]}
    echo "$name $status" | tee -a "$OUT/parts"
    ((status == 0)) || failed=1
}
