"""Plans for FlashInfer, with a fake of its wrappers: which kernel a step takes, and what is planned."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.planning import PlannedWrapper
from tests.attention_cases import CPU, Case, assert_close, reference, run

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning"
    ),  # raised by the interpreter
]
_USING = ("engine.attention.flashinfer_backend", "engine.attention.hybrid_backend")


@dataclass
class FakeWrapper:
    """A wrapper that records its plans and returns zeros."""

    kind: str
    options: dict[str, Any]
    plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.plans.append((arguments, options))

    def run(self, query: Tensor, cache: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.zeros_like(query) if out is None else out.zero_()


class Ready:
    """An event of a device that is never behind."""

    def record(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeWrapper]]:
    made: list[FakeWrapper] = []

    def maker(kind: str) -> Any:
        def make(workspace: Tensor, layout: str, **options: Any) -> FakeWrapper:
            assert layout == "HND"
            made.append(FakeWrapper(kind, options))
            return made[-1]

        return make

    fake: Any = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = maker("prefill")
    fake.BatchDecodeWithPagedKVCacheWrapper = maker("decode")
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    for name in _USING:
        monkeypatch.delitem(sys.modules, name, raising=False)
    backend = import_module("engine.attention.flashinfer_backend")
    monkeypatch.setattr(backend, "_planned", lambda wrapper: PlannedWrapper(wrapper, Ready()))
    yield made
    for name in _USING:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (((4096, 20), (300, 1)), ("prefill", "fa2")),
        (((4096, 20), (0, 300)), ("prefill", "auto")),
        (((4095, 20), (0, 2)), ("prefill", "auto")),
        (((0, 20),), ("prefill", "auto")),
        (((5000, 1), (3, 1)), ("decode", None)),
    ],
)
def test_short_chunks_behind_long_contexts_divide_the_context(
    wrappers: list[FakeWrapper],
    work: tuple[tuple[int, int], ...],
    expected: tuple[str, str | None],
) -> None:
    """FlashAttention-2's plan divides the context; a step with a longer chunk takes the fastest kernel for chunks."""
    from engine.attention.flashinfer_backend import FlashInferBackend

    case = Case(work=work, dtype=torch.float16)
    inputs = case.inputs()
    step = FlashInferBackend().plan(inputs, case.block_size, CPU)
    query, key, value = case.states(inputs)
    cache = torch.zeros(2, 2, case.num_kv_heads, case.block_size, case.head_dim, dtype=torch.float16)
    for _layer in range(2):
        step.attend(case.shape, query, key, value, cache)
    (wrapper,) = wrappers
    assert (wrapper.kind, wrapper.options.get("backend")) == expected
    ((arguments, options),) = wrapper.plans
    indptr = [inputs.query_start_loc.tolist()] if wrapper.kind == "prefill" else []
    assert [part.tolist() for part in arguments[: len(indptr)]] == indptr
    assert options["window_left"] == -1


def test_all_kernels_are_tried_before_the_backend_is_chosen(wrappers: list[FakeWrapper]) -> None:
    """A module that is missing is found when the model is loaded, not by the first request that needs it."""
    from engine.attention.backend import Needs
    from engine.attention.flashinfer_backend import try_out

    try_out(CPU, Needs("float16", 64, 4, frozenset({None, 100})), has_decodes=True)
    tried = [(wrapper.kind, wrapper.options.get("backend"), len(wrapper.plans)) for wrapper in wrappers]
    assert sorted(tried, key=str) == 2 * [("decode", None, 1)] + 2 * [("prefill", "auto", 1)] + 2 * [
        ("prefill", "fa2", 1)
    ]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (((0, 20),), [("prefill", "auto")]),
        (((0, 20), (300, 1)), [("prefill", "auto")]),
        (((4096, 20), (300, 1)), [("prefill", "fa2")]),
        (((300, 1), (3, 1)), []),
        (((300, 1),), []),
    ],
)
def test_hybrid_computes_chunks_by_flashinfer_and_decodes_by_triton(
    wrappers: list[FakeWrapper],
    work: tuple[tuple[int, int], ...],
    expected: list[tuple[str, str | None]],
) -> None:
    """A step of decodes calls nothing of FlashInfer, alone or as a static step; its results are right."""
    from engine.attention.hybrid_backend import HybridBackend

    case, backend = Case(work=work, dtype=torch.float16), HybridBackend()
    inputs = case.inputs()
    query, _, _ = case.states(inputs)
    step = backend.plan(inputs, case.block_size, CPU)
    output, pool = run(case, step, inputs, CPU)
    assert [(wrapper.kind, wrapper.options.get("backend")) for wrapper in wrappers] == expected
    wanted, wanted_pool = reference(case, inputs)
    assert torch.equal(pool.view(torch.uint8), wanted_pool.view(torch.uint8)), "both store alike"
    if expected:
        assert not output.any(), "the fake's zeros"
        return
    assert_close(output, wanted)
    static = backend.plan_static(8, inputs.block_table.shape[1], case.block_size, CPU)
    assert static.refill(inputs)
    cache = pool[:, 1]
    padded = torch.zeros(8, *query.shape[1:], dtype=query.dtype)
    padded[: len(query)] = query
    assert_close(static.attend(case.shape, padded, None, None, cache)[: len(query)], wanted)
    assert not wrappers


def test_hybrid_is_tried_out_without_the_decode_kernel(wrappers: list[FakeWrapper]) -> None:
    from engine.attention.backend import Needs
    from engine.attention.flashinfer_backend import try_out

    try_out(CPU, Needs("float16", 64, 4, frozenset({None})), has_decodes=False)
    assert [wrapper.kind for wrapper in wrappers] == ["prefill", "prefill"]


def test_static_steps_of_all_sizes_share_their_pages(wrappers: list[FakeWrapper]) -> None:
    """Each plan writes them; those of another size or kind of layer are not kept."""
    from engine.attention.flashinfer_backend import FlashInferBackend

    case, backend, max_blocks = Case(work=((40, 1), (3, 1)), dtype=torch.float16), FlashInferBackend(), 32
    inputs = case.inputs()
    cache = torch.zeros(2, 2, case.num_kv_heads, case.block_size, case.head_dim, dtype=torch.float16)
    for size in (8, 4, 2):
        static = backend.plan_static(size, max_blocks, case.block_size, CPU)
        query = torch.zeros(size, case.num_heads, case.head_dim, dtype=torch.float16)
        for window in (None, 7):
            static.attend(replace(case, window=window).shape, query, None, None, cache)
        assert static.refill(inputs)
        assert [len(each.plans) for each in wrappers[-2:]] == [2, 2]
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    for number, size in zip(range(6), (8, 8, 4, 4, 2, 2), strict=True):
        buffers = [wrappers[number].options[name] for name in names]
        assert [len(buffer) for buffer in buffers] == [size + 1, size * max_blocks, size]
        assert [buffer.data_ptr() for buffer in buffers] == [
            wrappers[0].options[name].data_ptr() for name in names
        ]
