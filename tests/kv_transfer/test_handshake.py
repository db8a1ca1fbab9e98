"""The handshake without sockets: what each side accepts, and in which order."""

import pytest

from contract.errors import KvbatonError, UnauthenticatedError
from contract.identity import Role
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import FetchBlocks, Message, Offer, Prove, Welcome
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
