#!/usr/bin/env bash
# Call 3 of 5 on a rented GPU, at most ten minutes: FP8, drawing, prompts and chunks.
# Results in $OUT: log, failures, gpu_fp8.json, gpu_draws.json, gpu_prefill.json, gpu_chunk.json, gpu_reads.json.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 150 fp8 "${bench[@]}" --parts fp8 --backends flashinfer,triton,torch --brief
part 90 draws "${bench[@]}" --parts draws
part 120 prefill "${bench[@]}" --parts prefill --backends flashinfer,triton,torch
part 80 chunk "${bench[@]}" --parts chunk
part 60 reads "${bench[@]}" --parts reads
finish
