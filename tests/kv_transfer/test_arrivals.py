"""A sender estimates when its forward pass ends, and the receiver when the KV arrives."""

from collections.abc import Callable

import msgspec
import pytest

from contract.errors import TransferError
from contract.requests import SendTransfer
from kv_transfer.control.fetch_effects import ArrivalEstimates
from kv_transfer.control.sending import SendTransfers
from kv_transfer.data.publishing import CompletionEstimator
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol.messages import EndExpected, FetchBlocks, Message, decode_message
from tests.kv_transfer.builders import LAYOUT, TOKENS, hand_over, local_worker, pair_of, prompt_of, request_of
from tests.kv_transfer.fakes import FlatPool

NUM_LAYERS = 16
PEER, OTHER = PeerRef("boot", is_dialed=True), PeerRef("other", is_dialed=True)


class Pass:
    """Forward passes whose layers take as long as the test chooses."""

    def __init__(self) -> None:
        self.now = 50.0
        self.told: list[float] = []
        self._ends: list[float] = []
        self.estimator = CompletionEstimator(NUM_LAYERS, lambda end: self._ends.append(end), lambda: self.now)

    def run(self, layer_seconds: Callable[[int], float], tail: float, num_blocks: int = 8) -> None:
        """Run one pass; ``told`` gets the error of each estimate, positive if it was too late."""
        self._ends = []
        self.estimator.begin(num_blocks)
        for number in range(1, NUM_LAYERS + 1):
            self.now += layer_seconds(number)
            self.estimator.on_stored(number)
        self.now += tail
        self.estimator.on_computed()
        self.told = [end - self.now for end in self._ends]


def test_the_end_is_told_several_times_and_better_each_time() -> None:
    forward = Pass()
    forward.run(lambda _: 0.25, 0.5)
    assert len(forward.told) == 5, "after an eighth, half, three quarters... of the layers"
    assert forward.told == pytest.approx([-0.5] * 5), "nobody knows what follows the last layer"
    forward.run(lambda number: 0.25 + 0.01 * number, 0.5)
    assert forward.told[0] == pytest.approx(-0.01 * 16 * 17 / 2), "of a pass of this size at its begin"
    assert sorted(forward.told[1:]) == forward.told[1:]
    assert forward.told[-1] == pytest.approx(-0.01 * (16 - (2 + 15) / 2)), (
        "the last layer is slower than those before"
    )
    forward.run(lambda _: 0.25, 0.5)
    assert forward.told[1:] == pytest.approx([0.0] * 5)


def test_passes_are_compared_with_those_of_their_size() -> None:
    forward = Pass()
    forward.run(lambda _: 0.25, 0.0, num_blocks=8)
    forward.run(lambda _: 2.0, 0.0, num_blocks=64)
    assert len(forward.told) == 5, "the first of its size"
    forward.run(lambda _: 0.5, 0.0, num_blocks=15)
    assert len(forward.told) == 6 and forward.told[0] == pytest.approx(0.25 * 16 * 15 / 8 - 0.5 * 16)


def test_one_slow_end_of_a_pass_is_not_believed() -> None:
    forward = Pass()
    for tail in (0.5, 0.5, 9.0, 0.5):
        forward.run(lambda _: 0.25, tail)
    assert forward.told[-1] == pytest.approx(0.0)


def test_the_next_one_is_that_which_is_expected_first() -> None:
    arrivals = ArrivalEstimates()
    assert arrivals.next(0.0) is None
    arrivals.expect("a", PEER, 5.0)
    arrivals.expect("b", PEER, 4.0)
    assert arrivals.next(0.0) == 4.0
    arrivals.expect("b", PEER, 6.0)
    assert arrivals.next(0.0) == 5.0
    arrivals.forget("a")
    assert arrivals.next(0.0) == 6.0
    arrivals.on_arrival("b", 6.0)
    assert arrivals.next(0.0) is None


def test_guesses_are_corrected_by_how_far_off_they_usually_are() -> None:
    arrivals = ArrivalEstimates()
    for delay in (0.5, 0.25, 30.0):
        arrivals.expect("a", PEER, 10.0)
        arrivals.on_arrival("a", 10.0 + delay)
    arrivals.expect("b", PEER, 50.0)
    assert arrivals.next(0.0) == 50.5


def test_prompts_that_one_step_computed_are_expected_behind_each_other() -> None:
    arrivals = ArrivalEstimates()
    for key, sender, at in (("a", PEER, 5.0), ("b", PEER, 5.001), ("c", PEER, 5.5), ("d", OTHER, 5.0)):
        arrivals.expect(key, sender, at)
    arrivals.on_arrival("a", 4.5)
    assert arrivals.next(4.4) == pytest.approx(4.5), "b, right behind a"
    arrivals.on_arrival("b", 4.5)
    assert arrivals.next(4.4) == pytest.approx(4.75), "d, if it is as early as the others usually were"


def test_one_that_is_long_overdue_hides_nobody() -> None:
    arrivals = ArrivalEstimates()
    arrivals.expect("lost", PEER, 5.0)
    arrivals.expect("next", PEER, 8.0)
    assert arrivals.next(5.1) == 5.0
    assert arrivals.next(6.0) == 8.0


def test_an_estimate_is_sent_to_the_fetching_peer_until_the_transfer_ends() -> None:
    posted: list[tuple[PeerRef, Message]] = []
    transfers = SendTransfers(
        local_worker(),
        lambda ref, message: posted.append((ref, message)),
        release=lambda _name: None,
        look_by=lambda _deadline: None,
        new_lease=lambda: "lease",
    )
    request = request_of("r", prompt_of(2), SendTransfer("t"))
    transfers.open_send(request, [1, 2], 0)
    transfers.end_expected(request.key, 0.7)
    transfers.on_fetch("boot", FetchBlocks("t", 0))
    transfers.end_expected(request.key, 0.5)
    transfers.on_peer_gone("boot", "gone")
    transfers.end_expected(request.key, 0.1)
    assert posted == [(PeerRef("boot", is_dialed=False), EndExpected("t", 0, "lease", 0.5))]


@pytest.mark.parametrize("is_flat", [True, False], ids=["on a CPU", "on a device"])
@pytest.mark.parametrize("num_blocks", [2, 13], ids=["whole", "layer by layer"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_receiver_knows_when_while_the_last_blocks_are_computed(
    transport: str, num_blocks: int, is_flat: bool
) -> None:
    """On a device a layer is reported when it is launched, from which no end can be estimated."""
    source, target = list(range(1, 1 + num_blocks)), list(range(40, 40 + num_blocks))
    expected: list[float | None] = []
    with pair_of(transport=transport, memory=FlatPool(LAYOUT, 64) if is_flat else None) as pair:
        hand_over(pair, "a", num_blocks)
        prompt, driver, decode = prompt_of(num_blocks), pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("b", prompt), pair.fetch_request("b", prompt)

        def compute_layer(number: int) -> None:
            if number == LAYOUT.num_layers and is_flat:
                decode.wait_for(lambda: decode.receiver.next_arrival() is not None, "word of the end")
            expected.append(decode.receiver.next_arrival())

        driver.compute_layer = compute_layer
        decode.receiver.start_fetch(fetch)
        pair.prefill.lend("t-b", source)
        driver.sender.open_send(send, source, 0)
        driver.wait_for(lambda: driver.scheduler.debug_state()["leases"][0]["peer"], "the fetch")
        driver.sender.publish(send.key, len(prompt))
        driver.step()
        decode.wait_for(lambda: fetch.key in decode.published, "the start")
        decode.receiver.receive_into(fetch.key, target, 0)
        driver.sender.finish_send(send.key, TOKENS)
        decode.wait_for(lambda: fetch.key in decode.received, "received")
        assert decode.receiver.next_arrival() is None, "it is here"
    assert [each is not None for each in expected[1:]] == ([True] if is_flat else [False] * (num_blocks > 2))


def test_a_prompt_that_fails_is_not_expected_any_more() -> None:
    num_blocks = 3
    with pair_of(memory=FlatPool(LAYOUT, 64)) as pair:
        hand_over(pair, "a", num_blocks)
        prompt, driver, decode = prompt_of(num_blocks), pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("b", prompt), pair.fetch_request("b", prompt)
        decode.receiver.start_fetch(fetch)
        decode.receiver.start_fetch(pair.fetch_request("c", prompt))  # no estimate comes for this one
        driver.sender.open_send(send, [1, 2, 3], 0)
        driver.wait_for(lambda: driver.scheduler.debug_state()["leases"][0]["peer"], "the fetch")
        driver.sender.publish(send.key, len(prompt))
        driver.step()
        decode.wait_for(lambda: decode.receiver.next_arrival() is not None, "word of the end")
        driver.sender.abandon_send(send.key, "cancelled", "the client left")
        decode.wait_for(lambda: fetch.key in decode.failed, "the failure")
        assert decode.receiver.next_arrival() is None


@pytest.mark.parametrize("seconds", [-0.5, float("inf"), float("nan"), 1e9])
def test_an_impossible_estimate_is_malformed(seconds: float) -> None:
    """An impossible estimate is never used."""
    word = msgspec.msgpack.encode(EndExpected("t", 0, "lease", seconds))
    with pytest.raises(TransferError, match="malformed"):
        decode_message(word)
