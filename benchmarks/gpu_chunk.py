"""Times a step with a part of a prompt: as it is launched without graphs, in pieces, and as one graph of all of it."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_shapes import ModelShape
from benchmarks.gpu_steps import BLOCK_SIZE, RandomModel, Work, seconds_of, usable_backends, wait_for
from engine.attention.backend import AttentionBackend, create_backend
from engine.compute.forward_plain import PlainForward
from engine.compute.piecewise import PiecewiseGraphs, piece_sizes
from engine.compute.recording import CudaRecorder, Recorder
from engine.compute.staging import on_device
from tests.fakes.engine.graphs import RerunRecorder, StaticTorchBackend


def chunk_steps(
    shape: ModelShape, device: torch.device, work: Work, num_rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each backend and way. error: of the states, beside those of the eager step of that backend.

    The one graph replays this very step: it shows what launches cost, and no engine can run it so.
    """
    model = RandomModel(shape, device, work.length)
    caches = model.caches(work.num_blocks)
    is_cuda = device.type == "cuda"
    usable = usable_backends(device, shape.head_dim, shape.num_heads // shape.num_kv_heads)
    for name in [name for name in ("triton", "hybrid") if name in usable] if is_cuda else ["torch"]:
        backend = create_backend(name) if is_cuda else StaticTorchBackend()
        plain = PlainForward(model.fused if is_cuda else model.model, backend, BLOCK_SIZE, device)
        with torch.inference_mode():
            runs = _ways(plain, backend, model, caches, work)
            expected = runs["eager"]().clone()
            for launch, run in runs.items():
                states = run()
                row: dict[str, Any] = {"model": shape.name, "backend": name, "launch": launch}
                row |= {"num_tokens": work.num_tokens, "length": work.length}
                error = float((states - expected).float().norm() / expected.float().norm())
                seconds = seconds_of(partial(_waited, run, device), num_rounds)
                yield row | {"ms": statistics.median(seconds) * 1e3, "error": error}


def _waited(run: Callable[[], object], device: torch.device) -> None:
    run()
    wait_for(device)


def _ways(
    plain: PlainForward, backend: AttentionBackend, model: RandomModel, caches: list[Tensor], work: Work
) -> dict[str, Callable[[], Tensor]]:
    device = model.device
    recorder: Recorder = CudaRecorder(device) if device.type == "cuda" else RerunRecorder()
    inputs = work.inputs(model.shape.vocab_size)
    pieces = PiecewiseGraphs(plain, recorder, piece_sizes(inputs.num_tokens)[-1:])
    pieces.capture(caches)

    def piecewise() -> Tensor:
        states = pieces.forward(inputs)
        assert states is not None
        return states

    ways: dict[str, Callable[[], Tensor]] = {
        "eager": lambda: plain.forward(inputs, caches),
        "piecewise": piecewise,
    }
    if device.type == "cpu" or isinstance(backend, _captured()):
        step = backend.plan(inputs, BLOCK_SIZE, device)
        ids, positions = on_device([inputs.input_ids, inputs.positions], device)
        recording = recorder.record(lambda: plain.model(ids, positions, step, caches))

        def one_graph() -> Tensor:
            recording.replay()
            return recording.output

        ways["one graph"] = one_graph
    return ways


def _captured() -> type:
    """Return the backend whose chunks a graph may hold: FlashInfer's plans are not made for it."""
    from engine.attention.triton_backend import TritonBackend

    return TritonBackend
