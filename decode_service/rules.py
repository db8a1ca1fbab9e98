"""The rules of the decode role."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from contract.membership import Credit
from contract.requests import EngineRequest
from engine.info import EngineInfo
from protos import worker_pb2 as pb
from wire.legs import decode_from_proto
from worker.role_rules import LegCall, ReadLeg, cache_credit
from worker.settings import WorkerSettings


async def read_decode(leg: pb.DecodeRequest, _: Path) -> EngineRequest:
    """Return the request that fetches a prompt's KV and decodes; one without a source computes the prompt itself.

    Raises InvalidRequestError for a bad order.
    """
    return decode_from_proto(leg)


class DecodeRules:
    """Fulfils ``RoleRules``: this role continues answers whose prompts another worker computes."""

    calls: Mapping[LegCall, ReadLeg] = MappingProxyType({LegCall.DECODE: read_decode})

    def credit(self, settings: WorkerSettings, info: EngineInfo) -> Credit:
        """See RoleRules. An answer keeps its blocks until it ends, so that only the KV cache limits it."""
        return cache_credit(settings, info)

    def has_mixed_kv(self, *, num_leases: int, num_fetches: int) -> bool:
        """See RoleRules. This role fetches, so that a lease is left from the former one, or from a drain."""
        return num_leases > 0
