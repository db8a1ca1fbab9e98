"""A wait stage that is added from outside, without a change of the scheduler; every way out of it works."""

from collections.abc import Mapping, Sequence

import pytest

from contract.errors import OverloadedError
from contract.outputs import FinishReason
from contract.requests import EngineRequest
from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.waits.waits import Ready
from tests.engine_scheduling.stepping import PROMPT, RECEIVE, SteppedEngine, arrive, fake_request
from tests.fakes.engine.fakes import fake_answer

ADAPTER_SECONDS = 7.0


class AdapterStage:
    """Requests with a cache salt wait until their adapter, which has the same name, is loaded."""

    name = "adapter"
    status = RequestStatus.WAITING
    timeout_seconds = ADAPTER_SECONDS

    def __init__(self) -> None:
        self.loading: dict[str, Request] = {}
        self.given_up: list[str] = []
        self._ready: list[Ready] = []

    @property
    def has_pending(self) -> bool:
        return bool(self._ready)

    def needs_wait(self, request: Request) -> bool:
        return bool(request.engine_request.cache_salt)

    def start(self, request: Request) -> None:
        if request.engine_request.cache_salt == "too large":
            raise OverloadedError("no room for this adapter")
        self.loading[request.key] = request

    def load(self, key: str, finish: Finish | None = None) -> None:
        """End the load of an adapter. finish: how its request finishes, if it failed."""
        self._ready.append(Ready(self.loading[key] if finish else self.loading.pop(key), finish))

    def pop_ready(self) -> Sequence[Ready]:
        ready, self._ready = self._ready, []
        return ready

    def give_up(self, request: Request) -> bool:
        del self.loading[request.key]
        self.given_up.append(request.key)
        return False

    def overdue(self, request: Request, seconds: float) -> Finish:
        return Finish.with_error("overloaded", f"no adapter after {seconds:g} s")

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        assert all(requests[key] is request for key, request in self.loading.items())


def staged() -> tuple[SteppedEngine, AdapterStage]:
    stage = AdapterStage()
    return SteppedEngine(stages=[stage]), stage


def adapted(name: str = "a", salt: str = "french") -> EngineRequest:
    return fake_request(name, PROMPT, cache_salt=salt)


def test_a_request_goes_through_a_stage_of_its_own_and_others_do_not_wait() -> None:
    engine, stage = staged()
    engine.add(adapted(), fake_request("b", PROMPT))
    engine.run()
    assert engine.tokens("b#0.0") == fake_answer(PROMPT, 4) and engine.tokens("a#0.0") == []
    assert engine.pool.num_blocks_of("a#0.0") == 0
    stage.load("a#0.0")
    assert engine.core.needs_step()
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer(PROMPT, 4) and not stage.given_up


def test_a_request_that_a_delayed_step_has_queued_still_needs_a_step() -> None:
    """A gate may process events and then delay the step: what was pending is queued by then, and nothing else runs."""
    engine, stage = staged()
    engine.add(adapted())
    engine.run()
    assert not engine.core.needs_step()
    stage.load("a#0.0")
    engine.core.process_events()
    assert engine.core.needs_step()
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer(PROMPT, 4)


@pytest.mark.parametrize("is_kv_first", [True, False])
def test_a_decode_leg_waits_for_its_kv_and_for_the_stage(is_kv_first: bool) -> None:
    """It keeps its blocks meanwhile, and starts when it has both."""
    engine, stage = staged()
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE, cache_salt="french"))
    if is_kv_first:
        arrive(engine, "d#0.0")
        assert engine.scheduler.requests["d#0.0"].status is RequestStatus.WAITING
        stage.load("d#0.0")
    else:
        stage.load("d#0.0")
        engine.step()
        assert engine.scheduler.requests["d#0.0"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        arrive(engine, "d#0.0")
    engine.run()
    assert engine.tokens("d#0.0") == fake_answer(PROMPT, 4)[1:]


@pytest.mark.parametrize("has_kv", [True, False])
def test_it_is_aborted_in_the_stage(has_kv: bool) -> None:
    engine, stage = staged()
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE, cache_salt="french"))
    if has_kv:
        arrive(engine, "d#0.0")
        assert engine.pool.num_blocks_of("d#0.0") > 0
    engine.core.abort(["d#0.0"])
    engine.run()
    assert engine.end("d#0.0").finish_reason is FinishReason.ABORT
    assert stage.given_up == ["d#0.0"] and not stage.loading
    assert engine.pool.count_by_state()["held"] == 0


def test_it_runs_into_its_deadline_there() -> None:
    engine, stage = staged()
    engine.add(adapted())
    engine.step()
    assert engine.core.seconds_to_deadline() == ADAPTER_SECONDS
    engine.now += ADAPTER_SECONDS
    engine.step()
    end = engine.end("a#0.0")
    assert (end.error_kind, end.error_message) == ("overloaded", "no adapter after 7 s")
    assert stage.given_up == ["a#0.0"] and not engine.scheduler.has_requests()


def test_the_time_in_a_stage_begins_when_the_earlier_one_is_left() -> None:
    engine, _ = staged()
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE, cache_salt="french"))
    engine.now += 3 * ADAPTER_SECONDS
    arrive(engine, "d#0.0")
    assert engine.core.seconds_to_deadline() == ADAPTER_SECONDS
    engine.now += ADAPTER_SECONDS
    engine.step()
    assert engine.end("d#0.0").error_kind == "overloaded"
    assert engine.pool.count_by_state()["held"] == 0


def test_a_stage_ends_a_request_that_cannot_go_on() -> None:
    engine, stage = staged()
    engine.add(adapted())
    stage.load("a#0.0", Finish.with_error("internal", "the adapter is damaged"))
    engine.run()
    assert engine.end("a#0.0").error_message == "the adapter is damaged" and stage.given_up == ["a#0.0"]


def test_a_stage_that_refuses_a_request_leaves_nothing_of_it_in_the_earlier_ones() -> None:
    """The fetch has begun already: it is taken back, and the same transfer may be asked for again."""
    engine, _ = staged()
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE, cache_salt="too large"))
    engine.run()
    assert engine.end("d#0.0").error_kind == "overloaded"
    assert not engine.scheduler.requests and not engine.scheduler.waits.keys
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE, attempt=1))
    assert engine.connector.fetches
