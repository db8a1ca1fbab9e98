"""The identity of a process: its worker id, its boot id, and its role."""

import secrets
from enum import StrEnum

from contract.errors import InvalidRequestError

SECRET_BYTES = 32
MIN_SECRET_CHARACTERS = 32
"""Minimum length of a cluster secret: a shorter one could be guessed offline from a recorded handshake."""
MAX_NAME_CHARACTERS = 255


class Role(StrEnum):
    """The role of a process. ``AGGREGATED`` computes prompts and decodes them itself."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "both"


WORKER_ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
"""The roles that a worker may have."""


def worker_role(name: str) -> Role:
    """Return the role with this name. Raises InvalidRequestError if no worker may have it."""
    if name not in WORKER_ROLES:
        raise InvalidRequestError(
            f"role is {name[:40]!r}; choose one of {', '.join(WORKER_ROLES)}", param="role"
        )
    return Role(name)


def new_boot_id() -> str:
    """Return a random id for one process start, by which a restarted worker at the same address is recognized."""
    return secrets.token_hex(8)


def new_secret() -> str:
    """Return a new cluster secret, as hex."""
    return secrets.token_hex(SECRET_BYTES)


def why_no_name(name: str) -> str | None:
    """Return why this cannot be a worker id or boot id; None if it can.

    A name is 1 to MAX_NAME_CHARACTERS printable characters: no control characters, line ends, or marks that change the
    direction of text, so that it can be written to logs and addresses unchanged.
    """
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"it has {len(name)} characters; the limit is {MAX_NAME_CHARACTERS}"
    if not name.isprintable():
        return "it contains a control character"
    return None
