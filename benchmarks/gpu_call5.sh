#!/usr/bin/env bash
# Call 5 of 5 on a rented GPU, at most ten minutes: what failed again, after it was mended.
# FAILED: the tests, as in $OUT/failures of the calls before. PARTS: parts of the benchmark, separated by commas.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

if [[ -n ${FAILED:-} ]]; then
    part 240 again "${tests[@]}" $FAILED --junitxml "$OUT/again.xml"
fi
if [[ -n ${PARTS:-} ]]; then
    part 240 parts "${bench[@]}" --parts "$PARTS" --backends flashinfer,triton,torch --brief
fi
finish
