#!/usr/bin/env bash
# Call 3 of 3 on a lent GPU, at most 8 minutes: does it serve? Prefill and decode as processes on the one GPU.
# Results in $OUT: parts, log, gpu_handover.json.
cd "$(dirname "$0")/.." && source benchmarks/gpu_common.sh
export UCX_TLS=cuda_ipc,cuda_copy,cma,tcp,self UCX_PROTO_INFO=y

part 280 handover python3 -m benchmarks.gpu --parts handover --out "$OUT"
part 180 windows python3 -m pytest -q -m gpu tests/gpu/test_cuda_attention.py --timeout 170 -k flashinfer_sees
exit "$failed"
