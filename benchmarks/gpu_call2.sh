#!/usr/bin/env bash
# Call 2 of 2 on a rented GPU, at most 8 minutes: how fast is it, and does it serve?
# Results in $OUT: log, gpu_PART.json of each part below.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 80 prefill "${bench[@]}" --parts prefill --backends flashinfer,triton,torch
part 40 long "${bench[@]}" --parts long --backends flashinfer,triton,torch --brief
part 180 handover "${bench[@]}" --parts service,handover
part 120 decode "${bench[@]}" --parts decode --backends flashinfer,triton,torch
part 60 fp8 "${bench[@]}" --parts fp8 --backends flashinfer,triton,torch --brief
exit "$failed"
