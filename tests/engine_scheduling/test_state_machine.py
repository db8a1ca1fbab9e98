"""Scheduler, pool and fakes under any order of events: the books are right after every step, every request ends once.

The FakeRunner notices KV that is read too early, overwritten or shared by mistake; the FakeConnector notices lent KV
that changed, and lets cancelled reads write late.
"""

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.requests import EngineRequest, FinishReason, ReceiveTransfer, SendTransfer
from engine.testing import NAN_TOKEN, fake_answer
from tests.engine_scheduling.stepping import RECEIVE, SEND, SteppedEngine, fake_request

PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
KINDS: list[SendTransfer | ReceiveTransfer | None] = [None, SEND, RECEIVE]
HEADS = [[], [1] * 4, [1] * 8, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]]


class SchedulerMachine(RuleBasedStateMachine):
    """A small pool, few places and a small budget, so that everything runs short."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SteppedEngine(
            kv_cache_bytes=14, max_num_batched_tokens=6, max_num_seqs=3, remote_kv_timeout_seconds=5.0
        )
        self.asked: dict[str, EngineRequest] = {}

    def fetches(self, state: str) -> list[str]:
        return [key for key, fetch in self.engine.connector.fetches.items() if fetch.state == state]

    def lent(self) -> list[str]:
        return [key for key, send in self.engine.connector.sends.items() if send.end]

    @rule(
        kind=st.sampled_from(KINDS),
        head=st.sampled_from(HEADS),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        is_bad=st.sampled_from([False] * 9 + [True]),
    )
    def add(
        self,
        kind: SendTransfer | ReceiveTransfer | None,
        head: list[int],
        tail: list[int],
        max_tokens: int,
        is_bad: bool,
    ) -> None:
        prompt = [*head, *tail, *([NAN_TOKEN] if is_bad and kind is not RECEIVE else [])]
        request = fake_request(
            f"r{len(self.asked)}", prompt, max_tokens, transfer=kind, deadline_seconds=20.0
        )
        self.asked[request.key] = request
        self.engine.add(request)

    @rule()
    def add_one_that_never_fits(self) -> None:
        request = fake_request(f"r{len(self.asked)}", [1] * 60, 1)
        self.asked[request.key] = request
        self.engine.add(request)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        self.engine.step(times)

    @rule()
    def run(self) -> None:
        self.engine.run()

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

    @precondition(lambda self: self.fetches("reading"))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["transfer_failed", "not_needed"]))
        self.engine.connector.fail(data.draw(st.sampled_from(self.fetches("reading"))), kind)

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

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort_request(self, data: st.DataObject) -> None:
        asked = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        self.engine.core.abort_request(asked.request_id, asked.attempt)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.core.call("reset_prefix_cache", [])

    @invariant()
    def answers_are_right_so_far(self) -> None:
        self.engine.core.call("check_integrity", [])
        for key, request in self.asked.items():
            tokens = self.engine.tokens(key)
            answer = fake_answer(request.prompt_token_ids, request.sampling.max_tokens)
            assert tokens == answer[request.first_index :][: len(tokens)]

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
            rounds += 1
            assert rounds <= 2 * len(self.asked) + 2, "some request never ends"
        for key, request in self.asked.items():
            self._check_end(key, request)
        states = engine.pool.count_by_state()
        assert (states["held"], states["quarantined"]) == (0, 0)

    def _check_end(self, key: str, request: EngineRequest) -> None:
        end, num_tokens = self.engine.end(key), len(self.engine.tokens(key))
        match end.finish_reason:
            case FinishReason.LENGTH:
                assert request.first_index + num_tokens == request.sampling.max_tokens
            case FinishReason.ERROR:
                assert end.error_kind in ("deadline", "internal", "invalid_request", "transfer_failed")
            case None:
                assert num_tokens == (1 if isinstance(request.transfer, SendTransfer) else 0)
            case other:
                assert other is FinishReason.ABORT


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, phases=PHASES)
