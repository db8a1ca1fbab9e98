"""Settings, names of transports, and the factory that crosses into the engine's process."""

import subprocess
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, get_args

import pytest

from contract.addresses import join_address
from contract.errors import SettingError, TransferError
from contract.identity import Role
from kv_transfer.connector import TransferFactory
from kv_transfer.links.framing import HEADER, FrameBuffer, encode_frame, parse_address
from kv_transfer.options import TransportName
from kv_transfer.protocol.reads import LeaseName, ReadRequest
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.registry import open_transport, transport_names
from kv_transfer.transports.transport import AUTO
from tests.kv_transfer.builders import SECRET, settings_for
from tests.kv_transfer.fakes import CorruptingReceiver


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transport": "pigeon"}, "transport is 'pigeon': .*, allowed: auto, shm, nixl, nccl, tcp$"),
        ({"lease_seconds": 0.0}, "lease_seconds is 0.0: .*, allowed: above 0$"),
        ({"parked_seconds": -1.0}, "parked_seconds is -1.0"),
        ({"peer_timeout_seconds": 0.0}, "peer_timeout_seconds is 0.0"),
        ({"control_port": 70000}, "control_port is 70000: .*, allowed: at least 0, at most 65535$"),
        ({"secret": ""}, r"secret is \*\*\*: String should have at least 1 character"),
        ({"max_frame_bytes": 10}, "max_frame_bytes is 10"),
        ({"max_staging_bytes": 0}, "max_staging_bytes is 0: .*, allowed: at least 1$"),
        ({"host": "0.0.0.0"}, "set advertise_host too"),
        ({"role": Role.ROUTER}, "role is router"),
    ],
)
def test_a_bad_setting_names_itself_and_its_range(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        settings_for("p", **{"role": Role.PREFILL, **changes})
    assert caught.value.param in changes


def test_the_secret_is_not_printed() -> None:
    assert SECRET not in repr(settings_for("p", Role.PREFILL))


def test_a_setting_that_is_missing_is_named_and_the_others_are_not_shown() -> None:
    """Pydantic's error for a missing value contains all given values, the secret among them."""
    given: dict[str, Any] = {"worker_id": "p", "role": Role.PREFILL, "secret": SECRET}
    with pytest.raises(SettingError, match=r"^boot_id is not set$") as caught:
        TransferSettings(**given)
    assert caught.value.param == "boot_id"


def test_a_wrong_transport_name_gets_the_right_ones() -> None:
    context: Any = None
    with pytest.raises(SettingError, match="choose one of shm, nixl, nccl, tcp"):
        open_transport("pigeon", context)
    assert transport_names() == ("shm", "nixl", "nccl", "tcp")


def test_a_user_may_choose_every_transport_that_crosses_processes() -> None:
    """One list: what ``--transport`` takes is ``auto`` and the registry's names."""
    assert get_args(TransportName) == (AUTO, *transport_names())


def test_the_factory_survives_the_way_into_a_spawned_process() -> None:
    """It can be pickled like the arguments of a spawned process."""
    decorate = partial(CorruptingReceiver, block_index=3)
    factory = TransferFactory(settings_for("p", Role.PREFILL, decorate=decorate))
    rebuilt = ForkingPickler.loads(ForkingPickler.dumps(factory))
    assert rebuilt.settings.boot_id == factory.settings.boot_id
    assert rebuilt.settings.decorate.keywords == {"block_index": 3}


def test_torch_is_not_imported() -> None:
    """The whole package works beside a pool that is not a tensor."""
    code = "import sys, kv_transfer.connector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_frames_come_out_whole_however_they_arrive() -> None:
    frames = encode_frame([1, 2], 100) + encode_frame("x" * 50, 100)
    buffer = FrameBuffer(100)
    found = [
        frame for position in range(len(frames)) for frame in buffer.feed(frames[position : position + 1])
    ]
    assert [len(frame) for frame in found] == [3, 52]


def test_a_frame_over_the_bound_is_refused_on_both_sides() -> None:
    with pytest.raises(TransferError, match="the limit is 10"):
        encode_frame("x" * 50, 10)
    with pytest.raises(TransferError, match="the limit is 10"):
        list(FrameBuffer(10).feed(encode_frame("x" * 50, 100)))


@pytest.mark.parametrize("bit", range(8 * (HEADER.size + 3)))
def test_no_damaged_frame_is_understood(bit: int) -> None:
    """The first token travels in such a frame: TCP's own checksum does not detect everything."""
    frame = bytearray(encode_frame([1, 2], 100))
    frame[bit // 8] ^= 1 << bit % 8
    understood: list[bytes] = []
    with suppress(TransferError):  # too long a length only waits for bytes that never come
        understood += FrameBuffer(100).feed(bytes(frame))
    assert not understood


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:9", ("::1", 9)), ("pod.svc:1", ("pod.svc", 1))],
)
def test_addresses_survive_a_round_trip(text: str, parts: tuple[str, int]) -> None:
    assert parse_address(text) == parts
    assert join_address(*parts) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:99999", "host:1x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(TransferError, match="host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("block_bytes", "sizes"),
    [(16, [256, 256, 88]), (2**18, [16] * 37 + [8]), (2**19, [8] * 75), (2**30, [1] * 600)],
)
def test_reads_are_cut_into_pieces(block_bytes: int, sizes: list[int]) -> None:
    """At most 256 blocks and 4 MiB a piece, and at least one block."""
    pieces = list(ReadRequest(LeaseName("t", 0, "l"), 5, 600).pieces(block_bytes))
    assert [piece.num_blocks for _, piece in pieces] == sizes
    assert [block for _, piece in pieces for block in range(piece.first_block, piece.end_block)] == list(
        range(5, 605)
    )
    assert all(5 + start == piece.first_block for start, piece in pieces)
