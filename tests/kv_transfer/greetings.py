"""The greeting of a data connection, spoken over a blocking socket by a test that plays one end."""

import socket

from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.data_handshake import (
    MAX_DATA_FRAME_BYTES,
    DataChallenge,
    DataHello,
    DataProve,
    LenderProofs,
    ReaderProofs,
)
from kv_transfer.transports.leases import Sessions


def prove_reading(sock: socket.socket, source: Source) -> None:
    """Be the reader, up to its proof."""
    reading = ReaderProofs(source)
    write_frame(sock, reading.hello, MAX_DATA_FRAME_BYTES)
    challenge = read_frame(sock, DataChallenge, MAX_DATA_FRAME_BYTES)
    write_frame(sock, reading.prove(challenge), MAX_DATA_FRAME_BYTES)


def prove_lending(sock: socket.socket, token: str, transport: str) -> str:
    """Be the lender of the session with this token; returns the token that the reader has proved."""
    sessions = Sessions()
    sessions.begin(token)
    lending = LenderProofs(sessions, transport)
    challenge = lending.challenge(read_frame(sock, DataHello, MAX_DATA_FRAME_BYTES))
    write_frame(sock, challenge, MAX_DATA_FRAME_BYTES)
    return lending.check(read_frame(sock, DataProve, MAX_DATA_FRAME_BYTES))
