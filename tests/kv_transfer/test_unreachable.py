"""An unreachable peer has its own error kind: neither of the two workers has died."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contract.errors import (
    ErrorKind,
    IncompatiblePeerError,
    KvbatonError,
    OverloadedError,
    PeerUnreachableError,
    TransferError,
    UnauthenticatedError,
    UnavailableError,
    WorkerLostError,
    error_from_kind,
)
from contract.identity import Role
from engine.connector import FirstToken
from kv_transfer.connector import ControlHalf
from kv_transfer.links.link import PeerRef
from serving.errors import grpc_code, http_status, retry_after_seconds
from tests.kv_transfer.builders import Pair, hand_over, pair_of, prompt_of, settings_for, worker
from tests.kv_transfer.faulty_network import TcpRelay, Way, free_port, no_answer_to_syn, relay_to

UNREACHABLE = ErrorKind.PEER_UNREACHABLE
IMPATIENT = {"peer_timeout_seconds": 0.4, "read_timeout_seconds": 0.4}


@contextmanager
def behind_relays(**decode: float) -> Iterator[tuple[Pair, TcpRelay, TcpRelay]]:
    """Yield a pair whose prefill worker's control and data ports are reached through relays."""
    control, data = free_port(), free_port()
    prefill = settings_for(
        "p", Role.PREFILL, control_port=control, data_port=data, advertise_host="127.0.0.2"
    )
    with (
        worker(prefill) as p,
        worker(settings_for("d", Role.DECODE, **decode)) as d,
        relay_to(f"127.0.0.1:{control}", "127.0.0.2", control) as on_control,
        relay_to(f"127.0.0.1:{data}", "127.0.0.2", data) as on_data,
    ):
        yield Pair(p, d), on_control, on_data


def kind_of_failure(pair: Pair, **peer: str) -> str:
    fetch, decode = pair.fetch_request("r", prompt_of(2), 0, **peer), pair.decode.driver
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: fetch.key in decode.failed, "failed")
    return decode.failed[fetch.key].kind


@pytest.mark.parametrize("way", [Way.REJECT, Way.SWALLOW, Way.SWALLOW_BACK])
def test_a_link_that_cannot_be_made_is_a_peer_out_of_reach(way: Way) -> None:
    """P6: rejected at once, or silent in the handshake (both ways, or one): the error is not the worker's death."""
    with behind_relays(**IMPATIENT) as (pair, control, _):
        control.way = way
        assert kind_of_failure(pair) == UNREACHABLE
        control.way = Way.PASS
        hand_over(pair, "after")


def test_a_link_whose_first_packet_is_dropped_is_a_peer_out_of_reach() -> None:
    """P6: nothing at all answers at the address."""
    impatient = settings_for("d", Role.DECODE, **IMPATIENT)
    with pair_of() as pair, worker(impatient) as decode, no_answer_to_syn() as address:
        assert kind_of_failure(Pair(pair.prefill, decode), peer_control=address) == UNREACHABLE


@pytest.mark.parametrize(
    "address", ["h:²", "h:" + "1" * 5000, "a\0b:1", "a..b:1", "\ud800:1", "é" * 300 + ":1", ""]
)
def test_an_address_that_is_none_is_a_peer_out_of_reach(address: str) -> None:
    """M1: "h:²", which comes with a task, ended the thread of all links, and with it the worker."""
    with pair_of() as pair:
        assert kind_of_failure(pair, peer_control=address) == UNREACHABLE
        hand_over(pair, "after")


@pytest.mark.parametrize("way", [Way.REJECT, Way.SWALLOW, Way.SWALLOW_BACK])
def test_a_link_that_breaks_under_transfers_fails_all_of_them(way: Way) -> None:
    """P6: in the middle of transfers each one ends with the link, not by its own deadline."""
    with behind_relays(**IMPATIENT) as (pair, control, _):
        decode = pair.decode.driver
        fetches = [pair.fetch_request(f"r{number}", prompt_of(2)) for number in range(5)]
        for fetch in fetches:
            decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: pair.prefill.count("transfers_parked") == 5, "parked")
        if way is Way.REJECT:
            control.cut()
        else:
            control.way = way
        decode.wait_for(lambda: len(decode.failed) == 5, "failed")
        assert {decode.failed[fetch.key].kind for fetch in fetches} == {UNREACHABLE}


@pytest.mark.parametrize("way", [Way.REJECT, Way.SWALLOW, Way.SWALLOW_BACK])
def test_a_data_connection_that_fails_is_a_peer_out_of_reach(way: Way) -> None:
    """P6: the control link stands, and the data port is rejected or dropped."""
    with behind_relays(read_timeout_seconds=0.4) as (pair, _, data):
        data.way = way
        pair.prefill.lend("t-r", [10, 11])
        pair.prefill.driver.send_all(pair.send_request("r", prompt_of(2)), [10, 11], [FirstToken(1)])
        fetch, decode = pair.fetch_request("r", prompt_of(2)), pair.decode.driver
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: fetch.key in decode.published, "published")
        decode.receiver.receive_into(fetch.key, [30, 31], 0)
        decode.wait_for(lambda: fetch.key in decode.failed, "failed")
        assert decode.failed[fetch.key].kind == UNREACHABLE


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerUnreachableError("silent"), UNREACHABLE),
        (UnauthenticatedError("too many handshakes"), UNREACHABLE),
        (OverloadedError("full"), UNREACHABLE),
        (UnavailableError("no thread"), UNREACHABLE),
        (WorkerLostError("another boot answers"), ErrorKind.WORKER_LOST),
        (IncompatiblePeerError("dtype"), ErrorKind.INCOMPATIBLE),
        (TransferError("malformed"), ErrorKind.TRANSFER_FAILED),
    ],
)
def test_no_end_of_a_link_is_an_error_that_other_workers_cannot_mend(
    error: KvbatonError, kind: ErrorKind
) -> None:
    """P6: a client does not get 401 or 400 for an error between two workers."""
    with pair_of() as pair:
        fetch, decode = pair.fetch_request("r", prompt_of(2)), pair.decode.driver
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: pair.prefill.count("transfers_parked") == 1, "parked")
        control = decode.scheduler
        assert isinstance(control, ControlHalf)
        control.link_down(PeerRef(pair.prefill.boot_id, is_dialed=True), None, error)
        decode.wait_for(lambda: fetch.key in decode.failed, "failed")
        assert decode.failed[fetch.key].kind == kind


def test_the_kind_crosses_every_wire() -> None:
    """P6: it is rebuilt from its name, and mapped as an outage that a retry may avoid."""
    error = error_from_kind("peer_unreachable", "no answer")
    assert type(error) is PeerUnreachableError
    assert (http_status(error.kind), grpc_code(error.kind).name) == (503, "UNAVAILABLE")
    assert retry_after_seconds(error.kind) == 1
