"""Two pools of KV blocks on one machine, with scattered blocks on both sides, and rounds that compare ways to copy.

The ways take turns: a round runs each once, in a random order. So a ratio compares runs that are milliseconds apart, other
load on the machine affects both, and none always finds the caches full of modified or of only read data.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.layout import KVLayout
from engine.kv_cache.memory import MappedKVMemory
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import LeaseName, RangeGrant, Read, Source

LEASE = LeaseName("benchmark", 0, "lease")
Way = Callable[[], float | None]
"""Moves all blocks once. Returns its seconds if it measures itself, else the caller measures."""


@dataclass(frozen=True)
class Shape:
    """A number of blocks and their size in bytes."""

    num_blocks: int
    block_bytes: int

    @property
    def name(self) -> str:
        """The name in the results."""
        return f"{self.num_blocks} x {self.block_bytes // 1024} KiB"

    @property
    def num_bytes(self) -> int:
        """The size of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def layout(self) -> KVLayout:
        """A layout whose blocks have this size."""
        return KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.block_bytes // 128,
            block_size=16,
            dtype="float32",
        )

    def order(self, seed: int) -> list[int]:
        """Return all blocks of a pool in random order."""
        return random.Random(seed).sample(range(self.num_blocks), self.num_blocks)

    def source_pool(self) -> MappedKVMemory:
        """Make a pool in which every block has its own content, the same in every process."""
        memory = MappedKVMemory(self.layout, self.num_blocks)
        for block_id in range(self.num_blocks):
            memory.write_view(block_id)[:] = random.Random(block_id).randbytes(4096) * (
                self.block_bytes // 4096
            )
        return memory

    def empty_pool(self) -> MappedKVMemory:
        """Make a pool of zeros, with all pages faulted in."""
        memory = MappedKVMemory(self.layout, self.num_blocks)
        memory.pool.fill_(0.0)
        return memory


SHAPES = (Shape(256, 32 * 1024), Shape(4096, 16 * 1024), Shape(1, 64 * 2**20))


@dataclass
class Job:
    """The task of every way: copy ``source_ids[i]`` of one pool to ``target_ids[i]`` of the other.

    source: this process's copy of the sender's pool. lent: the sender's pool itself, if it is mapped here, so that all ways
    find the same data in the CPU's caches.
    """

    shape: Shape
    source: MappedKVMemory
    target: MappedKVMemory
    source_ids: list[int]
    target_ids: list[int]
    digests: tuple[int, ...] = field(default=())
    grants: tuple[RangeGrant, ...] = field(default=())
    lent: memoryview | None = None

    @property
    def source_view(self) -> memoryview:
        """The memory from which memcpy copies."""
        return self.source.pool_view if self.lent is None else self.lent

    def pull(self, where: Source) -> PullJob:
        """Return the pull order of the control half."""
        return PullJob(
            key="benchmark",
            source=where,
            name=LEASE,
            first_block=0,
            block_ids=tuple(self.target_ids),
            shares=(Share(0, self.digests),),
            seeds=tuple(range(self.shape.num_blocks)),
            read=Read(),
            grants=self.grants,
        )

    def check(self, way: str) -> None:
        """Raise AssertionError unless every block was copied; then clear the target."""
        for source_id, target_id in zip(self.source_ids, self.target_ids, strict=True):
            if self.source.read_view(source_id) != self.target.read_view(target_id):
                raise AssertionError(f"{way} left other bytes in block {target_id} of {self.shape.name}")
        self.target.pool.fill_(0.0)


def job_of(shape: Shape, in_runs: bool = False) -> Job:
    """Make both pools in this process, and the orders of the blocks.

    Blocks are scattered at both ends, the worst case of a pool; in_runs: consecutive, as in a new pool.
    """
    everything = list(range(shape.num_blocks))
    source_ids, target_ids = (everything,) * 2 if in_runs else (shape.order(1), shape.order(2))
    return Job(shape, shape.source_pool(), shape.empty_pool(), source_ids, target_ids)


def compare(job: Job, ways: Mapping[str, Way], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every way and round. The first and the last round are checked; the first is not counted."""
    _check_all(job, ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(num_rounds)
    for _ in range(num_rounds):
        for name in order.sample(list(ways), len(ways)):
            begin = time.perf_counter()
            own = ways[name]()
            seconds[name].append(time.perf_counter() - begin if own is None else own)
    _check_all(job, ways)
    return seconds


def _check_all(job: Job, ways: Mapping[str, Way]) -> None:
    """Run and check one round that is not counted. A way that measures itself checks its own target."""
    for name, way in ways.items():
        job.target.pool.fill_(0.0)
        if way() is None:
            job.check(name)


def speeds(shape: Shape, seconds: Mapping[str, list[float]]) -> dict[str, dict[str, object]]:
    """Return median, best and raw samples by way."""
    return {
        name: {
            "gb_per_s_median": round(shape.num_bytes / 1e9 / statistics.median(samples), 3),
            "gb_per_s_best": round(shape.num_bytes / 1e9 / min(samples), 3),
            "seconds": [round(sample, 6) for sample in samples],
        }
        for name, samples in seconds.items()
    }


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str, goal: float) -> dict[str, object]:
    """Return the speed of ``ours`` over ``theirs``: median and quartiles of the ratios in the rounds."""
    ratios = [other / own for own, other in zip(seconds[ours], seconds[theirs], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    of_medians = statistics.median(seconds[theirs]) / statistics.median(seconds[ours])
    return {
        "of": f"{ours} / {theirs}",
        "median": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "of_medians": round(of_medians, 3),
        "of_bests": round(min(seconds[theirs]) / min(seconds[ours]), 3),
        "goal": goal,
        "is_reached": middle >= goal,
    }


def over_launches(ratios: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the ratio over several launches: the median of their medians, and each of these."""
    medians = [each["median"] for each in ratios]
    middle = statistics.median(medians)
    goal = ratios[0]["goal"]
    return {
        "of": ratios[0]["of"],
        "median": middle,
        "by_launch": medians,
        "goal": goal,
        "is_reached": middle >= goal,
    }
