"""Times complete steps of a random model on a device: inputs, forward pass, logits, and tokens back."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_shapes import Ceilings, ModelShape
from contract.errors import SettingError
from contract.sampling import SamplingParams
from engine.attention.backend import Needs, choose_backend, create_backend
from engine.compute.batch import InputBatch
from engine.compute.best_tokens import TorchBestTokens
from engine.compute.forward import ForwardPass, best_tokens_on_cuda, draw_on_cuda, fused
from engine.compute.forward_graphs import GraphedForward
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.compute.recording import CudaRecorder
from engine.distributed.group import SingleRank
from engine.fp8.linear import FP8, multiply, replace_linears
from engine.models.config import Head
from engine.models.decoder import CausalLM
from engine.models.language_model import LanguageModel
from engine.outputs import NewRequestData, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Sampling, begin_sampling, draw_by_torch

BLOCK_SIZE = 16
BEST = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, top_p=0.95)
_DEVIATION = 0.02
_NUM_WARM_UPS = 3
_NUM_PROFILED = 3
_MAX_KERNELS = 16
_MAX_KERNEL_NAME = 100
_BACKENDS = ("flashinfer", "hybrid", "triton", "torch")


@dataclass(frozen=True)
class Work:
    """Equal requests: each has ``num_tokens`` in the step and ``num_computed`` before them in the cache."""

    batch: int
    num_tokens: int
    num_computed: int = 0

    @property
    def length(self) -> int:
        """The number of tokens that the last query attends to."""
        return self.num_computed + self.num_tokens

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all requests, and the null block."""
        return 1 + self.batch * -(-self.length // BLOCK_SIZE)

    def inputs(self, vocab_size: int) -> PreparedInputs:
        """Make random tokens; each request's blocks are scattered over the pool."""
        rng = np.random.default_rng(7)
        blocks = rng.permutation(np.arange(1, self.num_blocks)).reshape(self.batch, -1)
        scheduled = SchedulerOutput()
        for index, own in enumerate(blocks.tolist()):
            tokens = rng.integers(0, vocab_size, self.length).tolist()
            scheduled.scheduled_new_reqs.append(
                NewRequestData(str(index), tokens, SamplingParams(), (own,), self.num_computed, self.length)
            )
            scheduled.num_scheduled_tokens[str(index)] = self.num_tokens
        batch = InputBatch(self.batch, self.length, BLOCK_SIZE)
        batch.update(scheduled)
        return prepare_inputs(batch, scheduled)


class RandomModel:
    """A model of this shape, in bfloat16 or FP8, with seeded normal weights (not zeros, which would be faster)."""

    def __init__(self, shape: ModelShape, device: torch.device, max_length: int) -> None:
        self.shape = shape
        self.device = device
        self.max_length = max_length
        config = shape.config(max_length)
        torch.manual_seed(11)
        with torch.device("meta"):
            model = CausalLM(config, Head.TIED if shape.is_tied else Head.OWN, SingleRank()).to(
                torch.bfloat16
            )
        if shape.is_fp8:
            names = [name for name, _ in model.named_modules()]
            replace_linears(model, names, has_input_scale=False, group=SingleRank())
        self.model = model.to_empty(device=device).eval()
        self.model.place(device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                elif name.endswith("_scale"):
                    parameter.fill_(_DEVIATION)
                elif parameter.dtype == FP8:
                    parameter.copy_(torch.randn(parameter.shape, device=device))
                else:
                    parameter.normal_(std=_DEVIATION)

    @cached_property
    def fused(self) -> LanguageModel:
        """The model as an engine computes it with Triton's or FlashInfer's attention."""
        return fused(self.model, self.shape.config(self.max_length), "triton")

    def caches(self, num_blocks: int) -> list[Tensor]:
        """Make a pool's layers, filled with random numbers."""
        shape = self.shape
        size = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        pool = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        return list(pool.normal_().unbind(1))

    def forward_pass(
        self,
        backend_name: str,
        graph_size: int | None,
        caches: Sequence[Tensor],
        model: LanguageModel | None = None,
    ) -> ForwardPass:
        """Make a forward pass with one graph of ``graph_size`` requests, or without graphs. model: None for an engine's."""
        backend = create_backend(backend_name)
        if model is None:
            model = self.model if backend_name == "torch" else self.fused
        draw = draw_on_cuda(backend_name) if self.device.type == "cuda" else draw_by_torch
        plain = PlainForward(model, backend, BLOCK_SIZE, self.device, draw)
        if graph_size is None:
            return plain
        recorder = CudaRecorder(self.device)
        find_best = best_tokens_on_cuda() if self.device.type == "cuda" else TorchBestTokens()
        graphed = GraphedForward(
            plain, recorder, sizes=[graph_size], max_model_len=self.max_length, find_best=find_best
        )
        graphed.capture(caches)
        return graphed


@dataclass(frozen=True)
class StepTimes:
    """The seconds of each step, and what the device spent a step on; see ``kernels_of``."""

    seconds: list[float]
    kernels: list[dict[str, Any]]


def timed_steps(
    model: RandomModel,
    forward: ForwardPass,
    work: Work,
    caches: Sequence[Tensor],
    num_rounds: int,
    sampling: SamplingParams = BEST,
    *,
    runs_ahead: bool = False,
) -> StepTimes:
    """Time three times ``num_rounds`` complete steps; each ends with its tokens on the host.

    runs_ahead: each ends with the tokens of the step before, and its own are the next one's input without the host.
    """
    inputs = work.inputs(model.shape.vocab_size)
    last = torch.from_numpy(inputs.query_start_loc[1:].astype(np.int64) - 1).to(model.device)
    rows = [SamplingRow(sampling, (), work.length, 0)] * work.batch

    def launch(fed: Tensor | None) -> Sampling:
        states = forward.begin(replace(inputs, fed=fed), caches)()
        assert states is not None
        logits = forward.logits(states if work.num_tokens == 1 else states[last])
        best = forward.best_tokens(logits) if rows[0].is_greedy else None
        return best or begin_sampling(logits, rows, forward.draw)

    def step() -> None:
        drawn = launched[-1].drawn if launched else None
        launched.append(launch(None if drawn is None else drawn[0]))
        if len(launched) > runs_ahead and any(launched.pop(0).read().num_nans):
            raise AssertionError("the model's logits are not numbers")

    launched: list[Sampling] = []
    with torch.inference_mode():
        seconds = seconds_of(step, 3 * num_rounds)
        return StepTimes(seconds, kernels_of(step, model.device))


def kernels_of(run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Return the kernels of a run that took the device longest: their number and microseconds; none on the CPU."""
    if device.type != "cuda":
        return []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_NUM_PROFILED):
            run()
    found: list[Any] = [each for each in profile.key_averages() if each.self_device_time_total > 0]
    found.sort(key=lambda each: -each.self_device_time_total)
    rows = [
        {
            "name": each.key[:_MAX_KERNEL_NAME],
            "count": each.count / _NUM_PROFILED,
            "us": each.self_device_time_total / _NUM_PROFILED,
        }
        for each in found
    ]
    rest = sum(row["us"] for row in rows[_MAX_KERNELS:])
    return [*rows[:_MAX_KERNELS], {"name": "all others", "us": rest}]


def seconds_of(run: Callable[[], object], num_rounds: int) -> list[float]:
    """Return the seconds of each run after the warm-ups; ``run`` must wait for the device itself."""
    for _ in range(_NUM_WARM_UPS):
        run()
    seconds = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def figures_of(seconds: list[float], bound_seconds: float, num_tokens: int) -> dict[str, Any]:
    """Return median and spread in milliseconds, and the share of the bound."""
    median = statistics.median(seconds)
    return {
        "ms": median * 1e3,
        "ms_least": min(seconds) * 1e3,
        "ms_most": max(seconds) * 1e3,
        "samples_ms": [one * 1e3 for one in seconds],
        "tokens_per_second": num_tokens / median,
        "bound_ms": bound_seconds * 1e3,
        "share_of_bound": bound_seconds / median,
    }


def measure_ceilings(device: torch.device, num_bytes: int, width: int) -> Ceilings:
    """Measure the best of some rounds: a copy of ``num_bytes``, a sum over them, and square products in bfloat16 and FP8."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(width, width, device=device).to(torch.bfloat16) for _ in range(2))

    def best(run: Callable[[], object]) -> float:
        def waited() -> None:
            run()
            wait_for(device)

        return min(seconds_of(waited, 10))

    copied = best(lambda: target.copy_(source))
    read = best(source.sum)
    products = 2 * width**3
    seconds = best(lambda: left @ right)
    ones = torch.ones(width, 1, device=device)

    def in_fp8() -> Tensor:
        return multiply(numbers, ones, weight, ones, torch.bfloat16)

    numbers, weight = (each.to(FP8) for each in (left, right))
    try:
        fp8 = products / best(in_fp8)
    except RuntimeError as error:
        print(f"products in FP8 are not measured: {error}", flush=True)
        fp8 = None
    return Ceilings(2 * num_bytes / copied, num_bytes / read, products / seconds, fp8)


def wait_for(device: torch.device) -> None:
    """Block until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usable_backends(device: torch.device, head_dim: int, group: int = 1) -> list[str]:
    """Return the backends that compute bfloat16 here, fastest first. group: query heads per KV head."""
    usable = []
    for name in _BACKENDS:
        try:
            usable.append(choose_backend(name, device, Needs("bfloat16", head_dim, group)))
        except SettingError as error:
            print(f"not measured: {error}", flush=True)
    return usable
