"""Many streams at once on one GPU, for a while: prefill and decode as two processes (`kvbaton up`), random weights."""

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch

from benchmarks.gaps import percentile
from benchmarks.gpu_checkpoint import write_checkpoint
from benchmarks.gpu_shapes import HandOver
from benchmarks.kv_overlap import QUEUE_PARTS, handing_over
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.service import Answer, Service, generate

_ANSWER_TOKENS = (16, 64, 128)
_POOL_SHARE = 1.25
"""The pool beside what all streams hold at their longest."""


def streams(
    run: HandOver, device: torch.device, length: int, num_streams: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield one row: ``num_streams`` clients, each with one request at a time, for so many seconds.

    Prompts have an eighth of ``length`` to all of it, answers 16, 64 or 128 tokens; half of them are greedy.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), run.shape, length + max(_ANSWER_TOKENS), device)
        torch.cuda.empty_cache()
        yield asyncio.run(_measured(run, Path(folder), device, length, num_streams, seconds))


async def _measured(
    run: HandOver, folder: Path, device: torch.device, length: int, num_streams: int, seconds: float
) -> dict[str, Any]:
    pool = num_streams * (length + max(_ANSWER_TOKENS)) * run.shape.kv_bytes
    options = ["--model", str(folder), "--device", device.type, "--dtype", "bfloat16"]
    options += ["--max-num-seqs", str(num_streams), "--kv-cache-bytes", str(int(_POOL_SHARE * pool) + 2**24)]
    row: dict[str, Any] = {"model": run.shape.name, "transport": run.transport, "streams": num_streams}
    row |= {"length": length, "seconds": seconds}
    with tempfile.TemporaryDirectory() as own:
        async with handing_over(Path(own), run.transport, options) as service:
            began = time.monotonic()
            answers, errors = await _asked(service, run.shape.vocab_size, length, num_streams, seconds)
            elapsed = time.monotonic() - began  # the last answers end after the time is over
    return row | {"elapsed_seconds": elapsed} | _figures(answers, errors, elapsed)


async def _asked(
    service: Service, vocab_size: int, length: int, num_streams: int, seconds: float
) -> tuple[list[Answer], list[str]]:
    answers = list[Answer]()
    errors = list[str]()
    numbers = itertools.count()
    until = time.monotonic() + seconds

    async def client(stub: Any) -> None:
        while time.monotonic() < until:
            request = _request(next(numbers), vocab_size, length)
            try:
                answer = await generate(stub, request)
            except grpc.RpcError as error:
                errors.append(str(error)[-500:])
            else:
                answers.append(answer)
                if len(answer.token_ids) != request.sampling.max_tokens:
                    errors.append(f"{len(answer.token_ids)} tokens of {request.sampling.max_tokens}")

    async with grpc.aio.insecure_channel(service.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(client(stub) for _ in range(num_streams)))
    return answers, errors


def _request(number: int, vocab_size: int, length: int) -> pb.GenerateRequest:
    rng = random.Random(number)
    ids = [rng.randrange(vocab_size) for _ in range(rng.randint(max(1, length // 8), length))]
    sampling = pb.SamplingParams(
        max_tokens=rng.choice(_ANSWER_TOKENS), ignore_eos=True, temperature=0.8 * (number % 2), seed=number
    )
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)


def _figures(answers: list[Answer], errors: list[str], seconds: float) -> dict[str, Any]:
    """Return the figures of whole answers, in ms. itl: the mean of an answer behind its second token."""
    timed = [(answer.timings, len(answer.token_ids)) for answer in answers if answer.timings is not None]
    timings = [each for each, _ in timed]
    figures: dict[str, Any] = {"answers": len(answers), "errors": errors[:10], "num_errors": len(errors)}
    of_each = {
        "ttft": [each.queue + each.prefill for each in timings],
        "itl": [each.decode / (num_tokens - 2) for each, num_tokens in timed],
        "prefill": [each.prefill for each in timings],
        "transfer_exposed": [each.transfer for each in timings],
        **{part: [getattr(each, part) for each in timings] for part in QUEUE_PARTS},
    }
    for name, samples in of_each.items():
        in_ms = [1e3 * each for each in samples]
        figures |= {f"{name}_p50_ms": percentile(in_ms, 0.5), f"{name}_p99_ms": percentile(in_ms, 0.99)}
    return figures | {"tokens_per_second": sum(len(answer.token_ids) for answer in answers) / seconds}
