"""Batches for attention tests, and comparisons of any backend on any device with the torch backend on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from contract.sampling import SamplingParams
from engine.attention.backend import (
    AttentionBackend,
    AttentionStep,
    LayerShape,
    StaticDecode,
    create_backend,
)
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.compute.recording import Recorder
from engine.outputs import NewRequestData, SchedulerOutput

Work = tuple[tuple[int, int], ...]

CPU = torch.device("cpu")
NUM_LAYERS = 3
NUM_TOKENS = 250
UNWRITTEN = 3.0
"""The content behind the computed tokens of a block. In an engine these are zeros that are never overwritten."""
MIXED = ((0, 1), (9, 1), (0, 33), (31, 1), (7, 5), (64, 70), (700, 1), (15, 1), (16, 1), (3, 2))


@dataclass(frozen=True)
class Case:
    """Heads and lengths; ``work``: (computed tokens, tokens of this step) of each request."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    work: Work = MIXED

    @property
    def shape(self) -> LayerShape:
        """The shape of every layer."""
        return LayerShape(self.head_dim**-0.5, self.window, self.softcap)

    def inputs(self, max_len: int | None = None) -> PreparedInputs:
        """Return the step's inputs. Blocks are scattered over the pool, and each request has one unused block."""
        rng = np.random.default_rng(0)
        free = rng.permutation(np.arange(1, self.num_blocks)).tolist()
        scheduled = SchedulerOutput()
        for index, (computed, count) in enumerate(self.work):
            length = computed + count
            blocks = [free.pop() for _ in range(-(-length // self.block_size) + 1)]
            tokens = rng.integers(0, NUM_TOKENS, length).tolist()
            scheduled.scheduled_new_reqs.append(
                NewRequestData(str(index), tokens, SamplingParams(), (blocks,), computed, length)
            )
            scheduled.num_scheduled_tokens[str(index)] = count
        batch = InputBatch(len(self.work), max_len or self.max_len, self.block_size)
        batch.update(scheduled)
        return prepare_inputs(batch, scheduled)

    @property
    def max_len(self) -> int:
        """The largest length of any request, with its spare block."""
        return max(sum(lengths) for lengths in self.work) + 2 * self.block_size

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
        return 1 + sum(-(-sum(lengths) // self.block_size) + 1 for lengths in self.work)

    def states(self, inputs: PreparedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of the step."""
        generator = torch.Generator().manual_seed(1)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        query, key, value = (
            torch.randn(inputs.num_tokens, count, self.head_dim, generator=generator).to(self.dtype)
            for count in heads
        )
        return query, key, value

    def pool(self, inputs: PreparedInputs) -> Tensor:
        """Return a pool of several layers: random where tokens are computed, NaN in other blocks."""
        generator = torch.Generator().manual_seed(2)
        shape = (self.num_blocks, NUM_LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim)
        pool = torch.full(shape, torch.nan, dtype=self.dtype)
        pool[0] = 0
        for table, computed in zip(inputs.block_table, inputs.num_computed_tokens.tolist(), strict=True):
            for index in range(-(-computed // self.block_size)):
                block = torch.randn(shape[1:], generator=generator).to(self.dtype)
                block[..., max(0, computed - index * self.block_size) :, :] = UNWRITTEN
                pool[int(table[index])] = block
        return pool


def run(
    case: Case, step: AttentionStep, inputs: PreparedInputs, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the output of the middle layer and the pool after it, on the host."""
    query, key, value = (states.to(device) for states in case.states(inputs))
    pool = case.pool(inputs).to(device)
    cache = pool[:, 1]
    step.store(key, value, cache)
    return step.attend(case.shape, query, key, value, cache).cpu(), pool.cpu()


def assert_equals_torch(case: Case, backend: AttentionBackend, device: torch.device) -> None:
    """Assert that the output equals the float32 reference and that the pools are equal byte for byte."""
    inputs = case.inputs()
    step = backend.plan(inputs, case.block_size, device)
    output, pool = run(case, step, inputs, device)
    expected, expected_pool = reference(case, inputs)
    assert_close(output, expected)
    assert torch.equal(pool.view(torch.uint8), expected_pool.view(torch.uint8))


def assert_replays_are_right(
    wide: Case, works: Sequence[Work], static: StaticDecode, recorder: Recorder, device: torch.device
) -> None:
    """Capture a step of eight requests, then replay it for each of ``works``; ``wide`` has the longest of them."""
    heads = (wide.num_heads, wide.num_kv_heads, wide.num_kv_heads)
    states = [torch.full((8, count, wide.head_dim), 7.0, dtype=wide.dtype, device=device) for count in heads]
    cases = [replace(wide, work=work) for work in works]
    size = (1 + max(case.num_blocks for case in cases), *wide.pool(wide.inputs()).shape[1:])
    guard, pool = torch.split(torch.zeros(size, dtype=wide.dtype, device=device), [1, size[0] - 1])

    def attend() -> Tensor:
        static.store(states[1], states[2], pool[:, 1])
        return static.attend(wide.shape, states[0], states[1], states[2], pool[:, 1])

    recording = recorder.record(attend)
    assert not pool.any()
    assert not guard.any()
    for case in cases:
        inputs = case.inputs(wide.max_len)
        pool[: case.num_blocks] = case.pool(inputs).to(device)
        for target, source in zip(states, case.states(inputs), strict=True):
            target[: len(source)] = source.to(device)
        static.refill(inputs)
        recording.replay()
        expected, expected_pool = reference(case, inputs)
        assert_close(recording.output[: inputs.num_reqs].cpu(), expected)
        own = pool[: case.num_blocks].cpu()
        assert torch.equal(own.view(torch.uint8), expected_pool.view(torch.uint8))
        assert not guard.any()


def reference(case: Case, inputs: PreparedInputs) -> tuple[Tensor, Tensor]:
    """Return plain torch's output on the CPU, computed in float32, and the pool in the case's own number format."""
    plan = create_backend("torch").plan(inputs, case.block_size, CPU)
    query, key, value = case.states(inputs)
    pool = case.pool(inputs)
    plan.store(key, value, pool[:, 1])
    wide = pool.float()
    return plan.attend(case.shape, query.float(), key.float(), value.float(), wide[:, 1]), pool


def assert_close(output: Tensor, expected: Tensor) -> None:
    """Compare by the relative error of the whole tensor: 1e-5 in float32, 1e-2 in half precision; NaN fails."""
    limit = 1e-5 if output.dtype == torch.float32 else 1e-2
    error = (output.float() - expected).norm() / expected.norm()
    assert float(error) < limit


def assert_far_blocks_are_right(case: Case, backend: AttentionBackend, device: torch.device) -> None:
    """Compare a step whose blocks all lie beyond 2^31 elements of the pool, which is mostly memory that is never touched.

    Decodes run once more as a static step. The pool's near end stays as it was.
    """
    inputs = case.inputs()
    content = case.pool(inputs)
    first = 2**31 // content[0].numel() + 1
    pool = torch.empty((first + len(content), *content.shape[1:]), dtype=case.dtype, device=device)
    pool[:2] = 0
    far = replace(
        inputs,
        block_table=np.where(inputs.block_table > 0, inputs.block_table + first, 0).astype(np.int32),
        block_numbers=inputs.block_numbers + np.int32(first),
        slot_mapping=inputs.slot_mapping + first * case.block_size,
    )
    query, key, value = (states.to(device) for states in case.states(inputs))
    expected, expected_pool = reference(case, inputs)
    steps: list[AttentionStep] = [backend.plan(far, case.block_size, device)]
    if inputs.max_query_len == 1:
        max_blocks = inputs.block_table.shape[1]
        static = backend.plan_static(inputs.num_reqs, max_blocks, case.block_size, device)
        assert static is not None and static.refill(far)
        steps.append(static)
    for step in steps:
        pool[first:] = content.to(device)
        step.store(key, value, pool[:, 1])
        output = step.attend(case.shape, query, key, value, pool[:, 1])
        assert_close(output.cpu(), expected)
        assert torch.equal(pool[first:].cpu().view(torch.uint8), expected_pool.view(torch.uint8))
        assert not pool[:2].any()
