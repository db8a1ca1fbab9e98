"""``python -m benchmarks.kv_tiers --model DIR``: the gain of a host tier for a resumed request, and its cost for others.

One engine without a tier and one with it, in this process, take turns in each round, so that only ratios of one run are
compared. *Resume*: a request with a long context is preempted, another prompt takes its blocks, and the time is measured
from the step in which it gets blocks again until its next token. *Cost*: tokens a second of requests that never run short of
blocks, in a pool with room (its blocks have no content at the start of a round, so that nothing is about to be lost), and in
one that turns over: each block that is computed evicts another one, so that all of them are stored while requests run. The
tier is as full then as it gets. Writes ``results/kv_tiers.json``.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.facts import RESULTS, command_line, write_result
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.core import EngineCore
from engine.scheduling.scheduler import Scheduler
from engine.settings import EngineSettings

KINDS = {"without": 0, "with": 1}
"""1 for an engine that has a tier, by its name in the results."""
POOLS = ("room", "turnover")
Rates = tuple[float, float]
"""Tokens by time, and by CPU time of all threads."""
_FIRST_TOKENS = 4
_ANSWER = 64
_LOOK_SECONDS = 0.0002
# They touch memory, and fill the tier.
_WARM_UPS = 3


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    context: tokens of a prompt that is preempted. num_requests: of a round that measures the cost; num_running at a time.
    """

    model: Path
    rounds: int = 7
    context: int = 1024
    num_requests: int = 24
    num_running: int = 8
    prompt: int = 256
    answer: int = 64
    threads: int = 1


@dataclass
class Engine:
    """An engine that is stepped here, with prompts that no other round has."""

    plan: Plan
    num_blocks: int
    num_slots: int
    drawn: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        settings: dict[str, Any] = {
            "model": self.plan.model,
            "num_threads": self.plan.threads,
            "max_num_batched_tokens": 512,
            "max_num_seqs": self.plan.num_running,
        }
        probe = EngineCore(EngineSettings(**settings, kv_cache_bytes=2**24))
        block_bytes = probe.info.layout.block_bytes
        probe.close()
        self.core = EngineCore(
            EngineSettings(
                **settings,
                kv_cache_bytes=self.num_blocks * block_bytes,
                host_kv_bytes=self.num_slots * block_bytes,
            )
        )
        if self.plan.context + _ANSWER > self.core.info.max_model_len:
            raise SystemExit(
                f"--context must be at most {self.core.info.max_model_len - _ANSWER} for this model"
            )
        assert isinstance(self.core.scheduler, Scheduler)
        self.scheduler = self.core.scheduler

    def add(self, name: str, num_prompt: int, num_tokens: int, priority: int = 0) -> str:
        """Add a request with a random prompt; return its key."""
        prompt = [self.drawn.randrange(self.core.info.vocab_size) for _ in range(num_prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = EngineRequest(
            request_id=name, prompt_token_ids=prompt, sampling=sampling, priority=priority
        )
        self.core.add_request(request)
        return request.key

    def step(self) -> dict[str, int]:
        """Run a step when there is something to do; return how many tokens each request got."""
        given: dict[str, int] = {}
        self.core.process_events()
        if not self.core.needs_step():
            # As the loop of a worker, which is woken: empty steps would keep the interpreter from the tier's thread.
            time.sleep(_LOOK_SECONDS)
            return given
        for outputs in self.core.step().values():
            for output in outputs:
                key = f"{output.request_id}#{output.choice}.{output.attempt}"
                given[key] = given.get(key, 0) + len(output.token_ids)
        return given

    def run(self) -> None:
        """Run until all requests have finished and everything is stored."""
        while self.scheduler.requests or self.core.needs_step():
            self.step()
        if (tiers := self.scheduler.remote_kv.tiers) is not None:
            tiers.settle()

    def resume_seconds(self) -> float:
        """Return how long a request with a long context takes to resume, when another prompt has had its blocks."""
        context = self.plan.context
        first = self.add("first", context, _ANSWER, priority=2)
        victim = self.add("victim", context, _ANSWER)
        while (
            victim not in {one.key for one in self.scheduler.queues.waiting}
            or len(self.scheduler.requests[victim].token_ids) == context
        ):
            self.step()
            assert victim in self.scheduler.requests, "the victim was never preempted"
        self.add("other", context, _FIRST_TOKENS, priority=1)
        started: float | None = None
        while True:
            is_waiting = any(one.key == victim for one in self.scheduler.queues.waiting)
            now = time.perf_counter()
            given = self.step()
            has_left = is_waiting and not any(one.key == victim for one in self.scheduler.queues.waiting)
            if has_left:
                started = now
            if started is not None and given.get(victim):
                break
        seconds = time.perf_counter() - started
        assert first not in self.scheduler.requests, "the first one has made room"
        self.run()
        return seconds

    def num_stored(self) -> int:
        """Return how many blocks are in the tier, or have been."""
        tiers = self.scheduler.remote_kv.tiers
        return sum(tier.counts.stored for tier in tiers.tiers) if tiers is not None else 0

    def rates(self, *, is_empty: bool) -> tuple[Rates, int]:
        """Compute and answer prompts without a shortage of blocks; return the rates, and blocks stored in that time.

        is_empty: let no block have content at the start.
        """
        if is_empty:
            self.core.call("reset_prefix_cache", [])
        num_stored = self.num_stored()
        started = time.perf_counter(), time.process_time()
        for number in range(self.plan.num_requests):
            self.add(f"r{number}", self.plan.prompt, self.plan.answer)
        while self.scheduler.requests:
            self.step()
        ended = time.perf_counter(), time.process_time()
        num_stored = self.num_stored() - num_stored
        self.run()
        num_tokens = self.plan.num_requests * (self.plan.prompt + self.plan.answer)
        return (num_tokens / (ended[0] - started[0]), num_tokens / (ended[1] - started[1])), num_stored


def measure(plan: Plan) -> dict[str, Any]:
    """Measure everything in turns, and return the figures with the ratios of each round."""
    short = 2 * (plan.context // 16 + 1) + 2
    each = (plan.prompt + plan.answer) // 16
    blocks = {"room": 2 * plan.num_requests * each, "turnover": 2 * plan.num_running * each}
    resumed = {name: Engine(plan, short, has_tier * 4 * short) for name, has_tier in KINDS.items()}
    served = {
        pool: {
            name: Engine(plan, blocks[pool], has_tier * 2 * plan.num_requests * each)
            for name, has_tier in KINDS.items()
        }
        for pool in POOLS
    }
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    rates: dict[str, dict[str, list[Rates]]] = {pool: {name: [] for name in KINDS} for pool in POOLS}
    stored: dict[str, list[int]] = {pool: [] for pool in POOLS}
    for number in range(plan.rounds + _WARM_UPS):
        begun = time.monotonic()
        order = list(KINDS) if number % 2 else list(reversed(KINDS))
        for name in order:
            pause = resumed[name].resume_seconds()
            if number >= _WARM_UPS:
                seconds[name].append(pause)
        for pool in POOLS:
            for name in order:
                rate, num_stored = served[pool][name].rates(is_empty=pool == "room")
                if number >= _WARM_UPS:
                    rates[pool][name].append(rate)
                    stored[pool] += [num_stored] if KINDS[name] else []
        place = f"round {number - _WARM_UPS + 1}" if number >= _WARM_UPS else "warm-up"
        print(f"{place} of {plan.rounds}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    loaded = resumed["with"].core.call("counters", [])["kv_tier_loaded_blocks_total{tier=host}"]
    for engine in (*resumed.values(), *(engine for pair in served.values() for engine in pair.values())):
        engine.core.close()
    return {
        "resume_seconds": seconds,
        "resume_ratio": _ratios(seconds["with"], seconds["without"]),
        "loaded_blocks": loaded,
        "block_bytes": resumed["with"].core.info.layout.block_bytes,
        "cost": {pool: _cost(rates[pool]) | {"stored_blocks": stored[pool]} for pool in POOLS},
    }


def _cost(rates: dict[str, list[Rates]]) -> dict[str, Any]:
    """Return the rates of a pool with their ratios, by time and by CPU time."""
    by_time, by_cpu = (
        _ratios([one[place] for one in rates["with"]], [one[place] for one in rates["without"]])
        for place in (0, 1)
    )
    return {
        "tokens_a_second_and_cpu_second": rates,
        "throughput_ratio": by_time,
        "cpu_throughput_ratio": by_cpu,
    }


def _ratios(ones: list[float], others: list[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    return {"median": statistics.median(ratios), "of_rounds": ratios}


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--threads", type=int, default=Plan.threads)
    parser.add_argument("--context", type=int, default=Plan.context)
    parser.add_argument("--requests", type=int, default=Plan.num_requests)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    plan = Plan(given.model, given.rounds, given.context, given.requests, threads=given.threads)
    figures = {"command": command_line("benchmarks.kv_tiers"), **measure(plan)}
    path = write_result("kv_tiers", figures, given.results)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")


if __name__ == "__main__":
    main()
