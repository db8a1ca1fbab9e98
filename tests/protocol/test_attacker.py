"""The handshake of the control link against an attacker on the wire, and what it finds where a rule is taken out."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ErrorKind, KvbatonError, UnauthenticatedError
from contract.proofs import derive_key, encode_fields, is_proof, make_proof
from kv_transfer.protocol.handshake import Accepting, Dialing, PeerTarget
from kv_transfer.protocol.messages import Challenge, Hello, Mac, Message, Prove, Refused, Welcome, mac_of
from tests.protocol.attacker import Attacker, identity_of

P = PeerTarget("p", "boot-p", "127.0.0.1:1")
FIELDS = st.lists(st.text(max_size=6) | st.binary(max_size=6) | st.integers(), max_size=6)


def test_no_side_accepts_what_no_honest_side_has_sent() -> None:
    """H3: forged, replayed, reflected and reordered messages open no session."""
    attacker = Attacker()
    assert (found := attacker.find_attack()) is None, str(found)
    assert attacker.num_deliveries > 1_000
    assert any(isinstance(side.half, Dialing) for side in attacker.completed), (
        "messages that it hands on get through"
    )
    tokens = {side.half.session.token for side in attacker.completed if side.half.session is not None}
    assert tokens
    assert not tokens & attacker.strings()


def without(kind: type[Message], *names: str) -> Mac:
    """Return a MAC that leaves these fields out."""

    def mac(key: bytes, label: str, messages: Sequence[Message]) -> str:
        covered = [
            b"".join(
                msgspec.msgpack.encode(getattr(message, name))
                for name in message.__struct_fields__
                if not (isinstance(message, kind) and name in names) and name != "proof"
                if getattr(message, name) is not msgspec.UNSET  # as in the message itself
            )
            for message in messages
        ]
        return make_proof(key, label, *covered)

    return mac


def joined_by(separator: str) -> Mac:
    """Return a MAC over the joined texts of the fields."""

    def mac(key: bytes, label: str, messages: Sequence[Message]) -> str:
        texts = [
            str(getattr(message, name))
            for message in messages
            for name in message.__struct_fields__
            if name != "proof"
        ]
        return make_proof(key, label, separator.join(texts))

    return mac


def up_to(kind: type[Message]) -> Mac:
    """Return a MAC that covers messages up to this kind only, as the first version's did."""

    def mac(key: bytes, label: str, messages: Sequence[Message]) -> str:
        last = max(
            (at for at, message in enumerate(messages) if isinstance(message, kind)), default=len(messages)
        )
        return mac_of(key, label, [*messages[: last + 1]])

    return mac


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Hello, ["worker_id"]),
        (Hello, ["boot_id"]),
        (Hello, ["role"]),
        (Hello, ["protocol_min"]),
        (Hello, ["protocol_max"]),
        (Hello, ["nonce"]),
        (Challenge, ["role"]),
        (Challenge, ["nonce"]),
        (Challenge, ["protocol_min"]),
        (Challenge, ["protocol_max"]),
        (Prove, ["model_fingerprint"]),
        (Prove, ["layout"]),
        (Prove, ["transports"]),
        (Prove, ["timeout_seconds"]),
        (Welcome, ["model_fingerprint"]),
        (Welcome, ["layout"]),
        (Welcome, ["offers"]),
        (Welcome, ["timeout_seconds"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "+".join(value),
)
def test_without_a_field_under_the_mac_the_attacker_finds_a_way(
    kind: type[Message], names: list[str]
) -> None:
    """H3: everything that is believed is under a MAC; every single field is needed there."""
    assert Attacker(without(kind, *names)).find_attack() is not None


@pytest.mark.parametrize("separator", ["", "/"])
def test_with_fields_that_are_only_joined_the_attacker_finds_a_way(separator: str) -> None:
    """H3: a MAC over joined texts covers other fields than those that were sent."""
    assert Attacker(joined_by(separator)).find_attack() is not None


def test_with_a_mac_over_the_hellos_only_the_attacker_finds_a_way() -> None:
    """H3: the offers in ``Welcome`` were under no MAC."""
    assert Attacker(up_to(Challenge)).find_attack() is not None


@given(st.text(max_size=3), FIELDS, st.text(max_size=3), FIELDS)
def test_no_two_lists_of_fields_have_one_encoding(
    label: str, fields: list[str | bytes | int], other_label: str, others: list[str | bytes | int]
) -> None:
    """H3: NUL-joined parts had one encoding for several lists."""
    typed = [(type(each), each) for each in fields]
    is_same = (label, typed) == (other_label, [(type(each), each) for each in others])
    assert (encode_fields(label, fields) == encode_fields(other_label, others)) is is_same


def test_marks_of_types_within_a_field_move_no_border() -> None:
    """H3: only lengths keep fields apart that hold what stands between fields."""
    assert encode_fields("x", ["as", "b"]) != encode_fields("x", ["a", "sb"])


@given(st.lists(st.text("\0ab", max_size=3), min_size=1, max_size=5), st.data())
def test_lists_that_were_one_when_joined_by_nul_differ_now(parts: list[str], data: st.DataObject) -> None:
    """H3: the attack on the first version, as a property: the same joined text, cut elsewhere."""
    pieces = "\0".join(parts).split("\0")
    at = data.draw(st.integers(1, len(pieces)))
    others = ["\0".join(pieces[:at]), *pieces[at:]]
    assert "\0".join(others) == "\0".join(parts)
    assert (encode_fields("x", others) == encode_fields("x", parts)) is (others == parts)


def test_keys_and_labels_are_apart() -> None:
    """H3: a proof for one purpose, or a key for it, is worth nothing for another."""
    keys = {
        derive_key("s", label, *context) for label in ("a", "b") for context in ((), ("c",), (b"c",), (1,))
    }
    assert len(keys) == 8
    key = keys.pop()
    proof = make_proof(key, "label", "x", 1)
    assert is_proof(key, proof, "label", "x", 1)
    assert not is_proof(key, proof, "label2", "x", 1)
    assert not is_proof(key, proof, "label", "x1")
    assert not is_proof(keys.pop(), proof, "label", "x", 1)
    assert not is_proof(key, "\udcff", "label", "x", 1)
    assert len(derive_key("s", "long", num_bytes=80)) == 80


def opened() -> tuple[Dialing, Accepting, list[Message]]:
    """Return a dialer and an acceptor after the hello, and the challenge."""
    dialer = Dialing(identity_of("d", "boot-d", "decode"), P)
    acceptor = Accepting(identity_of("p", "boot-p", "prefill"))
    return dialer, acceptor, acceptor.receive(dialer.begin()[0])


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_a_refusal_that_nobody_proved_says_only_that_there_is_no_link(kind: ErrorKind) -> None:
    """H3: a stranger's Refused could end a request with any kind of error and any text."""
    dialer, _, _ = opened()
    with pytest.raises(KvbatonError) as caught:
        dialer.receive(Refused(kind, "a\x1b[31m\nforged line" * 100))
    assert caught.value.kind in {ErrorKind.UNAUTHENTICATED, ErrorKind.INCOMPATIBLE}
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500


def test_a_refusal_that_is_proved_keeps_its_kind_and_no_other_session_takes_it() -> None:
    """H3: also the last message of a handshake is under a MAC."""
    dialer, acceptor, challenge = opened()
    dialer.receive(challenge[0])
    refused = acceptor.refusal(KvbatonError("bug"))
    other, _, other_challenge = opened()
    other.receive(other_challenge[0])
    with pytest.raises(UnauthenticatedError):
        other.receive(refused)
    with pytest.raises(KvbatonError) as caught:
        dialer.receive(msgspec.structs.replace(refused, message="forged"))
    assert caught.value.kind is ErrorKind.UNAUTHENTICATED


@pytest.mark.parametrize(
    "name", ["", "a\0b", "a\nb", "a\x1b[0m", "\u202edlrow", "\u2028", "\ud800", "x" * 256]
)
@pytest.mark.parametrize("field", ["worker_id", "boot_id"])
def test_an_id_with_control_characters_is_refused(name: str, field: str) -> None:
    """H3: a role with NULs shifted the fields; L1: an id is written into logs as it is."""
    hello = Dialing(identity_of("d", "boot-d", "decode"), P).begin()[0]
    acceptor = Accepting(identity_of("p", "boot-p", "prefill"))
    with pytest.raises(UnauthenticatedError, match="invalid") as caught:
        acceptor.receive(msgspec.structs.replace(hello, **{field: name}))
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("role", ["router", "decode\0", "", "admin"])
def test_a_role_that_no_worker_has_is_refused(role: str) -> None:
    """H3: a role with NULs shifted the fields."""
    hello = Dialing(identity_of("d", "boot-d", "decode"), P).begin()[0]
    with pytest.raises(UnauthenticatedError, match="workers are both, decode, prefill"):
        Accepting(identity_of("p", "boot-p", "prefill")).receive(msgspec.structs.replace(hello, role=role))


def test_another_worker_with_the_same_boot_id_is_not_the_one_that_was_asked_for() -> None:
    """H3: worker_id was not compared."""
    dialer = Dialing(identity_of("d", "boot-d", "decode"), P)
    challenge = Accepting(identity_of("other", "boot-p", "prefill")).receive(dialer.begin()[0])
    with pytest.raises(KvbatonError, match="boot boot-p of worker other answers there"):
        dialer.receive(challenge[0])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_out_of_range_is_refused(seconds: float) -> None:
    """H3: what is believed is in range, too."""
    me = identity_of("d", "boot-d", "decode")
    unchecked = me.settings.model_copy(update={"peer_timeout_seconds": seconds})
    dialer = Dialing(replace(me, settings=unchecked), P)
    acceptor = Accepting(identity_of("p", "boot-p", "prefill"))
    prove = dialer.receive(acceptor.receive(dialer.begin()[0])[0])
    with pytest.raises(KvbatonError, match="timeout_seconds"):
        acceptor.receive(prove[0])
