"""The handshake without sockets: what each side accepts, and in which order."""

import msgspec
import pytest

from contract.errors import IncompatiblePeerError, KvbatonError, UnauthenticatedError
from contract.identity import Role
from contract.layout import Side
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import FetchBlocks, Message, Offer, Prove, Transcript, Welcome
from tests.kv_transfer.builders import LAYOUT, MODEL, SECRET, identity_for


def identity(worker_id: str, secret: str = SECRET) -> LocalIdentity:
    return identity_for(worker_id, Role.AGGREGATED, offers=[Offer("tcp", "127.0.0.1:9")], secret=secret)


def dialing(secret: str = SECRET) -> Dialing:
    return Dialing(identity("d", secret), PeerTarget("p", "boot-p", "127.0.0.1:1"))


def answer(side: Dialing | Accepting, messages: list[Message]) -> list[Message]:
    return [reply for message in messages for reply in side.receive(message)]


def test_both_sides_end_with_the_same_token() -> None:
    dialer, acceptor = dialing(), Accepting(identity("p"))
    assert acceptor.begin() == []
    welcome = answer(acceptor, answer(dialer, answer(acceptor, dialer.begin())))
    assert isinstance(welcome[0], Welcome)
    assert answer(dialer, welcome) == []
    assert dialer.session is not None
    assert acceptor.session is not None
    assert dialer.session.token == acceptor.session.token
    assert SECRET not in dialer.session.token
    assert (dialer.session.boot_id, acceptor.session.boot_id) == ("boot-p", "boot-d")
    assert dialer.session.offers == (Offer("tcp", "127.0.0.1:9"),)


def test_a_dialer_that_does_not_check_the_acceptor_is_still_checked_itself() -> None:
    """The proof must be the dialer's own: neither a guess nor the acceptor's messages sent back (law 8)."""
    for claimed in ("0" * 64, None):
        acceptor = Accepting(identity("p"))
        (challenge,) = answer(acceptor, dialing("another secret").begin())
        reflected = getattr(challenge, "proof", "")
        with pytest.raises(UnauthenticatedError, match="worker d does not hold this cluster's secret"):
            acceptor.receive(Prove(claimed or reflected, MODEL, LAYOUT, ["tcp"], 3.0))
        assert acceptor.session is None


def test_a_dialer_says_nothing_to_one_without_the_secret() -> None:
    """It sends neither its proof nor the model: the listener must prove itself first (law 8)."""
    dialer, acceptor = dialing(), Accepting(identity("p", "another secret"))
    challenge = answer(acceptor, dialer.begin())
    with pytest.raises(
        UnauthenticatedError, match=r"worker p at 127\.0\.0\.1:1 does not hold this cluster's secret"
    ):
        answer(dialer, challenge)
    assert dialer.session is None


def test_a_proof_cannot_be_replayed_on_another_link() -> None:
    """It covers both nonces."""
    dialer, first = dialing(), Accepting(identity("p"))
    hello = dialer.begin()
    proof = answer(dialer, answer(first, hello))
    second = Accepting(identity("p"))
    answer(second, hello)
    with pytest.raises(UnauthenticatedError):
        answer(second, proof)


def test_words_out_of_order_end_the_handshake() -> None:
    dialer, acceptor = dialing(), Accepting(identity("p"))
    hello = dialer.begin()
    answer(acceptor, hello)
    with pytest.raises(KvbatonError, match="Hello came in the middle"):
        answer(acceptor, hello)
    with pytest.raises(KvbatonError, match="FetchBlocks"):
        acceptor.receive(FetchBlocks("t", 0))
    with pytest.raises(KvbatonError, match="sent Hello in the middle"):
        answer(dialer, hello)


def copying(worker_id: str, num_ranks: int) -> LocalIdentity:
    """A worker whose ranks each hold one of two KV heads."""
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=1)
    offers = [Offer("tcp", "127.0.0.1:9", ("127.0.0.1:9",) * (num_ranks - 1))]
    return identity_for(worker_id, Role.AGGREGATED, Side(layout, num_ranks, 2), offers)


def test_sides_with_copies_of_heads_agree_with_sides_without() -> None:
    """The number of heads is sent where ranks share heads; else messages are those of workers without the field."""
    dialer = Dialing(copying("d", 4), PeerTarget("p", "boot-p", "127.0.0.1:1"))
    acceptor = Accepting(identity("p"))
    prove = answer(dialer, answer(acceptor, dialer.begin()))
    assert isinstance(prove[0], Prove) and prove[0].num_kv_heads == 2
    (welcome,) = answer(acceptor, prove)
    assert b"num_kv_heads" in msgspec.msgpack.encode(prove[0])
    assert msgspec.msgpack.encode(welcome).count(b"num_kv_heads") == 1, "that of the layout alone"
    answer(dialer, [welcome])
    assert dialer.session is not None and dialer.session.terms is not None
    plan = dialer.session.terms.plan
    assert (plan.ours.num_kv_heads, plan.theirs.num_kv_heads, plan.ours.num_ranks) == (2, 2, 4)
    other = Dialing(identity("d"), PeerTarget("p", "boot-p", "127.0.0.1:1"))
    acceptor = Accepting(copying("p", 3))
    answer(other, answer(acceptor, answer(other, answer(acceptor, other.begin()))))
    assert other.session is not None and other.session.terms is not None
    assert other.session.terms.plan.ranks_of() == [0, 2]


def test_heads_that_a_peers_ranks_cannot_hold_are_refused() -> None:
    dialer, acceptor = dialing(), Accepting(identity("p"))
    hello = dialer.begin()
    challenge = answer(acceptor, hello)
    (prove,) = answer(dialer, challenge)
    assert isinstance(prove, Prove)
    transcript = Transcript(SECRET)
    for message in (*hello, *challenge):
        transcript.add(message)
    wrong = transcript.proved("dialer's proof", msgspec.structs.replace(prove, num_kv_heads=9, proof=""))
    with pytest.raises(
        IncompatiblePeerError, match="worker d describes its KV wrongly: 1 ranks of 2 KV heads"
    ):
        acceptor.receive(wrong)
