"""Peers, transfers and attempts that are refused: by name, with the reason, and for good."""

import socket
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from contract.identity import Role
from kv_transfer.links.framing import HEADER, as_frame, encode_frame
from kv_transfer.protocol.events import NOT_NEEDED
from kv_transfer.protocol.messages import MAX_HANDSHAKE_BYTES, FetchBlocks, Hello, decode_message
from tests.kv_transfer.builders import (
    LAYOUT,
    MODEL,
    TOKENS,
    Pair,
    Sides,
    hand_over,
    pair_of,
    prompt_of,
    settings_for,
    worker,
)


def failure_of(pair: Pair, **peer: Any) -> tuple[str, str]:
    """Return (kind, message) of a fetch that must fail."""
    fetch, decode = pair.fetch_request("r", prompt_of(2), **peer), pair.decode.driver
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: fetch.key in decode.failed, "failed")
    return decode.failed[fetch.key].kind, decode.failed[fetch.key].message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": msgspec.structs.replace(LAYOUT, block_size=6)}, "block_size: ours is 4, the peer's is 6"),
        ({"layout": msgspec.structs.replace(LAYOUT, dtype="float16")}, "dtype: ours is float32"),
        ({"model": "another"}, f"model_fingerprint: ours is {MODEL}, the peer's is another"),
    ],
)
def test_a_peer_that_differs_is_refused_by_what_differs(changes: dict[str, Any], words: str) -> None:
    """The handshake, not the transfer, finds out (DESIGN §5)."""
    with (
        worker(settings_for("p", Role.PREFILL)) as prefill,
        worker(settings_for("d", Role.DECODE), **changes) as decode,
    ):
        kind, message = failure_of(Pair(prefill, decode))
        assert kind == "incompatible"
        assert words in message
        assert "worker p" in message
        assert prefill.count("link_handshakes_total{result=failed}") == 1


def test_a_wrong_secret_is_refused() -> None:
    with pair_of(Sides(decode={"secret": "another"})) as pair:
        kind, message = failure_of(pair)
        assert kind == "peer_unreachable"
        assert "does not hold this cluster's secret" in message


def test_a_restarted_worker_on_the_same_address_is_a_stranger() -> None:
    """Both incarnations are named (law 3)."""
    with pair_of() as pair:
        kind, message = failure_of(pair, peer_boot_id="0123456789abcdef")
        assert kind == "worker_lost"
        assert "0123456789abcdef" in message
        assert pair.prefill.boot_id in message


def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused, pair_of() as pair:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        kind, message = failure_of(pair, peer_control=address)
        assert kind == "peer_unreachable"
        assert "worker p" in message


def test_an_address_that_is_none() -> None:
    with pair_of() as pair:
        kind, message = failure_of(pair, peer_control="nowhere")
        assert kind == "peer_unreachable"
        assert "host:port" in message


def test_a_host_that_cannot_be_encoded_is_refused_and_others_are_served() -> None:
    """Resolving it raises UnicodeError, which is no OSError: the I/O thread survives."""
    with pair_of() as pair:
        kind, message = failure_of(pair, peer_control="a..b:9000")
        assert kind == "peer_unreachable"
        assert "cannot be dialed" in message
        hand_over(pair, "after")


def test_another_protocol_version_is_refused_by_number() -> None:
    """A dialer of a later version gets both ranges."""
    with worker(settings_for("p", Role.PREFILL)) as prefill:
        host, port = prefill.driver.address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            hello = Hello(10, 11, "n", "future", "b", "decode")
            sock.sendall(encode_frame(hello, MAX_HANDSHAKE_BYTES))
            data = sock.makefile("rb").read()
        refused = decode_message(data[HEADER.size :])
        assert "speaks transfer protocol 10..11; this worker speaks 9..9" in getattr(refused, "message", "")


@pytest.mark.parametrize(
    "noise",
    [
        HEADER.pack(2**31, 0) + b"x",
        encode_frame({"type": "nonsense"}, 1000),
        encode_frame(FetchBlocks("t", 0), 1000),
        as_frame(b"\xc1\xc1\xc1\xc1\xc1"),
    ],
)
def test_strangers_on_the_control_port_are_cut_off(noise: bytes) -> None:
    """Oversized, malformed and premature frames end that link only."""
    with pair_of() as pair:
        host, port = pair.prefill.driver.address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(noise)
            with sock.makefile("rb") as stream:
                stream.read()
        hand_over(pair, "after")


def test_a_stranger_that_dribbles_its_first_frame_is_cut_off() -> None:
    """The handshake has a deadline, which no byte extends."""
    with worker(settings_for("p", Role.PREFILL, peer_timeout_seconds=0.3)) as prefill:
        host, port = prefill.driver.address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.settimeout(0.02)
            sock.sendall(HEADER.pack(MAX_HANDSHAKE_BYTES, 0))
            while prefill.count("link_handshakes_total{result=failed}") == 0:
                with suppress(TimeoutError, ConnectionError):  # the latter: it is being cut off
                    sock.sendall(b"x")
                    sock.recv(1)


def test_a_fetch_waits_for_a_transfer_that_is_not_known_yet_and_gives_up() -> None:
    """It is parked under a deadline, not refused (DESIGN §2)."""
    with pair_of(Sides(prefill={"parked_seconds": 0.3})) as pair:
        fetch, decode = pair.fetch_request("r", prompt_of(2)), pair.decode.driver
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: pair.prefill.count("transfers_parked") == 1, "parked")
        decode.wait_for(lambda: decode.failed, "failed")
        assert decode.failed[fetch.key].kind == "deadline"
        assert pair.prefill.count("transfers_parked") == 0
        assert pair.prefill.count("leases_expired_total") == 0


def test_an_older_attempt_is_refused() -> None:
    """Attempt 0 is asked for when attempt 1 is known; attempt 1 is served."""
    with pair_of() as pair:
        prompt, decode = prompt_of(2), pair.decode.driver
        pair.prefill.driver.send_all(pair.send_request("r", prompt, attempt=1), [0, 1], TOKENS)
        kind, message = failure_of(pair)
        assert kind == "transfer_failed"
        assert "attempt 0 of transfer t-r is older than attempt 1" in message
        current = pair.fetch_request("r", prompt, attempt=1)
        decode.receiver.start_fetch(current)
        decode.wait_for(lambda: current.key in decode.published, "published")


def test_a_transfer_that_was_fetched_is_not_given_out_again() -> None:
    with pair_of() as pair:
        hand_over(pair, "r")
        kind, message = failure_of(pair)
        assert kind == "transfer_failed"
        assert "released" in message


def test_a_second_worker_cannot_fetch_what_another_fetches() -> None:
    with pair_of() as pair, worker(settings_for("d2", Role.DECODE)) as second:
        pair.prefill.driver.send_all(pair.send_request("r", prompt_of(2)), [0, 1], TOKENS)
        decode = pair.decode.driver
        decode.receiver.start_fetch(pair.fetch_request("r", prompt_of(2)))
        decode.wait_for(lambda: decode.published, "published")
        kind, message = failure_of(Pair(pair.prefill, second))
        assert (kind, message) == ("transfer_failed", "another worker fetches this transfer")


@pytest.mark.parametrize("when", ["before the fetch", "parked", "published", "complete"])
@pytest.mark.parametrize(("kind", "num_failures"), [(NOT_NEEDED, 0), ("internal", 1)])
def test_an_abandoned_transfer_is_reported_to_its_fetcher(when: str, kind: str, num_failures: int) -> None:
    """The answer ended early, by abort or by error, in each state: one Failed there, one finished_sending here."""
    with pair_of() as pair:
        prompt, prefill, decode = prompt_of(2), pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        if when == "parked":
            decode.receiver.start_fetch(fetch)
            decode.wait_for(lambda: pair.prefill.count("transfers_parked") == 1, "parked")
        prefill.sender.open_send(send, [0, 1], 0)
        if when in ("published", "complete"):
            decode.receiver.start_fetch(fetch)
            prefill.sender.publish(send.key, 4 if when == "published" else 8)
            prefill.step()
            decode.wait_for(lambda: decode.published, "published")
        if when == "complete":
            prefill.sender.finish_send(send.key, TOKENS)
        prefill.sender.abandon_send(send.key, kind, "no use")
        prefill.wait_for(lambda: prefill.sent, "sent")
        if when == "before the fetch":
            decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.failed, "failed")
        assert (decode.failed[fetch.key].kind, decode.failed[fetch.key].message) == (kind, "no use")
        assert pair.decode.count(f"transfer_failures_total{{kind={kind}}}") == num_failures
        prefill.sender.abandon_send(send.key, kind, "again")
        prefill.step()
        assert prefill.sent == [send.key]
        assert pair.prefill.count("leases_active") == 0
