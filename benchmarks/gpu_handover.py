"""A hand-over on one GPU: prefill and decode as two processes (`kvbaton up`) on a model with random weights."""

import asyncio
import gc
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.gpu_checkpoint import write_checkpoint
from benchmarks.gpu_shapes import ModelShape
from benchmarks.kv_overlap import handed_over
from protos import inference_pb2 as pb
from tests.service import generate_all, running_service

_ANSWER_ROOM = 64
_DEMO_LENGTHS = (1, 16, 100, 300, 450, 600)
_NUM_DEMO_TOKENS = 24
_UNEQUAL = "[decode]\nblock_size = 32\n"
"""Settings with which the decode worker converts the blocks that it reads: they have 16 tokens."""


def handovers(
    shape: ModelShape, device: torch.device, length: int, num_requests: int, transports: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Run prefill and decode on one device and yield a row per transport; a failed one has its error in its row.

    The last row is over the first transport, into larger blocks.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, length + _ANSWER_ROOM, device)
        gc.collect()
        torch.cuda.empty_cache()
        options = ["--model", folder, "--device", device.type, "--dtype", "bfloat16"]
        options += ["--max-num-batched-tokens", str(length), "--max-num-seqs", "16"]
        options += ["--kv-cache-bytes", str(2**31 if device.type == "cuda" else 2**24)]
        unequal = Path(folder) / "unequal.toml"
        unequal.write_text(_UNEQUAL)
        runs = [(transport, False) for transport in transports] + [(transports[0], True)]
        for transport, is_converted in runs:
            row = {
                "transport": transport,
                "model": shape.name,
                "length": length,
                "is_converted": is_converted,
            }
            config = ["--config", str(unequal)] if is_converted else []
            try:
                found = asyncio.run(handed_over(transport, [*options, *config], length, num_requests))
            except (AssertionError, TimeoutError, grpc.RpcError) as error:
                yield row | {"error": str(error)[-4000:]}
                continue
            yield row | found | _shares(found["medians"])


def same_answers(device: torch.device, transports: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Ask `kvbaton up` on this device and on the CPU the same, with the demo model in float32; yield a row per transport."""
    expected = asyncio.run(_answers("cpu", "shm"))
    for transport in transports:
        row: dict[str, Any] = {"transport": transport, "model": "demo", "answers": len(expected)}
        try:
            found = asyncio.run(_answers(device.type, transport))
        except (AssertionError, TimeoutError, grpc.RpcError) as error:
            yield row | {"error": str(error)[-4000:]}
            continue
        num_equal = sum(one == other for one, other in zip(found, expected, strict=True))
        tokens = sum(len(answer) for answer in found)
        yield row | {"equal_answers": num_equal, "tokens": tokens}


async def _answers(device: str, transport: str) -> list[list[int]]:
    """Return the answers of one prefill and one decode worker, four at a time: greedy ones and seeded ones."""
    rng = random.Random(23)
    requests = []
    for number, length in enumerate(_DEMO_LENGTHS):
        ids = [rng.randrange(300, 1400) for _ in range(length)]
        sampling = pb.SamplingParams(
            max_tokens=_NUM_DEMO_TOKENS, ignore_eos=True, temperature=float(number % 2), seed=number
        )
        requests.append(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling))
    options = ["--prefill", "1", "--decode", "1", "--device", device, "--dtype", "float32"]
    options += ["--transport", transport, "--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
    with tempfile.TemporaryDirectory() as folder:
        async with running_service(Path(folder), *options) as service:
            return [answer.token_ids for answer in await generate_all(service.grpc, requests, 4)]


def _shares(medians: dict[str, float]) -> dict[str, float]:
    """Return exposed time and copying as shares of the time to the first token, which does not wait for the transfer."""
    ttft = medians["queue"] + medians["prefill"]
    return {
        "ttft_ms": ttft * 1e3,
        "exposed_share_of_ttft": medians["transfer_exposed"] / ttft,
        "copying_share_of_ttft": medians["transfer_copying"] / ttft,
    }
