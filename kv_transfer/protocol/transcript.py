"""What both sides of a control link have said, and the proofs over it.

Every proof covers every field of every message up to itself, in the order in which they were said, under a label that names
its message. So a proof is good in one place of one session only: it cannot be replayed, reflected, moved to another
message, or completed with other fields. Both sides also derive the session's token from the whole of it.
"""

import hmac
from collections.abc import Callable, Sequence

import msgspec

from contract.proofs import derive_key, make_proof
from kv_transfer.protocol.messages import Challenge, Message, Prove, Refused, Welcome

Mac = Callable[[bytes, str, Sequence[Message]], str]
"""A MAC by a key and a label over messages."""
_P = Challenge | Prove | Welcome | Refused


def mac_of(key: bytes, label: str, messages: Sequence[Message]) -> str:
    """Return the MAC that production uses: over all fields of all messages."""
    return make_proof(key, label, *map(msgspec.msgpack.encode, messages))


class Transcript:
    """Owns the messages of one handshake, on one side. mac: another one is for tests that show what a weak one costs."""

    def __init__(self, secret: str, mac: Mac = mac_of) -> None:
        self._key = derive_key(secret, "control link")
        self._mac = mac
        self._said: list[Message] = []

    def add(self, message: Message) -> None:
        """Cover this message by everything that follows."""
        self._said.append(message)

    def proof(self, label: str, message: _P) -> str:
        """Return the proof that belongs into ``message``: over all that was added, and the rest of it."""
        return self._mac(self._key, label, [*self._said, msgspec.structs.replace(message, proof="")])

    def is_proved(self, label: str, message: _P) -> bool:
        """Whether the message carries its proof. Takes as long for every wrong one."""
        return hmac.compare_digest(
            self.proof(label, message).encode(), message.proof.encode("utf-8", "replace")
        )

    def token(self) -> str:
        """Return the session's token, which is never sent on the link."""
        return self._mac(self._key, "session token", self._said)
