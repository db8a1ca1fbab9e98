#!/usr/bin/env bash
# Call 4 of 5 on a rented GPU, at most ten minutes: does it serve?
# Results in $OUT: log, failures, gpu_service.json, gpu_handover.json, gpu_streams.json, gpu_sums.json (on several GPUs).
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh

part 370 handover "${bench[@]}" --parts service,handover
part 110 streams "${bench[@]}" --parts streams
part 60 sums "${bench[@]}" --parts sums
finish
