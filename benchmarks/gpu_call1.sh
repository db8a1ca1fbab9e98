#!/usr/bin/env bash
# Call 1 of 5 on a rented GPU, at most ten minutes: is it right?
# Results in $OUT: log, failures, facts.json, ranks.xml, tests.xml, far.xml, gpu_ceilings.json, gpu_pairs.json.
# Where pytest-xdist is, GPU_TEST_ARGS="-n 10" shortens the tests; the longest wait for references on the CPU.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 20 facts "$python" -m benchmarks.gpu_facts "$OUT/facts.json"
part 60 ceilings "${bench[@]}" --parts ceilings
part 60 ranks "${tests[@]}" tests/gpu/test_cuda_ranks.py tests/gpu/test_benchmark.py ${GPU_TEST_ARGS:-} --junitxml "$OUT/ranks.xml"
part 60 pairs "${bench[@]}" --parts pairs
part 270 tests "${tests[@]}" tests/gpu --ignore tests/gpu/test_cuda_ranks.py --ignore tests/gpu/test_cuda_far_blocks.py \
    ${GPU_TEST_ARGS:-} --junitxml "$OUT/tests.xml"
part 60 far "${tests[@]}" tests/gpu/test_cuda_far_blocks.py tests/gpu/test_benchmark.py ${GPU_TEST_ARGS:-} --junitxml "$OUT/far.xml"
finish
