"""The messages that both sides of a control link have sent, and the proofs over them.

Every proof covers every field of every message up to itself, in order, under a label that names its message. So a proof is
valid in one place of one session only: it cannot be replayed, reflected, moved to another message, or completed with other
fields. Both sides also derive the session's token from all messages.
"""

import hmac
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from contract.errors import KvbatonError
from contract.proofs import derive_key, make_proof
from kv_transfer.protocol.messages import Challenge, Message, Prove, Refused, Welcome

Mac = Callable[[bytes, str, Sequence[Message]], str]
"""(key, label, messages) → MAC."""
_P = TypeVar("_P", Challenge, Prove, Welcome, Refused)


def mac_of(key: bytes, label: str, messages: Sequence[Message]) -> str:
    """Compute production's MAC, over all fields of all messages."""
    return make_proof(key, label, *map(msgspec.msgpack.encode, messages))


class Transcript:
    """Owns the messages of one handshake, on one side. mac: tests pass weak ones to show what they cost."""

    def __init__(self, secret: str, mac: Mac = mac_of) -> None:
        self._key = derive_key(secret, "control link")
        self._mac = mac
        self._messages: list[Message] = []

    def add(self, message: Message) -> None:
        """Cover this message by every later proof."""
        self._messages.append(message)

    def proved(self, label: str, message: _P) -> _P:
        """Return the message with its proof: over all that was added, and the rest of it."""
        return replace(message, proof=self._proof(label, message))

    def is_proved(self, label: str, message: _P) -> bool:
        """Compare the message's proof, in constant time."""
        return hmac.compare_digest(
            self._proof(label, message).encode(), message.proof.encode("utf-8", "replace")
        )

    def refusal(self, label: str, error: KvbatonError) -> Refused:
        """Return the proved refusal that carries ``error``."""
        return self.proved(label, Refused(error.kind, error.message))

    def token(self) -> str:
        """Derive the session's token, which is never sent on the link."""
        return self._mac(self._key, "session token", self._messages)

    def _proof(self, label: str, message: Challenge | Prove | Welcome | Refused) -> str:
        return self._mac(self._key, label, [*self._messages, replace(message, proof="")])
