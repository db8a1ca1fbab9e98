"""Who a process is: its worker id, its boot id, and its role."""

import secrets
from enum import StrEnum

SECRET_BYTES = 32
MIN_SECRET_CHARACTERS = 32
"""Of a cluster secret. Whoever records one handshake can try shorter ones offline."""
MAX_NAME_CHARACTERS = 255


class Role(StrEnum):
    """What a process is for. ``AGGREGATED`` computes prompts and decodes them itself."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "both"


def new_boot_id() -> str:
    """A random name of one process start: a restarted worker on the same address is a stranger."""
    return secrets.token_hex(8)


def new_secret() -> str:
    """A fresh cluster secret, as hex."""
    return secrets.token_hex(SECRET_BYTES)


def why_no_name(name: str) -> str | None:
    """Return why this cannot name a worker or a start of it, None for a good name.

    A name is 1 to MAX_NAME_CHARACTERS printable characters: no control characters, line ends, or marks that change the
    direction of text, so that it can stand in logs and addresses as it is.
    """
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"it has {len(name)} characters; the limit is {MAX_NAME_CHARACTERS}"
    if not name.isprintable():
        return "it holds a control character"
    return None
