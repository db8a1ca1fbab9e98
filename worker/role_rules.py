"""The rules that differ between the roles of workers. Everything else in ``worker/`` is the same for all of them.

``prefill_service/`` and ``decode_service/`` hold the rules of their role, and ``roles/`` those of aggregated workers and the
table of all. A worker gets the whole table when it starts, since each worker may be ordered to take another role
(``worker/flipping.py``).
"""

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from contract.identity import Role
from contract.membership import Credit
from contract.requests import EngineRequest
from engine.info import EngineInfo
from worker.settings import WorkerSettings


class LegCall(StrEnum):
    """The kinds of leg that a router orders on a worker's stream."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    EMBED = "Embed"


ReadLeg = Callable[[Any, Path], Awaitable[EngineRequest]]
"""(the order of a leg, the model's folder) → what the engine is asked to do. Raises KvbatonError to reject the leg."""


class RoleRules(Protocol):
    """The rules of one role.

    calls: the calls that the role serves, and how the order of each becomes an engine request.
    """

    @property
    def calls(self) -> Mapping[LegCall, ReadLeg]:
        """See RoleRules."""

    def credit(self, settings: WorkerSettings, info: EngineInfo) -> Credit:
        """Return the most work that a worker accepts at once in this role."""

    def has_mixed_kv(self, *, num_leases: int, num_fetches: int) -> bool:
        """Return whether KV moves in the direction that is not this role's, too (``worker/settling.py``)."""


Roles = Mapping[Role, RoleRules]
"""The rules of every role that a worker may have."""


def cache_credit(settings: WorkerSettings, info: EngineInfo) -> Credit:
    """Return the credit of a worker that only the size of its KV cache limits.

    A request of a model with recurrent layers needs a slot: further ones wait at the router, and not here.
    """
    max_requests = settings.max_num_seqs
    if info.states is not None:
        max_requests = min(max_requests, info.num_request_slots)
    kv_tokens = (info.num_blocks - 1) * info.layout.block_size  # block 0 is the null block
    return Credit(max_requests=max_requests, max_tokens=kv_tokens)
