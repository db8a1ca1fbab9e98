"""A hand-over on one GPU: prefill and decode as two processes (`kvbaton up`) on a model with random weights."""

import asyncio
import gc
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.gpu_checkpoint import write_checkpoint
from benchmarks.gpu_shapes import ModelShape
from benchmarks.kv_overlap import handed_over

_ANSWER_ROOM = 64


def handovers(
    shape: ModelShape, device: torch.device, length: int, num_requests: int, transports: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Run prefill and decode on one device and yield a row per transport; a failed one has its error in its row."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, length + _ANSWER_ROOM, device)
        gc.collect()
        torch.cuda.empty_cache()
        options = ["--model", folder, "--device", device.type, "--dtype", "bfloat16"]
        options += ["--max-num-batched-tokens", str(length), "--max-num-seqs", "16"]
        options += ["--kv-cache-bytes", str(2**31 if device.type == "cuda" else 2**24)]
        for transport in transports:
            row = {"transport": transport, "model": shape.name, "length": length}
            try:
                found = asyncio.run(handed_over(transport, options, length, num_requests))
            except (AssertionError, TimeoutError, grpc.RpcError) as error:
                yield row | {"error": str(error)[-4000:]}
                continue
            yield row | found | _shares(found["medians"])


def _shares(medians: dict[str, float]) -> dict[str, float]:
    """Return exposed time and copying as shares of the time to the first token, which does not wait for the transfer."""
    ttft = medians["queue"] + medians["prefill"]
    return {
        "ttft_ms": ttft * 1e3,
        "exposed_share_of_ttft": medians["transfer_exposed"] / ttft,
        "copying_share_of_ttft": medians["transfer_copying"] / ttft,
    }
