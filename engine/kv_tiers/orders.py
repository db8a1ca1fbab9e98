"""The messages between an engine and the tiers of its ranks, each in the process of its rank (msgspec, never pickle).

Orders travel in a step, or in a call of their own, to all ranks alike. Each rank reports over a pipe of its own.
"""

import msgspec

from contract.block_hash import BlockHash
from engine.kv_tiers.storage import BlockCopy


class OpenedTier(msgspec.Struct, frozen=True):
    """A tier that a rank has opened; see ``TierStorage``."""

    name: str
    num_slots: int
    slot_bytes: int
    found: list[tuple[BlockHash, int]]
    outlives_engine: bool
    kind: str
    group: int = 0


class CopyOrder(msgspec.Struct, frozen=True, tag="copy"):
    """Copy blocks to slots of the tier with this name, or slots to blocks (is_load). number: of the order."""

    tier: str
    number: int
    copies: list[BlockCopy]
    is_load: bool


class CancelOrder(msgspec.Struct, frozen=True, tag="cancel"):
    """Do not begin a copy, unless it has begun. Its end is reported either way."""

    number: int


class ForgetOrder(msgspec.Struct, frozen=True, tag="forget"):
    """See ``TierStorage.forget``."""

    tier: str
    slots: list[int]


class RestartOrder(msgspec.Struct, frozen=True, tag="restart"):
    """See ``TierStorage.restart``."""

    tier: str
    model: str | None


TierOrder = CopyOrder | CancelOrder | ForgetOrder | RestartOrder


class CopyEnd(msgspec.Struct, frozen=True, tag="end"):
    """A copy is over on the rank. num_copied: from the first on; None if it was cancelled. error: of a bug."""

    number: int
    num_copied: int | None
    error: str | None = None


class TierFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank's tier is off from now on."""

    tier: str
    reason: str


TierReport = CopyEnd | TierFailed
