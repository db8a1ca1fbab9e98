"""Copies share nothing that changes, and equal states have equal names: the explorer stands on both."""

from contract.requests import SendTransfer
from tests.protocol.forking import fork, freeze
from tests.protocol.prefill_side import PrefillSide
from tests.protocol.sink import Sink
from tests.protocol.worlds import ONE


def prefill_side() -> PrefillSide:
    side = PrefillSide(ONE, Sink(), "P0.1")
    side.prepare()
    side.accept(0, 0, 0, SendTransfer("t0"))
    return side


def test_a_copy_goes_its_own_way() -> None:
    side = prefill_side()
    before = freeze(side)
    copy = fork(side)
    assert freeze(copy) == before
    copy.prepare()
    copy.step()
    copy.digest(False)
    assert freeze(side) == before != freeze(copy)
    assert side.pools.first.num_free_blocks == 3 and copy.pools.first.num_free_blocks < 3
    assert side.transfers.debug_state() == [] and len(copy.transfers.debug_state()) == 1


def test_the_same_way_leads_to_the_same_state() -> None:
    ways = [prefill_side(), prefill_side()]
    for side in ways:
        side.prepare()
        side.step()
    assert freeze(ways[0]) == freeze(ways[1])


def test_an_object_that_is_reached_twice_is_copied_once() -> None:
    copy = fork(prefill_side())
    assert copy.scheduler.pools is copy.pools
    assert next(iter(copy.scheduler.queues.waiting)) is copy.scheduler.requests["0#0.0"]
