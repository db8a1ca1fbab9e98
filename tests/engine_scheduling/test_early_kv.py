"""KV that is asked for before its request is added, and KV that is there as soon as it has blocks."""

from collections.abc import Callable, Sequence

from contract.layout import Side
from contract.requests import EngineRequest, ReceiveTransfer
from engine.client import ProcessClient
from engine.connecting import Transfers
from engine.connector import ConnectorPair, SingleRankConnector
from roles.table import STAGES
from tests.engine_scheduling.stepping import (
    PROMPT,
    RECEIVE,
    SteppedEngine,
    fake_request,
    fake_settings,
    receiving,
)
from tests.fakes.engine.fakes import fake_answer, start_fake_executor
from tests.fakes.engine.transfer import FakeConnector


class LandingConnector(FakeConnector):
    """KV has arrived when ``receive_into`` returns, as over memory of the same machine."""

    def receive_into(
        self,
        key: str,
        block_ids: list[int],
        num_cached_blocks: int,
        other_groups: Sequence[Sequence[int]] = (),
    ) -> None:
        super().receive_into(key, block_ids, num_cached_blocks, other_groups)
        self.land(key)


class ExpectingConnector(FakeConnector):
    """Records which requests are expected now, and how many were expected."""

    def __init__(self) -> None:
        super().__init__()
        self.expecting = self
        self.expected_keys: list[str] = []
        self.connecting: list[tuple[ReceiveTransfer, Callable[[], None]]] = []
        self.num_expected = 0

    def expect(self, request: EngineRequest) -> None:
        self.expected_keys.append(request.key)
        self.num_expected += 1

    def connect(self, transfer: ReceiveTransfer, then: Callable[[], None]) -> None:
        self.connecting.append((transfer, then))

    def drop_expected(self, key: str) -> None:
        if key in self.expected_keys:
            self.expected_keys.remove(key)

    def start_fetch(self, request: EngineRequest) -> None:
        super().start_fetch(request)
        self.drop_expected(request.key)

    def counters(self) -> dict[str, float]:
        return {"transfer_expected": float(self.num_expected)}


def expecting_factory(_side: Side, _fingerprint: str, _wake: object) -> ConnectorPair:
    connector = ExpectingConnector()
    ranks = SingleRankConnector(connector.rank)
    return ConnectorPair(connector, ranks, "127.0.0.1:9", expecting=connector)


def test_kv_that_is_there_as_soon_as_it_has_blocks_joins_the_step_in_which_they_are_reserved() -> None:
    """Beside an answer that continues: no step of it lies between the reservation and the second token."""
    engine = SteppedEngine(connector=LandingConnector())
    engine.add(fake_request("other", [1, 2, 3], 9))
    engine.step()
    key = receiving(engine)
    engine.connector.publish_peer(key)
    num_before = engine.executor.runner.num_forward_passes
    engine.step()
    assert engine.executor.runner.num_forward_passes == num_before + 1
    assert engine.tokens(key) == fake_answer(PROMPT, 2)[1:]
    engine.run()
    assert engine.tokens(key) == fake_answer(PROMPT, 4)[1:]
    assert engine.pool.holders() == {}


def test_a_request_is_expected_until_it_is_added_or_rejected() -> None:
    connector = ExpectingConnector()
    engine = SteppedEngine(connector=connector)
    request = fake_request("d", PROMPT, 4, transfer=RECEIVE)
    engine.core.expect_request(request)
    assert connector.expected_keys == ["d#0.0"]
    engine.add(request)
    assert (connector.expected_keys, list(connector.fetches)) == ([], ["d#0.0"])
    too_long = fake_request("long", [1] * 500, transfer=RECEIVE)
    no_choice = fake_request("none", PROMPT, transfer=RECEIVE, num_choices=0)
    for bad in (too_long, no_choice, request):
        engine.core.expect_request(bad)
        engine.add(bad)
    engine.core.expect_request(fake_request("a", PROMPT))
    assert (connector.expected_keys, list(connector.fetches)) == ([], ["d#0.0"])
    assert connector.num_expected == 3, "an invalid request, and one without KV, are not expected"


def test_a_preparation_is_over_when_the_sender_is_connected() -> None:
    connector = ExpectingConnector()
    engine = SteppedEngine(connector=connector)
    over: list[str] = []
    engine.core.prepare(fake_request("a", PROMPT), lambda: over.append("a"))
    assert over == ["a"] and not connector.connecting, "its KV comes from nowhere else"
    engine.core.prepare(fake_request("d", PROMPT, transfer=RECEIVE), lambda: over.append("d"))
    ((transfer, then),) = connector.connecting
    assert transfer.peer_worker_id == RECEIVE.peer_worker_id and over == ["a"]
    then()
    assert over == ["a", "d"] and not engine.scheduler.requests


async def test_a_process_asks_for_the_kv_of_a_request_before_it_is_added() -> None:
    """It is added when the running step has ended; the thread that reads the input need not wait for that."""
    client = await ProcessClient.start(
        fake_settings(), Transfers(expecting_factory, STAGES), start=start_fake_executor
    )
    try:
        await client.add_request(fake_request("d", [1, 2], transfer=RECEIVE))
        await client.add_request(fake_request("a", [1, 2], 1))
        assert (await client.call("counters"))["transfer_expected"] == 1
        assert (await client.call("debug_state"))["connector"]["fetches"] == {"d#0.0": "asked"}
    finally:
        await client.shutdown()
