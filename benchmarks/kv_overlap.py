"""Measures the cost of a hand-over to a request: the copying hidden by the prompt's computation, and the exposed gap.

Real processes (`kvbaton up`), default settings, one request at a time; the figures are the timings of the answers.
"""

import asyncio
import statistics
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc.aio

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.service import Answer, Service, counter, generate, running_service

_MAX_WARM_UPS = 3
_NUM_TOKENS = 32
_MAX_GAP_SECONDS = 0.003
_MIN_HIDDEN_SHARE = 0.8
QUEUE_PARTS = ("intake", "placement", "worker", "engine_queue", "messages")
_BYTES = "kvbaton_transfer_bytes_total"


def measure_overlap(model: str | None, num_tokens: int, num_requests: int) -> dict[str, Any]:
    """Return figures by transport. model: a checkpoint's folder; None: the demo model. num_tokens: of every prompt."""
    options = [] if model is None else ["--model", model, "--dtype", "float32"]  # bfloat16 is slow on a CPU
    return {
        transport: asyncio.run(handed_over(transport, options, num_tokens, num_requests))
        for transport in ("shm", "tcp")
    }


async def handed_over(
    transport: str, options: list[str], num_tokens: int, num_requests: int
) -> dict[str, Any]:
    """Measure one transport. options: those of `kvbaton up`."""
    with tempfile.TemporaryDirectory() as folder:
        async with handing_over(Path(folder), transport, options) as service:
            return await measured(service, transport, num_tokens, num_requests)


def handing_over(folder: Path, transport: str, options: list[str]) -> AbstractAsyncContextManager[Service]:
    """Run a prefill and a decode worker; see ``handed_over``."""
    arguments = ["--prefill", "1", "--decode", "1", "--transport", transport, *options]
    return running_service(folder, *arguments, has_small_pools=False)


async def measured(service: Service, transport: str, num_tokens: int, num_requests: int) -> dict[str, Any]:
    """Ask a service one request after the other; see ``handed_over``. bytes_per_request: of all these, warm-ups included."""
    num_warm_ups = min(_MAX_WARM_UPS, num_requests)
    before = counter(await service.metrics("decode"), _BYTES, transport=transport)
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        answers = [
            await generate(stub, _request(number, num_tokens))
            for number in range(num_warm_ups + num_requests)
        ]
    num_bytes = counter(await service.metrics("decode"), _BYTES, transport=transport)
    own = (num_bytes - before) / len(answers)
    return _summary(answers[num_warm_ups:]) | {"bytes_per_request": own}


def _request(number: int, num_tokens: int) -> pb.GenerateRequest:
    """Make a prompt that shares no block with any other."""
    ids = [300 + (number * 37 + position * (number + 1)) % 1100 for position in range(num_tokens)]
    sampling = pb.SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, temperature=0.0)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)


def hidden_share(timing: pb.Timings) -> float:
    """Return the share of the copying that was hidden; 1 for a prompt whose KV was there already."""
    return max(0.0, 1 - timing.transfer / timing.transfer_copying) if timing.transfer_copying else 1.0


def _summary(answers: list[Answer]) -> dict[str, Any]:
    """Return medians and raw samples, in seconds.

    hidden_share: 1 - (last range published → last byte verified) / seconds of copying.
    """
    timings = [answer.timings for answer in answers if answer.timings is not None]
    gaps = [timing.transfer + timing.first_decode_step for timing in timings]
    between = [timing.decode / (_NUM_TOKENS - 2) for timing in timings]
    extra = [gap - itl for gap, itl in zip(gaps, between, strict=True)]
    raw = {
        "hidden_share": [hidden_share(one) for one in timings],
        "transfer_exposed": [timing.transfer for timing in timings],
        "transfer_hidden": [timing.transfer_hidden for timing in timings],
        "transfer_copying": [timing.transfer_copying for timing in timings],
        **{part: [getattr(timing, part) for timing in timings] for part in ("queue", *QUEUE_PARTS)},
        "prefill": [timing.prefill for timing in timings],
        "first_decode_step": [timing.first_decode_step for timing in timings],
        "gap_token_0_to_1": gaps,
        "inter_token_latency": between,
        "gap_minus_inter_token_latency": extra,
    }
    medians = {name: statistics.median(samples) for name, samples in raw.items()}
    return {
        "medians": medians,
        "is_hidden": medians["hidden_share"] >= _MIN_HIDDEN_SHARE,
        "is_gap_small": medians["gap_minus_inter_token_latency"] <= _MAX_GAP_SECONDS,
        "gap_over_inter_token_latency": medians["gap_token_0_to_1"] / medians["inter_token_latency"],
        "samples": raw,
    }
