"""Links of workers with several ranks: when they are up, what the two sides agree on, and what is refused by name."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from contract.errors import IncompatiblePeerError, SettingError
from contract.identity import Role
from contract.layout import Side
from kv_transfer.connector import TransferFactory
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import Offer
from kv_transfer.ranks import rank_messages as messages
from tests.kv_transfer.builders import (
    LAYOUT,
    MODEL,
    Pair,
    Worker,
    identity_for,
    prompt_of,
    settings_for,
    worker,
)
from tests.kv_transfer.fakes import ByteMemory, TransferDriver
from tests.kv_transfer.played_ranks import SHARE, PlayedRank
from tests.kv_transfer.test_handshake import answer


def identity(name: str, side: Side, addresses: tuple[str, ...]) -> LocalIdentity:
    return identity_for(name, Role.PREFILL, side, [Offer("tcp", addresses[0], addresses[1:])])


def met(dialer_side: Side, acceptor_side: Side, addresses: tuple[str, ...]) -> Dialing:
    """Both halves of a handshake, to its end."""
    dialer = Dialing(identity("d", dialer_side, ("h:9",)), PeerTarget("p", "boot-p", "h:1"))
    acceptor = Accepting(identity("p", acceptor_side, addresses))
    answer(dialer, answer(acceptor, answer(dialer, answer(acceptor, dialer.begin()))))
    return dialer


def test_the_sides_agree_rank_by_rank() -> None:
    """The dialer learns every rank's address, and a plan; of equal sides too, for digests come rank by rank."""
    for ours, is_direct in ((Side(SHARE, 2), True), (Side(LAYOUT), False)):
        session = met(ours, Side(SHARE, 2), ("h:1", "h:2")).session
        assert session is not None
        assert session.offers[0].other_addresses == ("h:2",)
        assert session.terms is not None
        assert (session.terms.plan.theirs, session.terms.plan.is_direct) == (Side(SHARE, 2), is_direct)
        assert session.terms.kv_fingerprint is None, "it is the KV that would be computed here"


def test_other_heads_are_refused_by_their_number_over_all_ranks() -> None:
    with pytest.raises(IncompatiblePeerError, match="num_kv_heads: ours is 4, the peer's is 1"):
        met(Side(SHARE), Side(LAYOUT, 2), ("h:1", "h:2"))
    assert Side(SHARE, 2).differences(Side(LAYOUT)) == []
    three = msgspec.structs.replace(LAYOUT, num_kv_heads=3)
    assert Side(three).differences(Side(SHARE, 2)) == ["num_kv_heads: ours is 3, the peer's is 2"]


def test_an_address_for_every_rank_or_no_link() -> None:
    with pytest.raises(IncompatiblePeerError, match="offers tcp at 1 addresses; it has 2 ranks"):
        met(Side(LAYOUT), Side(SHARE, 2), ("h:1",))


@contextmanager
def prefill_with_played_ranks() -> Iterator[tuple[Worker, list[PlayedRank]]]:
    """Run a prefill worker whose ranks a test plays; their transports are open, nowhere."""
    driver = TransferDriver(ByteMemory(SHARE, 1))
    settings = settings_for("p", Role.PREFILL)
    pair = TransferFactory(settings)(Side(SHARE, 2), MODEL, driver.wake)
    ends = [socket.socketpair() for _ in range(2)]
    ranks = [PlayedRank(theirs) for _, theirs in ends]
    driver.scheduler, driver.address = pair.scheduler, pair.address
    try:
        pair.ranks.connect([ours for ours, _ in ends], [0, 0])
        for number, rank in enumerate(ranks):
            rank.send(messages.Opened([Offer("tcp", f"127.0.0.1:{number + 1}")], ["tcp"]))
        pair.ranks.begin()
        with pytest.raises(SettingError, match="for 2 ranks, each in a process of its own"):
            pair.ranks.in_process()
        yield Worker(settings, driver), ranks
    finally:
        pair.scheduler.close()
        pair.ranks.close()
        for rank in ranks:
            rank.close()


def test_a_link_is_up_when_every_rank_would_serve_its_reader() -> None:
    """Otherwise a reader could dial a rank on which its session has not begun, and be refused."""
    with ExitStack() as stack:
        prefill, ranks = stack.enter_context(prefill_with_played_ranks())
        early, late = (
            stack.enter_context(worker(settings_for(name, Role.DECODE))) for name in ("early", "late")
        )
        tokens = []
        for decode in (early, late):
            request = Pair(prefill, decode).fetch_request(decode.settings.worker_id, prompt_of(2))
            decode.driver.receiver.start_fetch(request)
            received = [rank.receive() for rank in ranks]
            assert [type(message) for message in received] == [messages.BeginSession] * 2
            tokens.append(received[0].token)
        for rank, token in ((0, tokens[0]), (0, tokens[1]), (1, tokens[1])):
            ranks[rank].send(messages.Answer(token))
        up = "link_handshakes_total{result=ok}"
        late.driver.wait_for(lambda: late.count(up) == 1, "the later link is up")
        assert early.count(up) == 0
        ranks[1].send(messages.Answer(tokens[0]))
        early.driver.wait_for(lambda: early.count(up) == 1, "so is the earlier one")
