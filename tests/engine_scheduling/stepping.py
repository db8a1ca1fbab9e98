"""An engine core on fakes that a test moves step by step, with a clock that the test moves too."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from contract.layout import Side
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff, ReceiveTransfer, SendTransfer
from contract.sampling import SamplingParams
from engine.connecting import Transfers
from engine.connector import ConnectorPair, SingleRankConnector
from engine.core import EngineCore
from engine.grammar.building import VocabularyLoader, load_vocabulary
from engine.kv_cache.startup import KVCacheConfig
from engine.scheduling.inspection import check_integrity
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waits.waits import WaitStage
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.fakes.engine.fakes import FakeExecutor
from tests.fakes.engine.transfer import FakeConnector

MAX_STEPS = 2000
POLICIES = ("chunked-prefill", "prefill-first")
EACH_POLICY = [
    pytest.mark.usefixtures("policy"),
    pytest.mark.parametrize("policy", POLICIES, indirect=True),
]
"""Marks of a module whose tests run once with each policy, which their engines have unless they are given one."""
Test = TypeVar("Test", bound=Callable[..., Any])
_policy: ContextVar[str] = ContextVar("policy", default=POLICIES[0])
PROMPT = list(range(1, 11))
"""10 tokens: 3 blocks of 4."""
SEND = SendTransfer("t")
RECEIVE = ReceiveTransfer("t", peer_worker_id="p", peer_boot_id="boot", peer_control="127.0.0.1:9")


def both_policies(test: Test) -> Test:
    """Run one test with each policy."""
    for mark in EACH_POLICY:
        test = mark(test)
    return test


@contextmanager
def policy_of_engines(policy: str) -> Iterator[str]:
    """Give engines of this module that policy while the block runs."""
    token = _policy.set(policy)
    yield policy
    _policy.reset(token)


def fake_settings(**changes: Any) -> EngineSettings:
    """Return settings of a small engine: 64 blocks of 4 tokens, 32 tokens a step."""
    small = {
        "scheduling_policy": _policy.get(),
        "model": Path("fake"),
        "block_size": 4,
        "kv_cache_bytes": 64,
        "max_num_batched_tokens": 32,
    }
    return EngineSettings(**{**small, **changes})


def fake_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    transfer: SendTransfer | ReceiveTransfer | None = None,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> EngineRequest:
    """Return a request; a decode leg starts with the second token. SEND and RECEIVE get a transfer of their own."""
    first_index = 1 if isinstance(transfer, ReceiveTransfer) else 0
    if transfer in (SEND, RECEIVE):
        transfer = msgspec.structs.replace(transfer, transfer_id=f"t-{request_id}.{fields.get('choice', 0)}")
    return EngineRequest(
        **{
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampling": SamplingParams(max_tokens=max_tokens, **(sampling or {})),
            "first_index": first_index,
            "transfer": transfer,
            **fields,
        }
    )


def scheduler_of(core: EngineCore) -> Scheduler:
    """Return the scheduler of a core with its parts, which the core does not use."""
    assert isinstance(core.scheduler, Scheduler)
    return core.scheduler


class SteppedEngine:
    """Collects the outputs of each request, and checks the scheduler's integrity after every step.

    woken: counts how often another thread has requested a step. on_connector_event: the callback that the core gave to the
    connector. num_started_early: steps that started before the results of the one before were processed.
    """

    def __init__(
        self,
        *,
        with_connector: bool = True,
        cache: KVCacheConfig | None = None,
        connector: FakeConnector | None = None,
        load_vocabulary: VocabularyLoader = load_vocabulary,
        stages: Sequence[WaitStage] = (),
        **changes: Any,
    ) -> None:
        self.now = 0.0
        self.num_started_early = 0
        self.woken = threading.Semaphore(0)
        self.on_connector_event: Callable[[], None] = lambda: None
        self.connector = connector or FakeConnector()
        executor: list[FakeExecutor] = []

        def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
            made = FakeExecutor(settings, cache)
            executor.append(made)
            return made, made.memory.num_blocks

        self.core = EngineCore(
            fake_settings(**changes),
            Transfers(self._connect, STAGES) if with_connector else None,
            wake=self.woken.release,
            start=start,
            load_vocabulary=load_vocabulary,
            clock=lambda: self.now,
            stages=stages,
        )
        self.executor = executor[0]
        self.scheduler = scheduler_of(self.core)
        self.pool = self.scheduler.pool
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, *requests: EngineRequest) -> None:
        """Queue requests."""
        for request in requests:
            self.core.add_request(request)

    def step(
        self, times: int = 1, *, starts_early: bool = True, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Step, collect outputs, check. starts_early: a step may start before the last one's results are processed."""
        for number in range(times):
            may_start_early = starts_early and number + 1 < times
            for outputs in self.core.step(meanwhile, partial(bool, may_start_early)).values():
                for output in outputs:
                    self._collect(output)
            self.num_started_early += self.core.step_in_flight
            check_integrity(self.scheduler)

    def run(self) -> None:
        """Step until nothing would change; fails where that never happens."""
        for _ in range(MAX_STEPS):
            if not self.core.needs_step():
                return
            self.step()
        raise AssertionError(f"the engine is still busy after {MAX_STEPS} steps")

    def request_counts(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait."""
        stats = self.scheduler.make_stats()
        counts = self.scheduler.get_request_counts()
        assert counts == (stats.num_running_reqs, stats.num_waiting_reqs)
        assert sum(counts) == self.scheduler.get_num_unfinished_requests()
        return counts

    def hand_off(self, order: HandOff, expires: float = math.inf) -> None:
        """Hand a request off, and collect what is to be sent at once."""
        self.core.hand_off(order, expires)
        check_integrity(self.scheduler)
        for outputs in self.core.flush_urgent().values():
            for output in outputs:
                self._collect(output)

    def tokens(self, key: str) -> list[int]:
        """Return all tokens of a request so far."""
        return [token for output in self.outputs.get(key, []) for token in output.token_ids]

    def end(self, key: str) -> EngineOutput:
        """Return the request's last output. Raises LookupError while there is none."""
        outputs = self.outputs.get(key, [])
        if not outputs or not outputs[-1].is_leg_finished:
            raise LookupError(f"{key} has not ended")
        return outputs[-1]

    def _collect(self, output: EngineOutput) -> None:
        outputs = self.outputs.setdefault(f"{output.request_id}#{output.choice}.{output.attempt}", [])
        assert not (outputs and outputs[-1].is_leg_finished), "an output came after the last one"
        if outputs:
            assert output.first_index == outputs[-1].first_index + len(outputs[-1].token_ids)
        outputs.append(output)

    def _connect(self, side: Side, fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        self.on_connector_event = wake
        ranks = SingleRankConnector(self.connector.rank)
        return ConnectorPair(self.connector, ranks, "127.0.0.1:9", expecting=self.connector.expecting)


def receiving(engine: SteppedEngine, name: str = "d", prompt: list[int] = PROMPT, max_tokens: int = 4) -> str:
    engine.add(fake_request(name, prompt, max_tokens, transfer=RECEIVE))
    return f"{name}#0.0"


def arrive(engine: SteppedEngine, key: str) -> None:
    """Let the KV of a request arrive: published, reserved, landed, processed."""
    engine.connector.publish_peer(key)
    engine.step()
    engine.connector.land(key)
    engine.step()
