"""Unauthenticated connections on a worker's real sockets: forged, replayed, reflected and reordered messages are refused."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from contract.errors import KvbatonError, PeerUnreachableError, UnauthenticatedError
from contract.identity import Role
from kv_transfer.links.framing import FrameBuffer, encode_frame, parse_address, read_frame, write_frame
from kv_transfer.protocol.handshake import Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import (
    MAX_HANDSHAKE_BYTES,
    Challenge,
    FetchBlocks,
    Hello,
    Message,
    Prove,
    Refused,
    Welcome,
    decode_message,
)
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.data_handshake import (
    MAX_DATA_FRAME_BYTES,
    DataChallenge,
    DataHello,
    DataProve,
    DataStatus,
    LenderProofs,
    ReaderProofs,
)
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.shm.sender import ShmSender
from kv_transfer.transports.tcp.transport import TcpSender
from tests.kv_transfer.builders import (
    LAYOUT,
    MODEL,
    SECRET,
    hand_over,
    identity_for,
    pair_of,
    settings_for,
    worker,
)
from tests.kv_transfer.fakes import context_of

TOKEN, WAIT = "the token of a session", 30.0


class Lender:
    """A data port or the socket of shm, with one session."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport, self.sessions = transport, Sessions()
        self.sessions.begin(TOKEN)
        context = context_of("boot", self.sessions, shm_dir=folder)
        self.sender = TcpSender(context) if transport == "tcp" else ShmSender(context)
        self.source = Source("p", "boot", self.sender.address, TOKEN, transport)

    @contextmanager
    def dialed(self) -> Iterator[socket.socket]:
        """Open a silent connection."""
        is_unix = self.transport == "shm"
        with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.settimeout(WAIT)
            sock.connect(self.source.address if is_unix else parse_address(self.source.address))
            yield sock


@pytest.fixture(params=["tcp", "shm"])
def lender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lender]:
    """Return a lender of each transport."""
    found = Lender(request.param, tmp_path)
    try:
        yield found
    finally:
        found.sender.close()


def is_let_in(sock: socket.socket) -> bool:
    """Return whether anything follows the proof but the end of the connection."""
    try:
        return bool(sock.recv(1))
    except ConnectionError:
        return False


def challenged(sock: socket.socket, hello: DataHello) -> DataChallenge:
    write_frame(sock, hello, MAX_DATA_FRAME_BYTES)
    return read_frame(sock, DataChallenge, MAX_DATA_FRAME_BYTES)


def test_an_honest_reader_is_let_in(lender: Lender) -> None:
    reading = ReaderProofs(lender.source)
    with lender.dialed() as sock:
        prove = reading.prove(challenged(sock, reading.hello))
        assert TOKEN not in str((reading.hello, prove))
        write_frame(sock, prove, MAX_DATA_FRAME_BYTES)
        assert is_let_in(sock)


def replayed(lender: Lender) -> tuple[DataHello, DataProve]:
    """Return what an honest reader has sent on a connection of its own."""
    reading = ReaderProofs(lender.source)
    with lender.dialed() as sock:
        prove = reading.prove(challenged(sock, reading.hello))
        write_frame(sock, prove, MAX_DATA_FRAME_BYTES)
        assert is_let_in(sock)
    return reading.hello, prove


def test_a_replayed_greeting_is_refused(lender: Lender) -> None:
    """H4: a token that was seen once was good for ever; now a proof covers both ends' nonces."""
    hello, prove = replayed(lender)
    with lender.dialed() as sock:
        assert challenged(sock, hello).status is DataStatus.OK
        write_frame(sock, prove, MAX_DATA_FRAME_BYTES)
        assert not is_let_in(sock)


def test_the_lenders_own_proof_sent_back_is_refused(lender: Lender) -> None:
    """H3: the directions are under different labels."""
    with lender.dialed() as sock:
        challenge = challenged(sock, ReaderProofs(lender.source).hello)
        write_frame(sock, DataProve(challenge.proof), MAX_DATA_FRAME_BYTES)
        assert not is_let_in(sock)


@pytest.mark.parametrize("proof", ["", "0" * 64, "\udcff".encode("utf-8", "replace").decode(), "x" * 10_000])
def test_a_forged_proof_is_refused(lender: Lender, proof: str) -> None:
    """H3: on the data ports, too."""
    with lender.dialed() as sock:
        challenged(sock, ReaderProofs(lender.source).hello)
        write_frame(sock, DataProve(proof), MAX_DATA_FRAME_BYTES)
        assert not is_let_in(sock)


def test_a_proof_for_another_transport_or_another_session_is_refused(lender: Lender) -> None:
    """H3: a proof is bound to its session and its transport."""
    other = "shm" if lender.transport == "tcp" else "tcp"
    lender.sessions.begin("another session's token")
    for source in (
        msgspec.structs.replace(lender.source, transport=other),
        msgspec.structs.replace(lender.source, token="no session's token"),
    ):
        with lender.dialed() as sock:
            challenge = challenged(sock, ReaderProofs(source).hello)
            assert (challenge.status, challenge.proof) == (DataStatus.DENIED, "")
            assert not is_let_in(sock)
    with lender.dialed() as sock:
        hello = ReaderProofs(lender.source).hello
        mine = ReaderProofs(msgspec.structs.replace(lender.source, token="another session's token"))
        challenge = challenged(sock, hello)
        with pytest.raises(PeerUnreachableError):
            mine.prove(challenge)


@pytest.mark.parametrize("first", [DataProve("0" * 64), DataChallenge(DataStatus.OK), DataProve("")])
def test_another_order_is_refused(lender: Lender, first: DataProve | DataChallenge) -> None:
    """H3: no message is accepted out of turn."""
    with lender.dialed() as sock:
        write_frame(sock, first, MAX_DATA_FRAME_BYTES)
        assert not is_let_in(sock)


def test_a_rogue_that_listens_at_the_lenders_address_is_given_nothing() -> None:
    """H4: a process that listened at a data port was handed the session's token."""
    honest = Sessions()
    honest.begin(TOKEN)
    source = Source("p", "boot", "127.0.0.1:1", TOKEN, "tcp")
    reading = ReaderProofs(source)
    guess = Sessions()
    guess.begin("a guess")
    recorded = LenderProofs(honest, "tcp").challenge(ReaderProofs(source).hello)
    for challenge in (
        DataChallenge(DataStatus.OK, nonce="n", proof="0" * 64),
        DataChallenge(DataStatus.OK, nonce=reading.hello.nonce, proof=reading.hello.session),
        recorded,
        LenderProofs(guess, "tcp").challenge(
            ReaderProofs(msgspec.structs.replace(source, token="a guess")).hello
        ),
    ):
        with pytest.raises(PeerUnreachableError, match="does not hold this session's token"):
            reading.prove(challenge)
    with pytest.raises(PeerUnreachableError, match="refused a data connection: so"):
        reading.prove(DataChallenge(DataStatus.DENIED, "so"))
    with pytest.raises(UnauthenticatedError):
        LenderProofs(honest, "tcp").check(DataProve(""))


class Wire:
    """A connection to a control port by hand."""

    def __init__(self, address: str) -> None:
        self.sock = socket.create_connection(parse_address(address), timeout=WAIT)
        self._frames = FrameBuffer(MAX_HANDSHAKE_BYTES)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.sock.sendall(encode_frame(message, MAX_HANDSHAKE_BYTES))

    def hear(self) -> list[Message]:
        """Return everything up to the next pause; empty if the link was closed."""
        while data := self.sock.recv(65536):
            found = [decode_message(body) for body in self._frames.feed(data)]
            if found:
                return found
        return []


def identity(worker_id: str, secret: str = SECRET) -> LocalIdentity:
    return identity_for(worker_id, Role.DECODE, secret=secret)


def shifted(hello: Hello) -> Hello:
    """Return fields of the attacker's choice whose text equals that of ``hello`` when joined by NUL."""
    return msgspec.structs.replace(hello, role=f"{hello.role}\x008\x008\x00nonce\x00p\x00boot\x00prefill")


ATTACKS: dict[str, Callable[[Hello, Challenge], list[Message]]] = {
    "a guess": lambda _hello, _challenge: [Prove("0" * 64, MODEL, LAYOUT, ["tcp"], WAIT)],
    "reflected": lambda _hello, challenge: [Prove(challenge.proof, MODEL, LAYOUT, ["tcp"], WAIT)],
    "a second hello": lambda hello, _challenge: [hello],
    "its own challenge": lambda _hello, challenge: [challenge],
    "a welcome": lambda _hello, _challenge: [Welcome(8, MODEL, LAYOUT, [], WAIT)],
    "a transfer": lambda _hello, _challenge: [FetchBlocks("t", 0)],
    "a refusal": lambda _hello, _challenge: [Refused("internal", "\x1b[31mforged")],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_stranger_on_the_control_port_opens_no_link(attack: str) -> None:
    """H3: forged, reflected and reordered messages, over TCP."""
    with pair_of() as pair:
        address = pair.prefill.driver.address
        boot_id = pair.prefill.settings.boot_id
        hello = Dialing(identity("evil", "x" * 40), PeerTarget("p", boot_id, address)).begin()[0]
        assert isinstance(hello, Hello)
        wire = Wire(address)
        wire.say(hello)
        (challenge,) = wire.hear()
        assert isinstance(challenge, Challenge)
        wire.say(*ATTACKS[attack](hello, challenge))
        answers = wire.hear()
        assert [type(answer) for answer in answers] in ([], [Refused])
        assert wire.hear() == []
        wire.sock.close()
        hand_over(pair, "after")


def test_a_hello_whose_fields_run_into_each_other_gets_no_challenge() -> None:
    """H3: a role with NULs shifted the fields under the acceptor's proof."""
    with worker(settings_for("p", Role.PREFILL)) as prefill:
        address = prefill.driver.address
        hello = Dialing(identity("evil"), PeerTarget("p", "boot", address)).begin()[0]
        assert isinstance(hello, Hello)
        wire = Wire(address)
        wire.say(shifted(hello))
        (refused,) = wire.hear()
        assert isinstance(refused, Refused)
        assert "workers are both, decode, prefill" in refused.message
        wire.sock.close()


def test_a_whole_recorded_link_that_is_replayed_opens_none() -> None:
    """H3: the acceptor's nonce is under the dialer's proof."""
    with worker(settings_for("p", Role.PREFILL)) as prefill:
        address, boot_id = prefill.driver.address, prefill.settings.boot_id
        dialer = Dialing(identity("d"), PeerTarget("p", boot_id, address))
        first = Wire(address)
        hello = dialer.begin()
        first.say(*hello)
        prove = dialer.receive(first.hear()[0])
        first.say(*prove)
        assert isinstance(first.hear()[0], Welcome)
        second = Wire(address)
        second.say(*hello, *prove)
        heard = [*second.hear(), *second.hear(), *second.hear()]
        assert [type(message) for message in heard] == [Challenge, Refused]
        for wire in (first, second):
            wire.sock.close()


def test_a_rogue_at_the_address_of_a_dead_worker_is_told_nothing_about_the_model() -> None:
    """H3: its answers are refused, whatever honest worker it relays to for proofs."""
    with (
        worker(settings_for("q", Role.PREFILL)) as other,
        socket.create_server(("127.0.0.1", 0)) as rogue,
    ):
        target = PeerTarget("p", "boot-p", "the rogue")
        dialer = Dialing(identity("d"), target)
        received: list[bytes] = []

        def relay() -> None:
            """Forward everything to an honest worker, and its answer back."""
            with rogue.accept()[0] as sock:
                received.append(sock.recv(65536))
                wire = Wire(other.driver.address)
                wire.sock.sendall(received[0])
                sock.sendall(encode_frame(wire.hear()[0], MAX_HANDSHAKE_BYTES))
                received.append(sock.recv(65536))
                wire.sock.close()

        thread = threading.Thread(target=relay)
        thread.start()
        wire = Wire(f"127.0.0.1:{rogue.getsockname()[1]}")
        wire.say(*dialer.begin())
        with pytest.raises(KvbatonError, match="the one that was asked for is gone"):
            dialer.receive(wire.hear()[0])
        wire.sock.close()
        thread.join()
        assert MODEL.encode() not in b"".join(received)
