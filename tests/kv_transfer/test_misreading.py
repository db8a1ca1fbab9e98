"""Each part of a reference to KV is compared by itself (law 3): no sockets, no threads, no waiting."""

from dataclasses import replace

import msgspec
import pytest

from contract.errors import IncompatiblePeerError, WorkerLostError
from contract.layout import KVLayout, Side
from contract.requests import ReceiveTransfer, SendTransfer
from engine.connector import Failed, Published
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.counters import Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol import send_side
from kv_transfer.protocol.digests import digest_seeds
from kv_transfer.protocol.handshake import Accepting, Dialing, PeerTarget, Session
from kv_transfer.protocol.reads import Source
from kv_transfer.protocol.send_side import Send, SendState
from kv_transfer.transports.choosing import Alternatives
from tests.kv_transfer.builders import LAYOUT, MODEL, local_worker, prompt_of, request_of
from tests.kv_transfer.test_handshake import answer, identity
from tests.kv_transfer.test_lease_under_fault import LendingTransfers

ASKED = request_of("r", prompt_of(2), ReceiveTransfer("t", "p", "boot", "127.0.0.1:1"))
LENDING = Send(state=SendState.OPEN, lease_seconds=10, num_blocks=4)
SMALL = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")


def fetching() -> FetchTransfers:
    def choose(_session: Session, _told: object) -> Source:
        return Source("p", "boot", "127.0.0.1:1", "token")

    def ignore(*_: object) -> None:
        return

    return FetchTransfers(
        local_worker(),
        FetchPorts(ignore, ignore, ignore, ignore, choose, Alternatives(Counters())),
        lambda: 0.0,
    )


def test_digests_are_seeded_with_all_that_makes_kv_differ() -> None:
    """Model, salt, tokens, and the place in the prompt: the right bytes of anything else fail."""
    asked = [ASKED, msgspec.structs.replace(ASKED, cache_salt="s")]
    asked.append(msgspec.structs.replace(ASKED, prompt_token_ids=[7] * len(ASKED.prompt_token_ids)))
    seeds = [seed for each in asked for seed in digest_seeds(each, MODEL, Side(LAYOUT))]
    seeds += digest_seeds(ASKED, "another", Side(LAYOUT))
    assert len(set(seeds)) == len(seeds) == 8


def test_a_fetch_belongs_to_one_lease() -> None:
    transfers, ref = fetching(), PeerRef("boot", is_dialed=True)
    transfers.start_fetch(ASKED)
    transfers.on_message(ref, msg.BlocksPublished("t", 0, "first", 0, [1]))
    transfers.on_message(ref, msg.BlocksPublished("t", 0, "second", 1, [2]))
    published, failed = transfers.pop_events()
    assert isinstance(published, Published) and isinstance(failed, Failed)
    assert (failed.kind, "changed the lease" in failed.message) == ("transfer_failed", True)


def test_words_of_another_boot_or_attempt_are_dropped() -> None:
    transfers = fetching()
    transfers.start_fetch(ASKED)
    for boot_id, transfer_id, attempt in (("old", "t", 0), ("boot", "u", 0), ("boot", "t", 1)):
        words = msg.BlocksPublished(transfer_id, attempt, "lease", 0, [1])
        transfers.on_message(PeerRef(boot_id, is_dialed=True), words)
    assert transfers.pop_events() == []


def test_a_fetch_of_an_older_attempt_is_refused() -> None:
    lending = LendingTransfers()
    lending.transfers.open_send(request_of("r", prompt_of(2), SendTransfer("t"), attempt=1), [3, 4], 0)
    lending.transfers.on_fetch("peer", msg.FetchBlocks("t", 0))
    (refusal,) = lending.said
    assert isinstance(refusal, msg.TransferFailed) and refusal.kind == "transfer_failed"
    assert refusal.message == "attempt 0 of transfer t is older than attempt 1, which is known here"
    lending.transfers.on_fetch("peer", msg.FetchBlocks("t", 1))
    assert len(lending.said) == 1, "the newest one is served"


def test_a_transfer_has_one_reader() -> None:
    send, _ = send_side.on_fetch(LENDING, "a", 0, 1.0)
    send, actions = send_side.on_fetch(send, "b", 0, 2.0)
    assert send.peer == "a"
    assert [action.peer for action in actions if isinstance(action, ev.Refuse)] == ["b"]


def test_blocks_are_not_given_back_while_the_data_thread_digests_them() -> None:
    """Law 2: its own reads count too; what it makes readable after the end is revoked again first."""
    send, _ = send_side.order(LENDING, 2)
    send, actions = send_side.abandon(send, "cancelled", "aborted")
    assert actions == [ev.SendNotice.REVOKE]
    send, actions = send_side.on_readers_gone(send)
    assert actions == []
    send, actions = send_side.on_blocks_ready(send, ev.BlockRange(0, (1, 2)))
    assert actions == [ev.SendNotice.REVOKE]
    send, actions = send_side.on_readers_gone(send)
    assert actions == [ev.SendNotice.SENT]


def test_a_worker_that_was_started_again_is_a_stranger() -> None:
    dialer = Dialing(identity("d"), PeerTarget("p", "boot-before", "127.0.0.1:1"))
    challenge = answer(Accepting(identity("p")), dialer.begin())
    with pytest.raises(
        WorkerLostError, match="asked for as boot boot-before; boot boot-p of worker p answers"
    ):
        answer(dialer, challenge)
    assert dialer.session is None


def test_another_layout_is_refused_by_what_differs() -> None:
    target = PeerTarget("p", "boot-p", "127.0.0.1:1")
    dialer, acceptor = Dialing(replace(identity("d"), side=Side(SMALL)), target), Accepting(identity("p"))
    proved = answer(dialer, answer(acceptor, dialer.begin()))
    with pytest.raises(IncompatiblePeerError, match="head_dim"):
        answer(acceptor, proved)
    assert acceptor.session is None


def test_a_protocol_that_is_not_spoken_here_is_refused_by_number() -> None:
    later = msg.TRANSFER_PROTOCOL_MAX + 1
    with pytest.raises(IncompatiblePeerError, match=f"speaks transfer protocol {later}..{later}"):
        Accepting(identity("p")).receive(msg.Hello(later, later, "nonce", "d", "boot-d", "both"))
