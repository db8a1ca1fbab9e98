"""Scheduler, pool and fakes under any order of events: the books are right after every step, every request ends once.

The FakeRunner notices KV that is read too early, overwritten or shared by mistake; the FakeConnector notices lent KV
that changed, and lets cancelled reads write late.
"""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.errors import InvalidRequestError
from contract.outputs import FinishReason
from contract.requests import EngineRequest, HandOff, ReceiveTransfer, SendTransfer, choice_key
from engine.kv_cache.startup import KVCacheConfig
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.lent_blocks import can_allocate_each, find_received, plan_received
from engine.scheduling.requests.request import Request
from tests.drafting_engines import FreeSteps
from tests.engine_scheduling.stepping import RECEIVE, SEND, SteppedEngine, fake_request
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer
from tests.soak_settings import machine_test

KINDS: list[SendTransfer | ReceiveTransfer | None] = [None, SEND, RECEIVE]
"""An engine of each role and one that does everything: None beside RECEIVE is a decode worker that recomputes locally."""
HEADS = [[], [1] * 4, [1] * 8, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]]
ENDED_BY = ("deadline", "internal", "invalid_request", "transfer_failed")


class SchedulerMachine(RuleBasedStateMachine):
    """A small pool, few places and a small budget, so that everything runs short."""

    runs_ahead = False
    batching: ClassVar[dict[str, Any]] = {"max_num_batched_tokens": 6}
    memory: ClassVar[dict[str, Any]] = {"kv_cache_bytes": 14}
    changes: ClassVar[dict[str, Any]] = {}
    has_connector = True
    cache: ClassVar[KVCacheConfig | None] = None
    """Several groups of layers, or slots of states; None: the blocks of ``memory``."""
    snapshot_unit = 4
    """Snapshots of states are made at multiples of so many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SteppedEngine(
            with_connector=self.has_connector,
            cache=self.cache,
            max_num_seqs=3,
            remote_kv_timeout_seconds=5.0,
            **{**self.memory, **self.batching, **self.changes},
        )
        self.engine.executor.runs_ahead = self.runs_ahead
        if self.engine.scheduler.batcher.drafting is not None:
            self.engine.scheduler.batcher.drafting.cost = FreeSteps()
        if (snapshots := self.engine.scheduler.pools.snapshots) is not None:
            snapshots.unit = self.snapshot_unit
        self.engine_request: dict[str, EngineRequest] = {}
        self.num_requests = 0
        self.dismissed: dict[str, set[int]] = {}
        self.handed_off: dict[str, HandOff] = {}

    def fetches(self, *states: str) -> list[str]:
        return [key for key, fetch in self.engine.connector.fetches.items() if fetch.state in states]

    def lent(self) -> list[str]:
        return [key for key, send in self.engine.connector.sends.items() if send.end]

    def ask(self, request: EngineRequest) -> None:
        for choice in request.choices:
            one = request.of_choice(choice)
            self.engine_request[one.key] = one
        self.num_requests += 1
        self.engine.add(request)

    @rule(
        kind=st.sampled_from(KINDS),
        head=st.sampled_from(HEADS),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        tenant=st.sampled_from(["", "alice", "bob"]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        is_bad=st.sampled_from([False] * 9 + [True]),
    )
    def add(
        self,
        kind: SendTransfer | ReceiveTransfer | None,
        head: list[int],
        tail: list[int],
        max_tokens: int,
        priority: int,
        tenant: str,
        num_choices: int,
        is_bad: bool,
    ) -> None:
        kind = kind if self.has_connector else None
        prompt = [*head, *tail, *([NAN_TOKEN] if is_bad and kind is not RECEIVE else [])]
        self.ask(
            fake_request(
                f"r{self.num_requests}",
                prompt,
                max_tokens,
                transfer=kind,
                priority=priority,
                tenant=tenant,
                num_choices=num_choices,
                deadline_seconds=20.0,
            )
        )

    @precondition(lambda self: self.engine_request)
    @rule(data=st.data(), kind=st.sampled_from(KINDS), num_delivered=st.integers(0, 11))
    def replay(
        self, data: st.DataObject, kind: SendTransfer | ReceiveTransfer | None, num_delivered: int
    ) -> None:
        """The next attempt of a request, whether the one before has ended or still runs (a zombie's)."""
        old = self.engine_request[data.draw(st.sampled_from(sorted(self.engine_request)))]
        attempt = self.next_attempt(old.request_id)
        kind = kind if self.has_connector else None
        prompt, max_tokens = self.original_prompt(old), old.sampling.max_tokens
        num_delivered = min(num_delivered, max_tokens - 1)
        self.ask(
            fake_request(
                old.request_id,
                [*prompt, *fake_answer(prompt, num_delivered, old.choice)],
                max_tokens,
                transfer=kind,
                priority=old.priority,
                tenant=old.tenant,
                attempt=attempt,
                choice=old.choice,
                sampling={"seed": old.sampling.seed},
                first_index=num_delivered + (kind is RECEIVE),
                deadline_seconds=20.0,
            )
        )

    def next_attempt(self, request_id: str) -> int:
        attempts = [r.attempt for r in self.engine_request.values() if r.request_id == request_id]
        moves = [order.next_attempt for order in self.handed_off.values() if order.request_id == request_id]
        return 1 + max(attempts + moves)

    @precondition(lambda self: self.engine.scheduler.queues.running)
    @rule(data=st.data())
    def hand_off(self, data: st.DataObject) -> None:
        """A request that decodes ends with the tokens that it has emitted, and lends their KV; others stay as they were."""
        keys = [request.key for request in self.engine.scheduler.queues.running]
        asked = self.engine.scheduler.requests[data.draw(st.sampled_from(keys))].engine_request
        next_attempt = self.next_attempt(asked.request_id)
        order = HandOff(
            request_id=asked.request_id,
            attempt=asked.attempt,
            choice=asked.choice,
            transfer_id=f"moved-{asked.request_id}.{asked.choice}",
            next_attempt=next_attempt,
        )
        try:
            self.engine.hand_off(order)
        except InvalidRequestError:
            assert asked.key in self.engine.scheduler.requests
        else:
            self.handed_off[asked.key] = order

    def original_prompt(self, request: EngineRequest) -> list[int]:
        num_delivered = request.first_index - isinstance(request.transfer, ReceiveTransfer)
        tokens = request.prompt_token_ids
        return tokens[: len(tokens) - num_delivered]

    @rule()
    def add_one_that_never_fits(self) -> None:
        self.ask(fake_request(f"r{self.num_requests}", [1] * 60, 1, num_choices=2))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        self.engine.step(times)

    @rule(times=st.integers(1, 3))
    def cut_steps_short(self, times: int) -> None:
        self.engine.step(times, meanwhile=self.engine.executor.interrupt)

    @rule()
    def run(self) -> None:
        self.engine.run()
        self.assert_idle_for_a_reason()

    @rule(seconds=st.floats(0.1, 3.0))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @precondition(lambda self: self.fetches("asked"))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.engine.connector.publish_peer(data.draw(st.sampled_from(self.fetches("asked"))))

    @precondition(lambda self: self.fetches("reading"))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.engine.connector.land(data.draw(st.sampled_from(self.fetches("reading"))))

    @precondition(lambda self: self.fetches("asked", "published", "reading"))
    @rule(data=st.data(), kind=st.sampled_from(["transfer_failed", "not_needed"]))
    def fail(self, data: st.DataObject, kind: str) -> None:
        """Before the sender published, before the reservation, or in the middle of the read."""
        keys = self.fetches("asked", "published", "reading")
        self.engine.connector.fail(data.draw(st.sampled_from(keys)), kind)

    @precondition(lambda self: self.fetches("draining"))
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.engine.connector.drain(data.draw(st.sampled_from(self.fetches("draining"))))

    @precondition(lambda self: self.lent())
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.engine.connector.end_lease(data.draw(st.sampled_from(self.lent())))

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        keys = sorted(self.engine.scheduler.requests)
        self.engine.core.abort(data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)))

    @precondition(lambda self: self.engine_request)
    @rule(data=st.data(), is_whole=st.booleans(), is_one_choice=st.booleans())
    def abort_request(self, data: st.DataObject, is_whole: bool, is_one_choice: bool) -> None:
        """Up to an attempt, or all of them, one choice or all: what is concerned is gone at once, and nothing else.

        A request that still stands for several choices goes on for those that are left.
        """
        asked = self.engine_request[data.draw(st.sampled_from(sorted(self.engine_request)))]
        live = {key: request.engine_request for key, request in self.engine.scheduler.requests.items()}
        choice = asked.choice if is_one_choice else None
        attempt = None if is_whole else asked.attempt
        concerned = set()
        for key, request in live.items():
            if request.request_id == asked.request_id and (is_whole or request.attempt <= asked.attempt):
                own = {one for one in request.choices if choice in (None, one)}
                dismissed = self.dismissed.setdefault(key, set())
                dismissed |= own
                if dismissed.issuperset(request.choices):
                    concerned.add(key)
        self.engine.core.scheduler.abort_request(asked.request_id, attempt, choice)
        assert set(self.engine.scheduler.requests) == set(live) - concerned

    @rule()
    def reset_prefix_cache(self) -> None:
        is_idle = self.engine.pool.num_free_blocks == self.engine.pool.num_usable_blocks
        assert self.engine.core.call("reset_prefix_cache", []) is is_idle

    @invariant()
    def answers_are_right_so_far(self) -> None:
        self.engine.core.call("check_integrity", [])
        for key, request in self.engine_request.items():
            tokens = self.engine.tokens(key)
            prompt, max_tokens = self.original_prompt(request), request.sampling.max_tokens
            answer = fake_answer(prompt, max_tokens, request.choice)
            assert tokens == answer[request.first_index :][: len(tokens)]

    def assert_idle_for_a_reason(self) -> None:
        """No request waits that could run: the next one lacks blocks, and no received KV is unused.

        Which client is next depends on what was served to each, so it is enough if the first request of one lacks blocks.
        """
        queues = self.engine.scheduler.queues
        receiver = self.engine.scheduler.remote_kv.receiver
        assert not queues.running and not queues.arrived
        firsts = [next(queues.waiting.of(client)) for client in queues.waiting.clients]
        if unserved := receiver.unserved:
            firsts = [min([unserved, *firsts], key=lambda request: request.precedence)]
        assert not firsts or not all(map(self._fits, firsts))

    def _fits(self, request: Request) -> bool:
        """Return whether there are blocks for a request that waits for some."""
        pools = self.engine.scheduler.pools
        if request is self.engine.scheduler.remote_kv.receiver.unserved:
            cached = find_received(pools, request.block_hashes)
            heads, numbers = plan_received(pools, request.num_prompt_tokens, cached)
            return can_allocate_each(pools, numbers, heads, [])
        cached = pools.find_cached(request.reusable_hashes)
        return pools.can_hold(blocks_needed(request.num_tokens, pools.block_size) - len(cached[0]), cached)

    def teardown(self) -> None:
        """Peers do what they owe, and no time passes: every request ends, and every block is free."""
        engine, rounds = self.engine, 0
        engine.run()
        while engine.scheduler.requests or engine.connector.fetches or engine.connector.sends:
            for key in self.fetches("asked"):
                engine.connector.publish_peer(key)
            engine.run()
            for key in self.fetches("reading"):
                engine.connector.land(key)
            for key in self.fetches("draining"):
                engine.connector.drain(key)
            for key in self.lent():
                engine.connector.end_lease(key)
            engine.run()
            self.assert_idle_for_a_reason()
            rounds += 1
            assert rounds <= 2 * len(self.engine_request) + 2, "some request never ends"
        for key, request in self.engine_request.items():
            self._check_end(key, request)
        states = engine.pool.count_by_state()
        assert (states["held"], states["quarantined"]) == (0, 0)
        assert not engine.scheduler.has_requests() and engine.core.seconds_to_deadline() is None

    def _check_end(self, key: str, request: EngineRequest) -> None:
        end, num_tokens = self.engine.end(key), len(self.engine.tokens(key))
        match end.finish_reason:
            case FinishReason.LENGTH:
                assert request.first_index + num_tokens == request.sampling.max_tokens
            case FinishReason.ERROR:
                assert end.error_kind in ENDED_BY
            case None if end.handed_over:
                assert request.first_index + num_tokens == end.first_index < request.sampling.max_tokens - 1
                assert key in self.handed_off
            case None:
                assert num_tokens == (1 if isinstance(request.transfer, SendTransfer) else 0)
            case other:
                assert other is FinishReason.ABORT


TestScheduler = machine_test(SchedulerMachine, 120, 50)


class MachineOfLeavingReceivers(SchedulerMachine):
    """Requests often end while a read into what they have reserved goes on."""

    @rule(head=st.sampled_from(HEADS), tail=st.integers(1, 3))
    def receive_and_leave(self, head: list[int], tail: int) -> None:
        name = f"r{self.num_requests}"
        self.ask(fake_request(name, [*head, tail], transfer=RECEIVE, deadline_seconds=20.0))
        key = choice_key(name, 0, 0)
        self.engine.step()
        if key in self.fetches("asked"):
            self.engine.connector.publish_peer(key)
        self.engine.step()
        self.engine.core.abort([key])


class MachineThatRunsAhead(SchedulerMachine):
    """Steps begin before the tokens of the one before are known, as on a device."""

    runs_ahead = True


TestRunningAhead = machine_test(MachineThatRunsAhead, 60, 50)


class MachineOfWholePrompts(SchedulerMachine):
    """The other policy: some prompts are longer than a step, and so are preempted requests, which alone are cut."""

    runs_ahead = True
    batching: ClassVar[dict[str, Any]] = {
        "scheduling_policy": "prefill-first",
        "scheduler_delay_factor": 2.0,
        "max_num_batched_tokens": 14,
    }

    @rule(seconds=st.floats(0.1, 3.0))
    def step_for_some_time(self, seconds: float) -> None:
        def wait() -> None:
            self.engine.now += seconds

        self.engine.step(meanwhile=wait)

    @invariant()
    def no_step_mixes(self) -> None:
        assert self.engine.executor.runner.num_mixed_steps == 0


TestWholePrompts = machine_test(MachineOfWholePrompts, 60, 50)
