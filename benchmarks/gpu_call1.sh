#!/usr/bin/env bash
# Call 1 of 2 on a rented GPU, at most 8 minutes: is it right, and is KV read from device to device?
# Where pytest-xdist is, GPU_TEST_ARGS="-n 10" shortens the tests; the longest wait for references on the CPU.
# Results in $OUT: log, facts.json, tests.xml, gpu_decode.json, gpu_reads.json, gpu_sums.json.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 30 facts "$python" -m benchmarks.gpu_facts "$OUT/facts.json"
part 180 tests "${tests[@]}" tests/gpu ${GPU_TEST_ARGS:-} --junitxml "$OUT/tests.xml"
part 100 decode "${bench[@]}" --parts decode --models llama-3.1-8b,tiny --backends flashinfer,triton,torch --brief
part 100 reads "${bench[@]}" --parts reads
part 60 sums "${bench[@]}" --parts sums
exit "$failed"
