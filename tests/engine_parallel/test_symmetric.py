"""Sums of ranks over shared buffers, by kernels that are played: threads that read each other's tensors."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._C import _distributed_c10d

from contract.errors import SettingError
from engine.distributed.process_group import (
    NUM_BYTES,
    ONE_SHOT_BYTES,
    NamedMemory,
    SymmetricSums,
    TorchRankGroup,
    find_library,
)
from engine.executor import create_executor
from engine.models.loading import load
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver
from tests.engine_compute.test_equals_transformers import PROMPTS
from tests.engine_parallel.driver import RanksDriver
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup

dist: Any = distributed
c10d: Any = _distributed_c10d

CPU = torch.device("cpu")


class PlayedMemory:
    """One rank's view of torch's symmetric memory: its buffer is shown to the others, and only that can be summed."""

    def __init__(self, exchange: Exchange, *, error: str = "") -> None:
        self._exchange = exchange
        self._error = error
        self._rank = -1
        self._buffers: list[Tensor] = []
        self.log: list[str] = []

    def set_group_info(self, name: str, rank: int, size: int, store: object) -> None:
        self._rank = rank
        assert size == self._exchange.size and isinstance(store, dist.PrefixStore)

    def empty_strided_p2p(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if self._error:
            raise RuntimeError(self._error)
        return torch.full(tuple(size), 255, dtype=dtype, device=device)

    def rendezvous(self, buffer: Tensor, name: str) -> None:
        self._buffers = self._exchange.exchange(self._rank, buffer)

    def one_shot_all_reduce_copy(self, own: Tensor, part: Tensor, operation: str, name: str) -> Tensor:
        self.log.append("one shot")
        assert own.shape == part.shape and own.dtype == part.dtype
        own.copy_(part)
        return self._sum(own)

    def two_shot_all_reduce_out(self, own: Tensor, operation: str, name: str, output: Tensor) -> Tensor:
        self.log.append("two shots")
        return output.copy_(self._sum(own))

    def _sum(self, own: Tensor) -> Tensor:
        """Add up the same bytes of all buffers in the order of the ranks; wait before and after it."""
        buffer = self._buffers[self._rank]
        assert own.data_ptr() == buffer.data_ptr() and own.nbytes % 16 == 0
        self._exchange.exchange(self._rank, None)
        parts = [each[: own.nbytes].view(own.dtype).view(own.shape) for each in self._buffers]
        total = torch.stack(parts).sum(dim=0)
        self._exchange.exchange(self._rank, None)
        return total


def on_ranks(size: int, action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return [
            future.result(timeout=30) for future in [threads.submit(action, rank) for rank in range(size)]
        ]


def sums_of(size: int, **options: Any) -> tuple[list[SymmetricSums], list[PlayedMemory]]:
    exchange, store = Exchange(size), dist.HashStore()
    played = [PlayedMemory(exchange, **options) for _ in range(size)]
    made = on_ranks(size, lambda rank: SymmetricSums((played[rank],) * 2, CPU, rank, size, store))
    return made, played


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_any_length_one_after_the_other(size: int, dtype: torch.dtype) -> None:
    """The buffers are used again by the next sum; the result does not lie in them."""
    sums, played = sums_of(size)
    width = 64
    lengths = [1, 3, ONE_SHOT_BYTES // dtype.itemsize // width, 1 + ONE_SHOT_BYTES // dtype.itemsize // width]
    lengths += [NUM_BYTES // dtype.itemsize // width, 2]

    def add(rank: int) -> list[Tensor]:
        found = []
        for number, length in enumerate(lengths):
            part = torch.full((length, width), float(rank + number), dtype=dtype)
            assert sums[rank].accepts(part)
            found.append(sums[rank].add_up(part))
        return found

    for totals in on_ranks(size, add):
        for number, (length, total) in enumerate(zip(lengths, totals, strict=True)):
            assert total.shape == (length, width)
            assert set(total.flatten().tolist()) == {float(sum(range(size)) + size * number)}
    assert played[0].log == [*["one shot"] * 3, *["two shots"] * 2, "one shot"]


def test_what_does_not_fit_is_left_to_nccl() -> None:
    (first, _), _ = sums_of(2)
    assert not first.accepts(torch.zeros(NUM_BYTES // 4 + 4))
    assert not first.accepts(torch.zeros(5, dtype=torch.bfloat16))
    assert not first.accepts(torch.zeros(8, dtype=torch.float16))


@pytest.mark.parametrize(
    ("dtype", "is_refused"), [("float16", True), ("auto", True), ("float32", False), ("bfloat16", False)]
)
def test_a_dtype_that_is_never_summed_is_refused_when_the_model_is_loaded(
    tmp_path: Path, dtype: str, is_refused: bool
) -> None:
    """Not by the first sum of a model that serves already. auto: the dtype of the checkpoint."""
    folder = make_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16", "torch_dtype": "float16"}))
    joined = SimpleNamespace(_set_default_timeout=lambda _: None)
    group = TorchRankGroup(CPU, 0, 2, dist.HashStore(), timedelta(seconds=5), lambda *_: joined)
    load(folder, dtype, None, CPU, group)
    sums, _ = sums_of(2)
    group.sums = sums[0]
    refused = pytest.raises(SettingError, match=r"symmetric, but it adds .* torch\.float16; choose nccl")
    with refused if is_refused else nullcontext():
        load(folder, dtype, None, CPU, group)


def test_devices_that_share_no_memory_are_refused() -> None:
    with pytest.raises(SettingError, match=r"cpu cannot share memory .* peer access is off; choose nccl"):
        sums_of(2, error="peer access is off")
    with pytest.raises(SettingError, match="it needs CUDA devices, and this is cpu"):
        find_library(CPU, None)


def test_torch_finds_the_ranks_by_their_name() -> None:
    """Its kernels look up the process group, although ours is not torch's default one; the host has no such memory."""
    store = dist.HashStore()

    def register(rank: int) -> str:
        group = TorchRankGroup(CPU, rank, 2, store, timedelta(seconds=30))
        memory = NamedMemory(CPU, group.backend)
        name = f"ranks of {rank}"
        memory.set_group_info(name, rank, 2, dist.PrefixStore(name, store))
        found = c10d._resolve_process_group(name)
        assert (found.rank(), found.size(), found.group_name) == (rank, 2, name)
        with pytest.raises(RuntimeError, match="cpu"):
            memory.empty_strided_p2p((16,), (1,), torch.uint8, CPU)
        c10d._unregister_process_group(name)
        group.close()
        return name

    assert on_ranks(2, register) == ["ranks of 0", "ranks of 1"]


@pytest.mark.slow
def test_an_engine_on_the_host_refuses_the_setting(tmp_path: Path) -> None:
    """In real ranks, before any weights are read."""
    settings = EngineSettings(
        model=make_checkpoint(tmp_path), tensor_parallel_size=2, all_reduce="symmetric", kv_cache_bytes=2**20
    )
    with pytest.raises(SettingError, match="all_reduce is symmetric"):
        create_executor(settings)


def test_a_group_adds_short_parts_up_by_shared_memory_and_others_by_its_collectives() -> None:
    sums, played = sums_of(2)
    store = dist.HashStore()

    def add(rank: int) -> tuple[Tensor, Tensor]:
        group = TorchRankGroup(CPU, rank, 2, store, timedelta(seconds=30))
        group.sums = sums[rank]
        short = group.add_up(torch.full((4, 8), float(rank + 1)))
        odd = group.add_up(torch.full((3,), float(rank + 1)))
        group.close()
        return short, odd

    for short, odd in on_ranks(2, add):
        assert torch.equal(short, torch.full((4, 8), 3.0)) and torch.equal(odd, torch.full((3,), 3.0))
    assert [each.log for each in played] == [["one shot"]] * 2


def test_two_ranks_give_the_answers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=3)

    def answers(driver: Driver) -> dict[str, list[int]]:
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        found = driver.generate(list(PROMPTS), 6, 7)
        driver.executor.shutdown()
        return found

    expected = answers(Driver(folder))
    sums, played = sums_of(2)
    lock = threading.Lock()
    num_sums = [0]

    def add_up(group: LocalRankGroup, part: Tensor) -> Tensor:
        with lock:
            num_sums[0] += 1
        assert sums[group.rank].accepts(part)
        return sums[group.rank].add_up(part.contiguous())

    monkeypatch.setattr(LocalRankGroup, "add_up", add_up)
    assert answers(RanksDriver(folder)) == expected
    assert sum(len(each.log) for each in played) == num_sums[0] > 100
