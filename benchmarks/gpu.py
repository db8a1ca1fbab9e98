"""The engine on one GPU compared with the GPU's limits: decode, prefill, and a hand-over between two processes.

Random weights in the shapes of Llama 3.1 8B and Qwen 2.5 1.5B. Each part writes ``gpu_<part>.json``, anew after each row, so
that a run that is cut short loses the unfinished row only. A figure's ``share_of_bound`` refers to a roofline from the
ceilings that the same run measured. ``--dry-run`` runs the same code on the CPU with a tiny shape; its figures are
meaningless.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import run_facts
from benchmarks.gpu_chunk import chunk_steps
from benchmarks.gpu_draws import draws
from benchmarks.gpu_nixl import reads
from benchmarks.gpu_pairs import pairs
from benchmarks.gpu_shapes import (
    LLAMA,
    LLAMA_FP8,
    LLAMA_PART,
    QWEN,
    TINY,
    TINY_FP8,
    Ceilings,
    HandOver,
    ModelShape,
)
from benchmarks.gpu_small_batch import BATCHES, small_batch
from benchmarks.gpu_steps import (
    BEST,
    RANDOM,
    RandomModel,
    Work,
    figures_of,
    measure_ceilings,
    timed_steps,
    usable_backends,
)
from benchmarks.gpu_sums import sums
from contract.sampling import SamplingParams

PARTS = (
    "ceilings", "decode", "small_batch", "prefill", "chunk", "long", "draws", "reads", "sums", "pairs", "service",
    "handover", "streams", "fp8",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The plan of a run. ceilings: (bytes, width of the product). reads: (blocks, bytes of each).

    streams: (clients at once, seconds).

    transports: those whose answers are compared with the CPU's.

    long: one request behind a long context: a decode, and a short chunk.

    prefills: batches of prompts beside ``prefill``. chunk: a step that is timed eagerly and as one graph.

    fp8_shape: a shape of ``shapes`` with weights in FP8, whose steps are measured as those are.
    """

    device: torch.device
    shapes: tuple[ModelShape, ...]
    handovers: tuple[HandOver, ...]
    fp8_shape: ModelShape
    batches: tuple[int, ...]
    context: int
    prefill: Work
    long: tuple[Work, ...]
    num_rounds: int
    num_requests: int
    transports: tuple[str, ...]
    prefills: tuple[Work, ...]
    chunk: Work
    ceilings: tuple[int, int]
    reads: tuple[int, int]
    streams: tuple[int, float]


REAL = Plan(
    torch.device("cuda", 0), (LLAMA, QWEN),
    (HandOver(LLAMA, "nixl"), HandOver(QWEN, "nixl"), HandOver(LLAMA_PART, "tcp"), HandOver(LLAMA_PART, "nixl", True)),
    LLAMA_FP8, (1, 64, 256), 1024, Work(8, 2048),
    (Work(1, 1, 65_535), Work(1, 20, 65_516)), 10, 12,
    ("nixl", "tcp"), (Work(16, 128), Work(1, 16_384)), Work(1, 128, 2_048),
    ceilings=(2**32, 8192), reads=(128, 2**21), streams=(64, 60.0),
)  # fmt: skip
DRY = Plan(
    torch.device("cpu"),
    (TINY,),
    (HandOver(TINY, "shm"), HandOver(TINY, "shm", True)),
    TINY_FP8,
    (1, 3),
    40,
    Work(2, 24),
    (Work(1, 1, 4199), Work(1, 20, 4180)),
    1,
    2,
    ("shm",),
    (Work(3, 8),),
    Work(1, 8, 24),
    (2**16, 64),
    (8, 2**14),
    (4, 2.0),
)


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--models", help="comma-separated names of shapes; unset: all")
    parser.add_argument(
        "--backends", help="comma-separated names of attention backends; unset: all that are usable"
    )
    parser.add_argument("--brief", action="store_true", help="decode: only with graphs where possible")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU with a tiny shape")
    given = parser.parse_args()
    plan = DRY if given.dry_run else REAL
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device (--dry-run needs none)")
    parts = given.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    run = Run(plan, given.out, _chosen(given.models), _chosen(given.backends), given.brief)
    for part in parts:
        run.write_each(part, run.rows(part))


def _chosen(names: str | None) -> list[str] | None:
    return None if names is None else names.split(",")


class Run:
    """One run of the program. Facts and ceilings are measured first, and are in every file."""

    def __init__(
        self, plan: Plan, out: Path, models: list[str] | None, backends: list[str] | None, is_brief: bool
    ) -> None:
        self._plan = plan
        self._out = out
        self._shapes = [shape for shape in plan.shapes if models is None or shape.name in models]
        self._backends = backends
        self._is_brief = is_brief
        is_cuda = plan.device.type == "cuda"
        device = torch.cuda.get_device_name(plan.device) if is_cuda else plan.device.type
        self._head: dict[str, Any] = {**run_facts(), "device": device}
        self._ceilings = measure_ceilings(plan.device, *plan.ceilings)
        self._head["ceilings"] = asdict(self._ceilings)
        torch.cuda.empty_cache()

    def write_each(self, part: str, rows: Iterator[dict[str, Any]]) -> None:
        """Measure the rows of a part, and write what is known after each."""
        known = list[dict[str, Any]]()
        self._write(part, known)
        for row in rows:
            short = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
            print(part, json.dumps(short), flush=True)
            known.append(row)
            self._write(part, known)

    def rows(self, part: str) -> Iterator[dict[str, Any]]:
        """Measure a part, row by row."""
        plan = self._plan
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "reads": lambda: reads(plan.device, *plan.reads),
            "sums": lambda: sums(plan.device, plan.num_rounds),
            "pairs": lambda: pairs(plan.device),
            "draws": lambda: draws(plan.device, self._shapes[-1].vocab_size, plan.batches, plan.num_rounds),
            **{name: partial(self._services, name) for name in ("service", "handover", "streams")},
            "small_batch": lambda: self._each_shape(self._small_batch),
            "chunk": lambda: self._each_shape(
                lambda shape: chunk_steps(shape, plan.device, plan.chunk, plan.num_rounds)
            ),
            "fp8": lambda: (
                iter(()) if self._ceilings.matmul_fp8 is None else self._steps("decode", plan.fp8_shape)
            ),
        }
        for name in ("decode", "prefill", "long"):
            parts[name] = partial(self._each_shape, partial(self._steps, name))
        if part in parts:
            yield from parts[part]()

    def _each_shape(
        self, measure: Callable[[ModelShape], Iterator[dict[str, Any]]]
    ) -> Iterator[dict[str, Any]]:
        for shape in self._shapes:
            yield from measure(shape)
            gc.collect()
            torch.cuda.empty_cache()

    def _small_batch(self, shape: ModelShape) -> Iterator[dict[str, Any]]:
        plan = self._plan
        sizes = BATCHES if plan.device.type == "cuda" else plan.batches
        return small_batch(shape, plan.device, plan.context, sizes, plan.num_rounds, self._ceilings)

    def _services(self, part: str) -> Iterator[dict[str, Any]]:
        # Imported here: the other parts need no service.
        from benchmarks.gpu_handover import handovers, same_answers
        from benchmarks.gpu_streams import streams

        plan = self._plan
        if part == "service":
            return same_answers(plan.device, plan.transports)
        if part == "streams":
            return streams(plan.handovers[0], plan.device, plan.context, *plan.streams)
        return handovers(plan.handovers, plan.device, plan.prefill.length, plan.num_requests)

    def _write(self, part: str, rows: list[dict[str, Any]]) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        path = self._out / f"gpu_{part}.json"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps({**self._head, "rows": rows}, indent=2) + "\n")
        unfinished.replace(path)

    def _steps(self, part: str, shape: ModelShape) -> Iterator[dict[str, Any]]:
        plan = self._plan
        works = [Work(batch, 1, plan.context - 1) for batch in plan.batches]
        works = {"decode": works, "prefill": [plan.prefill, *plan.prefills], "long": list(plan.long)}[part]
        model = RandomModel(shape, plan.device, max(work.length for work in works))
        caches = model.caches(max(work.num_blocks for work in works))
        usable = usable_backends(plan.device, shape.head_dim, shape.num_heads // shape.num_kv_heads)
        for name in [name for name in usable if self._backends is None or name in self._backends]:
            for work in works:
                bound = _bound_seconds(part, shape, work, self._ceilings)
                for has_graph in self._graphs(work, name):
                    forward = model.forward_pass(name, work.batch if has_graph else None, caches)
                    for sampling, is_ahead in self._ways(part):
                        steps = timed_steps(
                            model, forward, work, caches, plan.num_rounds, sampling, runs_ahead=is_ahead
                        )
                        row = {
                            "model": shape.name,
                            "backend": name,
                            "graphs": has_graph,
                            "temperature": sampling.temperature,
                            "runs_ahead": is_ahead,
                            "batch": work.batch,
                            "length": work.length,
                            "num_tokens": work.num_tokens,
                        }
                        row |= figures_of(steps.seconds, bound, work.batch * work.num_tokens)
                        yield row | {"kernels": steps.kernels}
                    forward.close()

    def _graphs(self, work: Work, backend: str) -> tuple[bool, ...]:
        """Return whether to measure with graphs, without, or both."""
        if work.num_tokens > 1 or backend == "torch" or self._plan.device.type != "cuda":
            return (False,)
        return (True,) if self._is_brief else (True, False)

    def _ways(self, part: str) -> list[tuple[SamplingParams, bool]]:
        """Return how to sample, and whether steps run ahead."""
        if part != "decode":
            return [(BEST, False)]
        return [(sampling, is_ahead) for sampling in (BEST, RANDOM) for is_ahead in (False, True)]


def _bound_seconds(part: str, shape: ModelShape, work: Work, ceilings: Ceilings) -> float:
    """Return the roofline; that of a short chunk is the bytes of weights and KV, which a decode reads too."""
    bound = shape.prefill_seconds if part == "prefill" else shape.decode_seconds
    return bound(work.batch, work.length, ceilings)


if __name__ == "__main__":
    main()
