"""A hand-over on one GPU: prefill and decode as two processes (`kvbaton up`) on a model with random weights."""

import asyncio
import gc
import random
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from math import ceil
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.gpu_checkpoint import write_checkpoint
from benchmarks.gpu_shapes import HandOver
from benchmarks.kv_overlap import handing_over, measured
from engine.options import EngineOptions
from protos import inference_pb2 as pb
from tests.service import Service, generate_all, running_service

_ANSWER_ROOM = 64
_DEMO_LENGTHS = (1, 16, 100, 300, 450, 600)
_NUM_DEMO_TOKENS = 24
_UNEQUAL = "[decode]\nblock_size = 32\n"
"""Settings with which the decode worker converts the blocks that it reads: they have 16 tokens."""


def handovers(
    runs: Sequence[HandOver], device: torch.device, length: int, num_requests: int
) -> Iterator[dict[str, Any]]:
    """Yield a row per run; a failed one has its error in its row. All run on one device, and are asked one by one."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        rows = _rows(runs, Path(folder), device, length, num_requests)

        async def row() -> dict[str, Any]:
            return await anext(rows)

        for _ in runs:
            yield runner.run(row())
        runner.run(rows.aclose())


async def _rows(
    runs: Sequence[HandOver], folder: Path, device: torch.device, length: int, num_requests: int
) -> AsyncGenerator[dict[str, Any]]:
    for shape in dict.fromkeys(run.shape for run in runs):
        (folder / shape.name).mkdir()
        write_checkpoint(folder / shape.name, shape, length + _ANSWER_ROOM, device)
        gc.collect()
        torch.cuda.empty_cache()
    (folder / "unequal.toml").write_text(_UNEQUAL)
    options = ["--device", device.type, "--dtype", "bfloat16", "--max-num-batched-tokens", str(length)]
    options += ["--max-num-seqs", "4", "--kv-cache-bytes", str(2**30 if device.type == "cuda" else 2**24)]

    async def start(number: int, run: HandOver) -> Service:
        config = ["--config", str(folder / "unequal.toml")] if run.is_converted else []
        own = folder / str(number)
        own.mkdir()
        model = ["--model", str(folder / run.shape.name)]
        return await stack.enter_async_context(handing_over(own, run.transport, [*model, *options, *config]))

    async with AsyncExitStack() as stack:
        starts = [start(number, run) for number, run in enumerate(runs)]
        services = await asyncio.gather(*starts, return_exceptions=True)
        for run, service in zip(runs, services, strict=True):
            row: dict[str, Any] = {"transport": run.transport, "model": run.shape.name}
            row |= {"length": length, "is_converted": run.is_converted}
            block_size = EngineOptions().block_size  # of the sender, whose blocks cross whole
            row |= {"expected_bytes": run.shape.kv_bytes * ceil(length / block_size) * block_size}
            yield row | await _outcome(service, run.transport, length, num_requests)


async def _outcome(
    service: Service | BaseException, transport: str, length: int, num_requests: int
) -> dict[str, Any]:
    try:
        if isinstance(service, BaseException):
            raise service
        found = await measured(service, transport, length, num_requests)
    except (AssertionError, TimeoutError, grpc.RpcError) as error:
        return {"error": str(error)[-4000:]}
    return found | _shares(found["medians"])


def same_answers(device: torch.device, transports: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Ask `kvbaton up` on this device and on the CPU the same, with the demo model in float32; yield a row per transport."""
    expected, *all_found = asyncio.run(_all_answers(device.type, transports))
    if isinstance(expected, BaseException):
        raise expected
    for transport, found in zip(transports, all_found, strict=True):
        row: dict[str, Any] = {"transport": transport, "model": "demo", "answers": len(expected)}
        if isinstance(found, BaseException):
            yield row | {"error": str(found)[-4000:]}
            continue
        num_equal = sum(one == other for one, other in zip(found, expected, strict=True))
        tokens = sum(len(answer) for answer in found)
        yield row | {"equal_answers": num_equal, "tokens": tokens}


async def _all_answers(device: str, transports: Sequence[str]) -> list[list[list[int]] | BaseException]:
    """Return the answers on the CPU, and those on the device by each transport; all services start side by side."""
    services = [("cpu", "shm"), *((device, transport) for transport in transports)]
    return await asyncio.gather(*(_answers(*each) for each in services), return_exceptions=True)


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
