"""The sender reports that it computes a prompt: the receiver's blocks are reserved before there is anything to read."""

import pytest

from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side, send_side
from kv_transfer.protocol.events import EndReason
from kv_transfer.protocol.fetch_side import Fetch, FetchState
from kv_transfer.protocol.send_side import Send, SendState
from tests.kv_transfer.builders import TOKENS, pair_of, prompt_of

NUM_BLOCKS = 13
SOURCE_IDS, TARGET_IDS = list(range(1, 1 + NUM_BLOCKS)), list(range(40, 40 + NUM_BLOCKS))


def test_it_is_told_once() -> None:
    send = Send(state=SendState.OPEN, lease_seconds=9.0, num_blocks=8, peer="peer")
    send, actions = send_side.order(send, 2)
    assert actions == [ev.SendNotice.START]
    assert send_side.order(send, 8)[1] == []


@pytest.mark.parametrize(
    ("num_ordered", "digests", "words"),
    [
        (0, (), []),
        (4, (), [ev.SendNotice.START]),
        (4, (11, 12), [ev.BlockRange(0, (11, 12))]),
    ],
    ids=["waits", "is computed", "is published"],
)
def test_who_asks_later_hears_how_far_it_is(
    num_ordered: int, digests: tuple[int, ...], words: list[ev.SendAction]
) -> None:
    state = SendState.PUBLISHING if digests else SendState.OPEN
    send = Send(state=state, lease_seconds=9.0, num_blocks=8, num_ordered=num_ordered, digests=digests)
    assert send_side.on_fetch(send, "peer", 0, 1.0)[1] == words


def test_the_scheduler_hears_once_that_blocks_are_needed() -> None:
    fetch, actions = fetch_side.on_started(Fetch(num_blocks=3))
    assert actions == [ev.FetchNotice.PUBLISHED]
    assert fetch_side.on_started(fetch)[1] == []
    fetch, actions = fetch_side.reserve(fetch, (4, 5, 6), 0)
    assert (fetch.state, actions) == (FetchState.RESERVED, [])
    fetch, actions = fetch_side.on_announced(fetch, 0, 3, 0.0)
    assert actions == [ev.PullBlocks(0, (4, 5, 6))]


def test_a_prompt_that_ends_before_it_is_published_gives_the_blocks_back() -> None:
    fetch, _ = fetch_side.on_started(Fetch(num_blocks=1))
    fetch, _ = fetch_side.reserve(fetch, (4,), 0)
    fetch, actions = fetch_side.on_sender_failed(fetch, "cancelled", "the client left")
    assert fetch.state is FetchState.QUARANTINED
    assert actions == [ev.FetchNotice.CANCEL, ev.FetchNotice.FAILED]
    assert fetch.ending == EndReason("cancelled", "the client left")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_blocks_are_reserved_and_layers_cross_while_the_first_step_computes(transport: str) -> None:
    """Also those of a prompt that one step computes: nothing of it was published before."""
    with pair_of(transport=transport) as pair:
        prompt, driver, decode = prompt_of(NUM_BLOCKS), pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        heard: list[str] = []

        def compute_layer(number: int) -> None:
            if number == 1:
                decode.wait_for(lambda: decode.published == [fetch.key], "the start")
                heard.extend(decode.published)
                decode.receiver.receive_into(fetch.key, TARGET_IDS, 0)
                pair.prefill.lend("t-r", SOURCE_IDS)

        driver.compute_layer = compute_layer
        decode.receiver.start_fetch(fetch)
        driver.sender.open_send(send, SOURCE_IDS, 0)
        driver.sender.publish(send.key, len(prompt))
        driver.step()
        assert heard == [fetch.key]
        driver.sender.finish_send(send.key, TOKENS)
        decode.wait_for(lambda: decode.received == [fetch.key], "received")
        assert decode.published == [fetch.key]
        assert pair.decode.holds("t-r", TARGET_IDS)
        assert decode.receiver.pop_received(fetch.key).report.num_pieces > 1
