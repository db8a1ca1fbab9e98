"""A fetch that begins before its request is added: the scheduler learns of it only afterwards."""

from collections.abc import Iterator

import pytest

from contract.errors import InternalError
from contract.requests import EngineRequest
from engine.connector import ExpectsRequests
from kv_transfer.protocol.fetch_side import FetchState
from tests.kv_transfer.builders import TOKENS, Pair, hand_over, pair_of, prompt_of
from tests.kv_transfer.fakes import TransferDriver

BLOCKS = [10, 11, 12]
INTO = [30, 31, 32]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as pair:
        hand_over(pair, "before")  # the link is up
        yield pair


def early(driver: TransferDriver) -> ExpectsRequests:
    """Return the receiver's role, which can begin before a request is added."""
    assert driver.expecting is not None
    return driver.expecting


def lend(pair: Pair) -> EngineRequest:
    """Lend a prompt of three blocks; return the request that fetches them."""
    prompt = prompt_of(3)
    pair.prefill.lend("t-r", BLOCKS)
    pair.prefill.driver.send_all(pair.send_request("r", prompt), BLOCKS, TOKENS)
    return pair.fetch_request("r", prompt)


def fetches_of(pair: Pair) -> list[tuple[str, int]]:
    """Return the state and the number of announced blocks of each fetch."""
    fetches = pair.decode.driver.scheduler.debug_state()["fetches"]
    return [(fetch["state"], fetch["num_announced"]) for fetch in fetches]


def expected(pair: Pair) -> EngineRequest:
    """Expect a request, and wait until its sender has announced all blocks."""
    fetch = lend(pair)
    driver = pair.decode.driver
    early(driver).expect(fetch)
    driver.wait_for(lambda: fetches_of(pair) == [(FetchState.WAITING, 3)], "announced")
    return fetch


def test_its_events_wait_until_it_is_added(pair: Pair) -> None:
    fetch = expected(pair)
    driver = pair.decode.driver
    driver.step()
    assert fetch.key not in driver.published and not driver.scheduler.has_work()
    driver.receiver.start_fetch(fetch)
    assert driver.scheduler.has_work()
    driver.step()
    assert fetch.key in driver.published
    driver.receiver.receive_into(fetch.key, INTO, 0)
    driver.wait_for(lambda: fetch.key in driver.received, "received")
    assert pair.decode.holds("t-r", INTO)
    assert [token.token_id for token in driver.receiver.pop_received(fetch.key).first_tokens] == [
        token.token_id for token in TOKENS
    ]


def test_one_that_is_not_added_is_cancelled(pair: Pair) -> None:
    fetch = expected(pair)
    early(pair.decode.driver).drop_expected(fetch.key)
    assert fetches_of(pair) == []
    sender = pair.prefill.driver
    sender.wait_for(lambda: pair.send_request("r", prompt_of(3)).key in sender.sent, "sent")
    pair.decode.driver.step()
    assert fetch.key not in pair.decode.driver.published and not pair.decode.driver.failed


def test_one_that_was_added_is_not_dropped(pair: Pair) -> None:
    fetch = expected(pair)
    driver = pair.decode.driver
    driver.receiver.start_fetch(fetch)
    early(driver).drop_expected(fetch.key)
    with pytest.raises(
        InternalError, match="already being fetched"
    ):  # a second request of the same key, which is rejected
        early(driver).expect(fetch)
    early(driver).drop_expected(fetch.key)
    driver.step()
    assert fetch.key in driver.published
    driver.receiver.receive_into(fetch.key, INTO, 0)
    driver.wait_for(lambda: fetch.key in driver.received, "received")


def test_its_failure_is_reported_when_it_is_added(pair: Pair) -> None:
    fetch = lend(pair)
    driver = pair.decode.driver
    sender = pair.prefill.driver.sender
    sender.abandon_send(pair.send_request("r", prompt_of(3)).key, "cancelled", "the client has gone")
    early(driver).expect(fetch)
    driver.wait_for(lambda: not fetches_of(pair), "failed")
    driver.step()
    assert driver.failed == {}
    driver.receiver.start_fetch(fetch)
    driver.wait_for(lambda: fetch.key in driver.failed, "reported")
    assert driver.failed[fetch.key].message == "the client has gone"
