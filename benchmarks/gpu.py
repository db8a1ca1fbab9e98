"""The engine on one GPU compared with the GPU's limits: decode, prefill, and a hand-over between two processes.

Random weights in the shapes of Llama 3.1 8B and Qwen 2.5 1.5B. Each part writes ``gpu_<part>.json`` when it is done; a
figure's ``share_of_bound`` refers to a roofline from the ceilings that the same run measured. ``--dry-run`` runs the same
code on the CPU with a tiny shape; its figures are meaningless.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import run_facts
from benchmarks.gpu_shapes import LLAMA, QWEN, TINY, Ceilings, ModelShape
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

PARTS = ("ceilings", "decode", "prefill", "handover")


@dataclass(frozen=True)
class Plan:
    """The plan of a run. ceilings: (bytes, width of the product)."""

    device: torch.device
    shapes: tuple[ModelShape, ...]
    handover_shape: ModelShape
    batches: tuple[int, ...]
    context: int
    prefill: Work
    num_rounds: int
    num_requests: int
    transports: tuple[str, ...]
    ceilings: tuple[int, int]


REAL = Plan(
    torch.device("cuda", 0), (LLAMA, QWEN), QWEN, (1, 64, 256), 1024, Work(8, 2048), 10, 12, ("nixl", "tcp"), (2**32, 8192)
)  # fmt: skip
DRY = Plan(torch.device("cpu"), (TINY,), TINY, (1, 3), 40, Work(2, 24), 1, 2, ("shm",), (2**16, 64))


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--models", help="comma-separated names of shapes; unset: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU with a tiny shape")
    given = parser.parse_args()
    plan = DRY if given.dry_run else REAL
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device (--dry-run needs none)")
    parts = given.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    ceilings = measure_ceilings(plan.device, *plan.ceilings)
    torch.cuda.empty_cache()
    shapes = [shape for shape in plan.shapes if given.models is None or shape.name in given.models.split(",")]
    for part in parts:
        _write(given.out, part, plan, ceilings, list(_rows(part, plan, shapes, ceilings)))


def _rows(part: str, plan: Plan, shapes: list[ModelShape], ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    if part == "handover":
        from benchmarks.gpu_handover import handovers  # the other parts do not need the services

        given = (plan.handover_shape, plan.device, plan.prefill.length, plan.num_requests, plan.transports)
        for row in handovers(*given):
            yield _printed(part, row)
    if part in ("decode", "prefill"):
        for shape in shapes:
            yield from _steps(part, plan, shape, ceilings)
            gc.collect()
            torch.cuda.empty_cache()


def _steps(part: str, plan: Plan, shape: ModelShape, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    works = [Work(batch, 1, plan.context - 1) for batch in plan.batches]
    works = works if part == "decode" else [plan.prefill]
    model = RandomModel(shape, plan.device, max(work.length for work in works))
    caches = model.caches(max(work.num_blocks for work in works))
    for name in usable_backends(plan.device, shape.head_dim):
        for work in works:
            bound = _bound_seconds(part, shape, work, ceilings)
            for has_graph in (False, True) if _can_capture(part, name, plan.device) else (False,):
                forward = model.forward_pass(name, work.batch if has_graph else None, caches)
                for sampling in (BEST, RANDOM) if part == "decode" else (BEST,):
                    seconds = timed_steps(model, forward, work, caches, plan.num_rounds, sampling)
                    row = {
                        "model": shape.name,
                        "backend": name,
                        "graphs": has_graph,
                        "temperature": sampling.temperature,
                        "batch": work.batch,
                        "length": work.length,
                    }
                    yield _printed(part, row | figures_of(seconds, bound, work.batch * work.num_tokens))
                forward.close()


def _bound_seconds(part: str, shape: ModelShape, work: Work, ceilings: Ceilings) -> float:
    bound = shape.decode_seconds if part == "decode" else shape.prefill_seconds
    return bound(work.batch, work.length, ceilings)


def _can_capture(part: str, backend: str, device: torch.device) -> bool:
    return part == "decode" and backend != "torch" and device.type == "cuda"


def _printed(part: str, row: dict[str, Any]) -> dict[str, Any]:
    short = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    print(part, json.dumps(short), flush=True)
    return row


def _write(out: Path, part: str, plan: Plan, ceilings: Ceilings, rows: list[dict[str, Any]]) -> None:
    is_cuda = plan.device.type == "cuda"
    device = torch.cuda.get_device_name(plan.device) if is_cuda else plan.device.type
    out.mkdir(parents=True, exist_ok=True)
    figures = {**run_facts(), "device": device, "ceilings": asdict(ceilings), "rows": rows}
    (out / f"gpu_{part}.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
