"""A ``nixl`` read needs no message of its sender: the port sends its description and one NixlResting, no more."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from contract.errors import KvbatonError
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.nixl.sender import MAX_NIXL_FRAME_BYTES, Help, NixlAsk, NixlResting
from tests.kv_transfer.nixl_port import NAME, NUM_BLOCKS, NixlPort, Reader, context_for

MAX_BUSY_CONNECTS = 5


@pytest.fixture
def port() -> Iterator[NixlPort]:
    made = NixlPort()
    made.publish(NAME, range(NUM_BLOCKS))
    yield made
    made.sender.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def test_a_read_needs_no_word_of_the_sender(port: NixlPort, reader: Reader) -> None:
    """On a busy machine the first read may be late and ask for help; then the reader connects again."""
    heard = list[Help]()
    has_left = threading.Event()

    def talk(connection: Connection) -> None:
        write_frame(connection.sock, port.sender.pool_info, MAX_NIXL_FRAME_BYTES)
        port.nixl_thread.tell(lambda driver: driver.serve(connection))
        with suppress(KvbatonError, OSError):  # it leaves
            while True:
                heard.append(read_frame(connection.sock, NixlAsk, MAX_NIXL_FRAME_BYTES).help)
                if heard[-1] is Help.BEGIN:
                    port.nixl_thread.tell(lambda driver: driver.serve(connection))
                    continue
                port.nixl_thread.tell(lambda driver: driver.rest(connection))
                if heard[-1] is Help.PAUSE:
                    write_frame(connection.sock, NixlResting(), MAX_NIXL_FRAME_BYTES)
        has_left.set()

    silent = DataPort(context_for("silent", port.sessions, []), "kv-silent", talk, transport="nixl")
    source = msgspec.structs.replace(port.source, address=silent.address)
    try:
        for _ in range(MAX_BUSY_CONNECTS):
            reader.fetch(source, range(4, NUM_BLOCKS), port.grants[NAME])
            if heard == [Help.PAUSE]:
                break
            reader.receiver.forget(source)
            assert has_left.wait(20)
            has_left.clear()
            heard.clear()
        for _ in range(2):
            reader.fetch(source, range(4, NUM_BLOCKS), port.grants[NAME])
        assert reader.holds(0, 5)
        reader.receiver.forget(source)
        assert has_left.wait(20)
    finally:
        silent.close()
    assert heard == [Help.PAUSE]
