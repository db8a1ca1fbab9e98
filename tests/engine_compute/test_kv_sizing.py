"""The size of the KV cache: specs, formulas with an injected probe, the five steps."""

import logging
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from contract.cache_layout import CacheLayout
from contract.errors import InternalError, SettingError
from contract.layout import KVLayout
from engine.compute.inputs import PreparedInputs
from engine.connector import LayerWatch
from engine.executor import InProcessExecutor
from engine.kv_cache.shares import HOST_LIMIT_BYTES, Workload
from engine.kv_cache.sizing import (
    CudaProbe,
    HostProbe,
    MemoryReading,
    available_kv_bytes,
    profile_lengths,
)
from engine.kv_cache.startup import (
    KVCacheConfig,
    KVCacheSpec,
    block_bytes,
    initialize_kv_cache,
    make_config,
    unify,
)
from engine.models.loading import LoadedModel
from engine.options import EngineOptions
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.clock import Clock
from tests.fakes.engine.graphs import FakeDeviceForward

GIB = 1 << 30
SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=128, dtype="bfloat16")
QWEN_SPECS = {f"layer.{index}": SPEC for index in range(28)}


def layout_of(config: KVCacheConfig) -> KVLayout:
    (group,) = config.cache.groups
    return group.layout


@dataclass
class FixedProbe:
    """A probe with a fixed reading that records its calls."""

    reading: MemoryReading
    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.calls.append("start")

    def read(self) -> MemoryReading:
        self.calls.append("read")
        return self.reading


def make_settings(folder: Path = Path("model"), **fields: Any) -> EngineSettings:
    return EngineSettings(model=folder, **fields)


def test_block_bytes() -> None:
    """A13: 28 layers, 2 KV heads, dim 128, bf16, blocks of 16 tokens: 458,752 bytes. D6: for any spec."""
    assert block_bytes(QWEN_SPECS) == 458_752
    assert layout_of(make_config(QWEN_SPECS, 10**9)).block_bytes == 458_752
    spec = KVCacheSpec(block_size=4, num_kv_heads=3, head_size=80, dtype="float32")
    assert spec.block_bytes == (4 * 3 * 80 + 4 * 3 * 80) * 4


def test_defaults_that_size_a_step() -> None:
    """A12, A13, A27, A32: what a full batch holds decides about the memory that is left for the pool."""
    settings = EngineSettings(model=Path("model"))
    assert settings.block_size == 16
    assert EngineOptions().max_num_seqs == settings.max_num_seqs == 256
    assert settings.max_num_batched_tokens == 2048
    assert settings.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(("utilization", "workers"), [(0.9, 1), (0.5, 1), (0.9, 2)])
def test_device_formula(utilization: float, workers: int) -> None:
    """A12, D7: total × utilisation / workers − peak; 0.9 is a share of the total, not of the free memory."""
    reading = MemoryReading(total_bytes=80 * GIB, free_bytes=59 * GIB, peak_bytes=20 * GIB, is_host=False)
    settings = make_settings(gpu_memory_utilization=utilization, workers_on_host=workers)
    assert available_kv_bytes(reading, settings) == int(80 * GIB * utilization / workers) - 20 * GIB


def test_what_others_hold_is_not_given_to_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """Contexts, NCCL and other processes: the pool gets at most what is free, less the reserve, which is logged."""
    reading = MemoryReading(total_bytes=80 * GIB, free_bytes=30 * GIB, peak_bytes=20 * GIB, is_host=False)
    assert available_kv_bytes(reading, make_settings(gpu_memory_reserve_bytes=GIB)) == 29 * GIB
    assert available_kv_bytes(reading, make_settings()) == 30 * GIB - GIB // 2
    assert f"other processes {30 * GIB}, so {30 * GIB} are free" in caplog.text


@given(
    total=st.integers(1, 200 * GIB),
    held=st.integers(0, 200 * GIB),
    peak=st.integers(0, 200 * GIB),
    reserve=st.integers(0, GIB),
    workers=st.integers(1, 4),
    pool=st.none() | st.integers(1, 200 * GIB),
)
@example(total=10 * GIB, held=9 * GIB, peak=0, reserve=0, workers=1, pool=None)  # not always found
def test_a_pool_fits_beside_everything_else(
    total: int, held: int, peak: int, reserve: int, workers: int, pool: int | None
) -> None:
    """The pool fits within its share beside everything else, or the start is refused with the numbers."""
    held, peak = min(held, total), min(peak, max(0, total - held))
    reading = MemoryReading(total, total - held - peak, peak, is_host=False)
    settings = make_settings(gpu_memory_reserve_bytes=reserve, workers_on_host=workers, kv_cache_bytes=pool)
    try:
        found = available_kv_bytes(reading, settings)
    except SettingError as error:
        for number in (total, peak, held, reading.free_bytes):
            assert str(number) in error.message
        return
    assert 0 < found <= total - held - peak
    if pool is None:
        assert found + reserve + held + peak <= total
        assert found + peak <= total * 0.9 / workers


@pytest.mark.parametrize(
    ("free", "peak", "param"),
    [(GIB, 9 * GIB, "gpu_memory_utilization"), (GIB // 2, 5 * GIB, "gpu_memory_reserve_bytes")],
)
def test_the_error_for_a_full_device_names_its_numbers(free: int, peak: int, param: str) -> None:
    reading = MemoryReading(total_bytes=10 * GIB, free_bytes=free, peak_bytes=peak, is_host=False)
    with pytest.raises(SettingError, match=f"take {peak}, .* so {free} are free") as caught:
        available_kv_bytes(reading, make_settings())
    assert caught.value.param == param


def test_a_given_size_that_is_not_free_is_refused() -> None:
    reading = MemoryReading(total_bytes=10 * GIB, free_bytes=4 * GIB, peak_bytes=3 * GIB, is_host=False)
    assert available_kv_bytes(reading, make_settings(kv_cache_bytes=4 * GIB)) == 4 * GIB
    with pytest.raises(SettingError, match=f"other processes {3 * GIB}, so {4 * GIB} are free") as caught:
        available_kv_bytes(reading, make_settings(kv_cache_bytes=4 * GIB + 1))
    assert caught.value.param == "kv_cache_bytes"


class FullDevice:
    """torch's functions for a device of 10 GiB: 1 GiB is held by others, 4 were reserved at most, and 3 are now."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 6 * GIB, 10 * GIB

    def max_memory_reserved(self, device: torch.device) -> int:
        return 4 * GIB

    def memory_reserved(self, device: torch.device) -> int:
        return 3 * GIB


def test_what_a_step_will_take_again_is_not_free() -> None:
    found = CudaProbe(torch.device("cuda", 0), FullDevice()).read()
    assert found == MemoryReading(10 * GIB, 5 * GIB, 4 * GIB, is_host=False)


class OverfullForward(FakeDeviceForward):
    """A device without memory for a pass that is profiled, or for graphs."""

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> None:
        super().__init__(loaded, settings, device)
        self.fails_to_capture = settings.max_num_seqs > 1

    def forward(self, inputs: PreparedInputs, caches: Any, watch: LayerWatch | None = None) -> torch.Tensor:
        if caches is None and not self.fails_to_capture:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.\nMore.")
        return super().forward(inputs, caches, watch)

    def capture(self, caches: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nMore.")


@pytest.mark.parametrize(
    ("max_num_seqs", "param", "message"),
    [
        (1, "max_num_batched_tokens", r"a step of max_num_batched_tokens .*: .*7 GiB\.$"),
        (2, "gpu_memory_reserve_bytes", r"CUDA graphs does not fit .*: .*8 GiB\.$"),
    ],
)
def test_a_device_that_is_full_at_start_is_a_wrong_setting(
    tmp_path: Path, max_num_seqs: int, param: str, message: str
) -> None:
    settings = make_settings(make_checkpoint(tmp_path), kv_cache_bytes=1 << 20, max_num_seqs=max_num_seqs)
    executor = InProcessExecutor(settings, make_forward=OverfullForward)
    with pytest.raises(SettingError, match=message) as caught:
        initialize_kv_cache(executor)
    assert caught.value.param == param
    executor.shutdown()


@pytest.mark.parametrize(
    ("free", "workers", "expected"),
    [(2 * GIB, 1, GIB // 2), (2 * GIB, 4, GIB // 8), (100 * GIB, 1, GIB), (100 * GIB, 4, HOST_LIMIT_BYTES)],
)
def test_the_host_formula(free: int, workers: int, expected: int) -> None:
    """A12: on the host, min(1 GiB, a quarter of the free memory / workers)."""
    reading = MemoryReading(200 * GIB, free, 0, is_host=True)
    assert available_kv_bytes(reading, make_settings(workers_on_host=workers)) == expected


@pytest.mark.parametrize("is_host", [True, False])
def test_an_explicit_size_takes_precedence(is_host: bool) -> None:
    reading = MemoryReading(2 * GIB, GIB, GIB, is_host=is_host)
    assert available_kv_bytes(reading, make_settings(kv_cache_bytes=12345)) == 12345


def test_host_probe_reads_the_host_and_its_control_group(tmp_path: Path) -> None:
    bare = HostProbe(tmp_path).read()
    assert bare.is_host
    assert 0 < bare.free_bytes <= bare.total_bytes
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert HostProbe(tmp_path).read() == MemoryReading(1_000_000, 600_000, 0, is_host=True)
    (tmp_path / "memory.max").write_text("max\n")
    assert HostProbe(tmp_path).read().total_bytes == bare.total_bytes


def test_fewer_than_two_blocks_is_an_error_with_both_numbers() -> None:
    with pytest.raises(SettingError, match=r"458751 .* 458752 bytes \(917504 bytes\)") as caught:
        make_config(QWEN_SPECS, 458_751)
    assert caught.value.param == "kv_cache_bytes"
    assert make_config(QWEN_SPECS, 2 * 458_752).num_blocks == (2,)


def test_blocks_are_floored_and_unified_to_the_smallest() -> None:
    """D9: floor(available / block bytes) on each rank, then the minimum over all ranks."""
    configs = [make_config(QWEN_SPECS, 458_752 * blocks + 458_751) for blocks in (9, 7, 8)]
    assert [config.num_blocks for config in configs] == [(9,), (7,), (8,)]
    assert [config.num_blocks for config in unify(configs)] == [(7,), (7,), (7,)]


def test_other_differences_between_ranks_are_an_internal_error() -> None:
    """D9: all ranks must be equal."""
    cache = make_config(QWEN_SPECS, 10**9).cache
    other = KVLayout(num_layers=28, num_kv_heads=1, head_dim=128, block_size=16, dtype="bfloat16")
    with pytest.raises(InternalError, match="differ"):
        unify([KVCacheConfig((5,), cache), KVCacheConfig((5,), CacheLayout.of(other, [None] * 28))])


def test_shapes_that_differ_need_windows_that_differ() -> None:
    """Only a group of layers has a shape of its own, and without groups there is one shape."""
    other = KVCacheSpec(16, 2, 64, "bfloat16")
    workload = Workload(4096, 512, 4)
    with pytest.raises(SettingError, match="without windows they cannot share blocks"):
        make_config({"a": SPEC, "b": replace(other, window=64)}, 10**9)
    with pytest.raises(
        SettingError, match=r"the layers \[0, 1\] have equal windows and KV of different shapes"
    ):
        make_config({"a": SPEC, "b": other}, 10**9, workload)
    # A window that is wider than any text is still one.
    cache = make_config({"a": SPEC, "b": replace(other, window=9999)}, 10**9, workload).cache
    assert [group.layout.head_dim for group in cache.groups] == [SPEC.head_size, 64]


@given(st.integers(1, 600), st.integers(1, 300), st.integers(2, 4096))
def test_the_profile_run_distributes_every_token(max_tokens: int, max_reqs: int, max_len: int) -> None:
    """D8: the quotient for every request, plus the remainder."""
    lengths = profile_lengths(max_tokens, max_reqs, max_len)
    assert len(lengths) <= max_reqs
    assert min(lengths) >= 1
    assert max(lengths) <= max_len
    if max(lengths) < max_len:
        assert sum(lengths) == max_tokens
        assert max(lengths) - min(lengths) <= 1


def test_profile_run_example() -> None:
    """D8: 10 tokens over 4 requests are 3, 3, 2, 2."""
    assert profile_lengths(10, 4, 100) == [3, 3, 2, 2]


def test_startup_with_the_device_formula(tmp_path: Path) -> None:
    """D5, D7, D10, D11: probe → blocks → a zeroed pool of that size after the warm-up; returns (blocks, 0)."""
    folder = make_checkpoint(tmp_path)
    block = 2 * 2 * 2 * 4 * 16 * 4
    reading = MemoryReading(
        total_bytes=100 * block, free_bytes=60 * block, peak_bytes=40 * block, is_host=False
    )
    probe = FixedProbe(reading)
    settings = make_settings(
        folder, block_size=4, max_num_seqs=3, max_num_batched_tokens=10, gpu_memory_reserve_bytes=block
    )
    executor = InProcessExecutor(settings, probe)
    assert initialize_kv_cache(executor) == (50, 0)
    assert probe.calls == ["start", "read"]
    memory = executor.runner.memory
    assert memory.num_blocks == 50
    assert tuple(memory.pool.shape) == (50, 2, 2, 2, 4, 16)
    assert not memory.pool.any()
    assert executor.layout == memory.layout
    assert list(executor.runner.get_kv_cache_specs()) == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    executor.shutdown()


def test_startup_logs_each_step_with_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D5: specs, available memory, config per worker, unify, allocate."""
    folder = make_checkpoint(tmp_path)
    executor = InProcessExecutor(make_settings(folder, kv_cache_bytes=1 << 20))
    with caplog.at_level(logging.INFO, logger="engine.kv_cache.startup"):
        initialize_kv_cache(executor)
    timed = [
        found for text in caplog.messages if (found := re.fullmatch(r"KV cache (.*): \d+\.\d{3} s", text))
    ]
    names = [found.group(1) for found in timed]
    assert names == [
        "1/5 specs", "2/5 available memory", "3/5 config per worker", "4/5 unify", "5/5 allocate", "warm-up",
    ]  # fmt: skip


class SlowRanks:
    """Two ranks that need an exact time for each call."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def collective_rpc(self, method: str, *_: Any) -> list[Any]:
        seconds, result = {
            "get_kv_cache_specs": (0.25, QWEN_SPECS),
            "determine_available_memory": (3.0, GIB),
            "initialize_from_config": (1.5, None),
            "warm_up": (7.0, None),
        }[method]
        self.clock.now += seconds
        return [result, result]


def test_the_times_of_a_start_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """D13: the total of profiling, cache creation and warm-up, beside the time of each."""
    clock = Clock()
    with caplog.at_level(logging.INFO, logger="engine.kv_cache.startup"):
        initialize_kv_cache(SlowRanks(clock), clock)
    assert "KV cache 2/5 available memory: 3.000 s" in caplog.messages
    totals = [text for text in caplog.messages if "in total" in text]
    assert totals == ["KV cache: profiling, allocation and warm-up took 11.750 s in total"]


def test_startup_without_enough_memory(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    executor = InProcessExecutor(make_settings(folder, kv_cache_bytes=100))
    with pytest.raises(SettingError, match="there are 100 bytes for the KV cache"):
        initialize_kv_cache(executor)
