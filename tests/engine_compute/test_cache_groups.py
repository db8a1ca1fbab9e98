"""A rank whose layers keep the KV of different tokens: each attends by its group's table, in its group's region."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.cache_layout import CacheLayout
from contract.layout import KVLayout
from engine.compute.batch import InputBatch
from engine.compute.inputs import prepare_inputs
from engine.executor import InProcessExecutor
from engine.kv_cache.regions import Regions
from engine.kv_cache.shares import Workload
from engine.kv_cache.startup import KVCacheConfig, initialize_kv_cache
from engine.outputs import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.blocks.cache_pools import CachePools
from engine.settings import EngineSettings
from tests.checkpoints import load_reference, make_checkpoint, make_foreign_checkpoint, reference_greedy
from tests.engine_compute.driver import Driver, Sequence, greedy

BLOCK_SIZE = 4
CHUNK = 7
NUM_TOKENS = 12
SHARED = [(37 * i + 11) % 256 for i in range(24)]
PROMPTS = {"a": [7], "b": [3, 1, 4, 1, 5], "c": [*SHARED, *range(60, 81)], "d": [*SHARED, *range(90, 107)]}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}


class GroupedDriver(Driver):
    """Frees what windows do not reach after each step, and fills it with numbers that must never be read."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = EngineSettings(
            model=folder,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=4 * CHUNK,
            kv_cache_bytes=1 << 18,
            **settings,
        )
        self.executor = InProcessExecutor(self.settings)
        workload = Workload(self.executor.model_info.max_model_len, 4 * CHUNK, 4)
        initialize_kv_cache(self.executor, workload=workload)
        self.runner = self.executor.runner
        self.regions = self.runner.regions
        self.sequences: dict[str, Sequence] = {}
        pools = [BlockPool(region.num_blocks, BLOCK_SIZE) for region in self.regions.regions]
        self.pools = CachePools(self.regions.config.cache.groups, pools, CHUNK)

    def schedule(self, scheduled: SchedulerOutput, name: str, sequence: Sequence, count: int) -> None:
        needed = -(-(sequence.num_computed + count) // BLOCK_SIZE)
        new = self.pools.allocate(name, needed - self.pools.first.num_blocks_of(name))
        if sequence.is_known:
            cached = scheduled.scheduled_cached_reqs
            cached.req_ids.append(name)
            cached.resumed_from_preemption.append(False)
            cached.new_token_ids.append([])
            cached.new_block_ids.append(new)
            cached.num_computed_tokens.append(sequence.num_computed)
        else:
            scheduled.scheduled_new_reqs.append(
                NewRequestData(name, list(sequence.tokens), sequence.sampling, new, 0, len(sequence.tokens))
            )
        sequence.is_known = True
        sequence.num_computed += count

    def step(
        self,
        counts: dict[str, int],
        finished: set[str] | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> ModelRunnerOutput:
        output = super().step(counts, finished, drafts)
        for name in counts:
            self.pools.free_behind(name, self.sequences[name].num_computed)
        self.pools.check_integrity()
        for region, pool in zip(self.regions.regions, self.pools.pools, strict=True):
            held = {block for name in self.sequences for block in pool.table_of(name)}
            for block in set(range(1, region.num_blocks)) - held:
                region.pool[block] = float("nan")
            assert not region.pool[0].any(), "the null block stays zero"
        return output


def make(folder: Path, family: str) -> Path:
    if family not in WINDOWS:
        return make_foreign_checkpoint(folder, family, seed=3)
    make_checkpoint(folder, family, seed=3, **WINDOWS[family])
    return folder


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("gemma2", [None, 6]),
        ("gemma3", [None, 6]),
        ("gpt_oss", [None, 6]),
        ("llama4", [None, 10]),
        ("qwen2", [None, 5]),
        ("mistral", [6]),
    ],
)
def test_layers_with_windows_keep_what_they_reach(
    tmp_path: Path, family: str, windows: list[int | None]
) -> None:
    """Chunks beside decodes; blocks behind a window are other requests' at once."""
    folder = make(tmp_path, family)
    model = load_reference(folder)
    driver = GroupedDriver(folder, dtype="float32")
    assert [group.window for group in driver.regions.config.cache.groups] == windows
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, greedy())
    answers = driver.generate(list(PROMPTS), NUM_TOKENS, chunk=CHUNK)
    assert answers == {name: reference_greedy(model, own, NUM_TOKENS) for name, own in PROMPTS.items()}
    for group, pool in zip(driver.regions.config.cache.groups, driver.pools.pools, strict=True):
        for name, held in pool.holders().items():
            num_tokens = driver.sequences[name].num_computed
            assert held == -(-num_tokens // BLOCK_SIZE) - group.num_passed_blocks(num_tokens)
            assert held <= group.max_blocks(num_tokens, 1)
    driver.executor.shutdown()


def test_kernels_and_torch_give_the_same_answers_in_bfloat16(tmp_path: Path) -> None:
    """One window in all layers needs one table, which the kernels take too, where they can compute the model."""
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    folder = make_checkpoint(tmp_path, "mistral", seed=3, sliding_window=6, **sizes)
    whole = Driver(folder, dtype="bfloat16", block_size=BLOCK_SIZE)
    windowed = GroupedDriver(folder, dtype="bfloat16")
    assert [group.window for group in windowed.regions.config.cache.groups] == [6]
    answers = []
    for driver in (whole, windowed):
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt, greedy())
        answers.append(driver.generate(list(PROMPTS), NUM_TOKENS, chunk=CHUNK))
        driver.executor.shutdown()
    assert answers[0] == answers[1]


def test_the_kernels_see_one_window_in_each_layer(tmp_path: Path) -> None:
    """Layers with different windows need tables of their own, which the kernels have not: such a model keeps all tokens."""
    folder = make_checkpoint(tmp_path / "one", "mistral", hidden_size=64, head_dim=32, sliding_window=6)
    one = InProcessExecutor(EngineSettings(model=folder, dtype="bfloat16"))
    assert {spec.window for spec in one.runner.get_kv_cache_specs().values()} == {6}
    folder = make_checkpoint(tmp_path / "two", "qwen2", hidden_size=64, head_dim=32, **WINDOWS["qwen2"])
    two = InProcessExecutor(EngineSettings(model=folder, dtype="bfloat16"))
    kept = {5, None} if two.runner._model.forward.serves_groups else {None}
    assert {spec.window for spec in two.runner.get_kv_cache_specs().values()} == kept


LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE, dtype="float32")
CACHE = CacheLayout.of(LAYOUT, [6, None, 6])


def test_regions_lie_in_one_allocation() -> None:
    """One file, in which each region begins with a page; a layer's part is a view of its group's region."""
    regions = Regions(KVCacheConfig((3, 5), CACHE), torch.device("cpu"))
    full, window = regions.regions
    assert [tuple(region.pool.shape) for region in regions.regions] == [
        (3, 1, 2, 1, 4, 2),
        (5, 2, 2, 1, 4, 2),
    ]
    assert [len(layer) for layer in regions.layers] == [5, 3, 5]
    assert regions.first is full
    assert full.memfd == window.memfd
    assert window.pool.data_ptr() - full.pool.data_ptr() == mmap.PAGESIZE
    for number, layer in enumerate(regions.layers, 1):
        layer[2] = number
    assert bool((window.pool[2, 0] == 1).all())
    assert bool((full.pool[2, 0] == 2).all())
    assert bool((window.pool[2, 1] == 3).all())
    assert bytes(full.read_view(2)) == full.pool[2].numpy().tobytes()
    assert bytes(window.read_view(2)) == window.pool[2].numpy().tobytes()
    regions.copy_blocks([[], [(2, 4)]])
    assert window.pool[4].equal(window.pool[2])
    assert not full.pool[0].any()
    regions.layers[0][0] = 1.0
    regions.clear_null_blocks()
    assert not window.pool[0].any()
    regions.close()
    assert full.memfd is window.memfd is None


def test_each_group_has_a_table_without_what_no_token_of_the_step_sees() -> None:
    batch = InputBatch(2, 32, BLOCK_SIZE, CACHE)
    new = NewRequestData("a", list(range(11)), greedy(), ([1, 2, 3], [4, 5, 6]), 9, 11)
    other = NewRequestData("b", [1, 2], greedy(), ([7], [8]), 0, 2)
    scheduled = SchedulerOutput([new, other], num_scheduled_tokens={"a": 2, "b": 2})
    scheduled.total_num_scheduled_tokens = 4
    batch.update(scheduled)
    inputs = prepare_inputs(batch, scheduled)
    (window,) = inputs.others
    assert inputs.block_table.tolist() == [[1, 2, 3], [7, 0, 0]]
    # Its token at 9 sees the positions from 4 on.
    assert window.block_table.tolist() == [[0, 5, 6], [8, 0, 0]]
    assert window.layers == (0, 2)
    assert window.block_numbers.tolist() == [6, 6, 8, 8]
    assert window.slot_mapping.tolist() == [25, 26, 32, 33]
    own = inputs.of_group(window)
    assert own.block_table is window.block_table
    assert own.slot_mapping is window.slot_mapping
    assert np.array_equal(own.positions, inputs.positions)
    assert inputs.slot_mapping.tolist() == [13, 14, 28, 29]
