"""Who a process is: its worker id, its boot id, its role, and how it proves that it belongs to this cluster."""

import hashlib
import hmac
import secrets
from enum import StrEnum

SECRET_BYTES = 32
MIN_SECRET_CHARACTERS = 32
"""Of a cluster secret. Whoever records one handshake can try shorter ones offline."""


class Role(StrEnum):
    """What a process is for. ``BOTH`` computes prompts and decodes them itself."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def new_boot_id() -> str:
    """A random name of one process start: a restarted worker on the same address is a stranger."""
    return secrets.token_hex(8)


def new_secret() -> str:
    """A fresh cluster secret, as hex."""
    return secrets.token_hex(SECRET_BYTES)


def proof(secret: str, purpose: str, *parts: str) -> str:
    """An HMAC-SHA256 over ``purpose`` and ``parts`` that only a holder of the secret can make."""
    message = "\x00".join((purpose, *parts)).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def proof_matches(secret: str, claimed: str, purpose: str, *parts: str) -> bool:
    """Compare a claimed proof in constant time."""
    return hmac.compare_digest(proof(secret, purpose, *parts).encode(), claimed.encode())
