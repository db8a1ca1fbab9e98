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
from tests.attention_cases import CPU, Case

pytestmark = pytest.mark.triton


@dataclass
class FakeWrapper:
    """A wrapper that records its plans and returns zeros."""

    kind: str
    options: dict[str, Any]
    plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.plans.append((arguments, options))

    def run(self, query: Tensor, cache: Tensor) -> Tensor:
        return torch.zeros_like(query)


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
    monkeypatch.delitem(sys.modules, "engine.attention.flashinfer_backend", raising=False)
    backend = import_module("engine.attention.flashinfer_backend")
    monkeypatch.setattr(backend, "_planned", lambda wrapper: PlannedWrapper(wrapper, Ready()))
    yield made
    del sys.modules["engine.attention.flashinfer_backend"]


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
    from engine.attention.choice import Needs
    from engine.attention.flashinfer_backend import try_out

    try_out(CPU, Needs("float16", 64, 4, frozenset({None, 100})))
    tried = [(wrapper.kind, wrapper.options.get("backend"), len(wrapper.plans)) for wrapper in wrappers]
    assert sorted(tried, key=str) == 2 * [("decode", None, 1)] + 2 * [("prefill", "auto", 1)] + 2 * [
        ("prefill", "fa2", 1)
    ]


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
