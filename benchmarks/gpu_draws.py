"""Times drawing tokens from logits on a device: by our kernels, by FlashInfer's, and by torch."""

import statistics
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_steps import RANDOM, seconds_of, wait_for
from contract.sampling import SamplingParams
from engine.compute.forward import draw_on_cuda
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import begin_sampling, draw_by_torch

_CASES = (
    RANDOM,
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    SamplingParams(temperature=0.8, top_p=1.0),
)


def draws(
    device: torch.device, vocabulary: int, batches: tuple[int, ...], num_rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way, number of requests and limits; a way that is missing has its error in its rows."""
    for num_rows in batches:
        generator = torch.Generator(device).manual_seed(5)
        logits = torch.randn(num_rows, vocabulary, device=device, generator=generator) * 3
        for sampling in _CASES:
            for way, run in _ways(device, logits, sampling).items():
                row: dict[str, Any] = {
                    "way": way, "requests": num_rows, "vocabulary": vocabulary, "logits": "normal3",
                    "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
                    "dtype": "float32",
                }  # fmt: skip
                yield row | _timed(run, device, num_rounds)


def _timed(run: Callable[[], object], device: torch.device, num_rounds: int) -> dict[str, Any]:
    def waited() -> None:
        run()
        wait_for(device)

    try:
        return {"us": statistics.median(seconds_of(waited, num_rounds)) * 1e6}
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _ways(device: torch.device, logits: Tensor, sampling: SamplingParams) -> dict[str, Callable[[], object]]:
    rows = [SamplingRow(sampling, (), 100, 0)] * len(logits)
    ways: dict[str, Callable[[], object]] = {}
    if device.type == "cuda":
        ours = draw_on_cuda("triton")
        ways["ours"] = lambda: begin_sampling(logits, rows, ours)
        ways["flashinfer"] = lambda: _by_flashinfer(logits, sampling)
    ways["torch"] = lambda: begin_sampling(logits, rows, draw_by_torch)
    return ways


def _by_flashinfer(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Draw by FlashInfer's kernels, which reject candidates; a limit that is off is one that keeps all."""
    library: Any = import_module("flashinfer.sampling")
    top_k = sampling.top_k or logits.shape[1]
    scaled = logits / sampling.temperature
    drawn: Tensor = library.top_k_top_p_sampling_from_logits(scaled, top_k, sampling.top_p)
    return drawn
