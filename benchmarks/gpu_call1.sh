#!/usr/bin/env bash
# Call 1 of 3 on a lent GPU, at most 7 minutes: is it right? Results in $OUT: parts, log, facts.json, junit.xml, gpu_ceilings.json.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 30 driver nvidia-smi -q
part 60 facts python3 -m benchmarks.gpu_facts "$OUT/facts.json"
part 60 ceilings python3 -m benchmarks.gpu --parts ceilings --out "$OUT"
part 180 kernels python3 -m pytest -q -m gpu tests/gpu/test_cuda_attention.py tests/gpu/test_cuda_fused.py --timeout 120 -k "not flashinfer_sees" --junitxml "$OUT/kernels.xml"
part 120 goldens python3 -m pytest -q -m gpu tests/gpu/test_cuda_goldens.py --timeout 110 --junitxml "$OUT/goldens.xml"
exit "$failed"
