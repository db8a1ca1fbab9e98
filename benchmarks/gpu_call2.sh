#!/usr/bin/env bash
# Call 2 of 5 on a rented GPU, at most ten minutes: how fast does it decode?
# Results in $OUT: log, failures, gpu_decode.json, gpu_small_batch.json, gpu_long.json.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 290 decode "${bench[@]}" --parts decode --backends flashinfer,triton,torch --brief
part 150 small_batch "${bench[@]}" --parts small_batch
part 100 long "${bench[@]}" --parts long --backends flashinfer,triton,torch --brief
finish
