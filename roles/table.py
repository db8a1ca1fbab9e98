"""The table of all roles, and the stages of their transfers: above their folders, which do not import each other."""

from types import MappingProxyType

from contract.identity import Role
from decode_service.kv_receiver import KVReceiver
from decode_service.rules import DecodeRules
from engine.scheduling.remote_kv import TransferStages
from prefill_service.kv_sender import KVSender
from prefill_service.rules import PrefillRules
from worker.role_rules import LegCall, Roles


class AggregatedRules(DecodeRules):
    """Fulfils ``RoleRules``: a worker that computes prompts and decodes them itself, and embeds texts too.

    Its decode legs have no source.
    """

    calls = MappingProxyType({**DecodeRules.calls, LegCall.EMBED: PrefillRules.calls[LegCall.EMBED]})


ROLES: Roles = MappingProxyType(
    {
        Role.PREFILL: PrefillRules(),
        Role.DECODE: DecodeRules(),
        Role.AGGREGATED: AggregatedRules(),
    }
)

STAGES = TransferStages(KVSender, KVReceiver)
"""Every engine with a connector has both: its worker may take the other role, and decode workers hand answers off."""
