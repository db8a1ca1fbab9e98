"""Times decode steps with products of small batches by our kernels and by torch's, and compares the logits of both.

Both differ from each other by rounding alone, so each is also compared with the same weights in float32: which side is
nearer to it, and by how much.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_shapes import Ceilings, ModelShape
from benchmarks.gpu_steps import BEST, BLOCK_SIZE, RandomModel, Work, figures_of, timed_steps
from engine.attention.backend import create_backend
from engine.compute.forward import ForwardPass
from engine.compute.forward_plain import PlainForward
from engine.models.language_model import LanguageModel

BATCHES = (1, 4, 16, 64)
_HOST = torch.device("cpu")
_NO_KERNELS: tuple[torch.dtype, ...] = ()


def small_batch(
    shape: ModelShape,
    device: torch.device,
    context: int,
    batches: Sequence[int],
    num_rounds: int,
    ceilings: Ceilings,
) -> Iterator[dict[str, Any]]:
    """Yield a row per number of requests. On the host, plain torch is both sides."""
    works = [Work(batch, 1, context - 1) for batch in batches]
    model = RandomModel(shape, device, context)
    caches = model.caches(max(work.num_blocks for work in works))
    name = "triton" if device.type == "cuda" else "torch"
    sides: dict[str, LanguageModel] = {
        "before": _computed(model, _NO_KERNELS),
        "ours": _computed(model, None),
    }
    found: dict[int, dict[str, Any]] = {}
    for work in works:
        row: dict[str, Any] = {"model": shape.name, "batch": work.batch}
        logits: dict[str, Tensor] = {}
        for side, computing in sides.items():
            forward = model.forward_pass(name, _graph_size(work, device), caches, computing)
            bound = shape.decode_seconds(work.batch, work.length, ceilings)
            steps = timed_steps(
                model, forward, work, caches, num_rounds, BEST, runs_ahead=device.type == "cuda"
            )
            figures = figures_of(steps.seconds, bound, work.batch)
            ending = "_before" if side == "before" else ""
            row |= {f"ms{ending}": figures["ms"], "bound_ms": figures["bound_ms"]}
            row["share_before" if ending else "share_of_bound"] = figures["share_of_bound"]
            logits[side] = _logits(forward, model, work, caches)
            forward.close()
        row["relative_difference_of_logits"] = _relative(logits["ours"], logits["before"])
        found[work.batch] = {**row, "logits": logits}
    del sides
    yield from _beside_float32(model, works, caches, found)


def _computed(model: RandomModel, few_dtypes: tuple[torch.dtype, ...] | None) -> LanguageModel:
    """Return what computes the model: our fused operations on a GPU. few_dtypes: see SmallBatch; None: the default."""
    if model.device.type != "cuda":
        return model.model
    from engine.fused.decoder import FusedDecoder
    from engine.fused.small_batch import SmallBatch

    small_batch = None if few_dtypes is None else SmallBatch(model.device, few_dtypes)
    return FusedDecoder(model.model, model.shape.config(model.max_length), small_batch)


def _graph_size(work: Work, device: torch.device) -> int | None:
    return work.batch if device.type == "cuda" else None


def _beside_float32(
    model: RandomModel, works: Sequence[Work], caches: Sequence[Tensor], found: dict[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Compute the same steps in float32 on the host, which has room for it; yield the rows with both errors.

    The model moves there, and is of no further use on the device.
    """
    gc.collect()
    wide = model.model.to("cpu", torch.float32)
    wide.place(_HOST)
    wide_caches = [layer.cpu().float() for layer in caches]
    forward = PlainForward(wide, create_backend("torch"), BLOCK_SIZE, _HOST)
    for work in works:
        row = found[work.batch]
        logits: dict[str, Tensor] = row.pop("logits")
        expected = _logits(forward, model, work, wide_caches)
        yield row | {
            "error_before": _relative(logits["before"], expected),
            "error": _relative(logits["ours"], expected),
        }


def _logits(forward: ForwardPass, model: RandomModel, work: Work, caches: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode():
        states = forward.begin(work.inputs(model.shape.vocab_size), caches)()
        assert states is not None
        return forward.logits(states).float().cpu()


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
