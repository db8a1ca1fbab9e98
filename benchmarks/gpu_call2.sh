#!/usr/bin/env bash
# Call 2 of 3 on a lent GPU, at most 8 minutes: how fast? Results in $OUT: parts, log, gpu_*.json by model.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

for model in llama-3.1-8b qwen2.5-1.5b; do
    mkdir -p "$OUT/$model"
    part 140 "decode-$model" python3 -m benchmarks.gpu --parts decode --models "$model" --out "$OUT/$model"
    part 80 "prefill-$model" python3 -m benchmarks.gpu --parts prefill --models "$model" --out "$OUT/$model"
done
exit "$failed"
