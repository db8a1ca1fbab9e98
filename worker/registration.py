"""The facts that a worker sends to its router: what it is, and how much work it takes at once."""

from dataclasses import dataclass
from importlib.metadata import version

from contract.identity import Role
from contract.membership import Credit, Registration
from engine.client import EngineClient
from protos import WORKER_PROTOCOL_MAX, WORKER_PROTOCOL_MIN
from serving.process_facts import process_identity
from serving.settings import first_listed
from worker.settings import WorkerSettings

_QUEUED_STEPS = 2
"""Steps full of prompt tokens that a prefill worker accepts in advance, so that it never waits for the router."""


@dataclass(frozen=True)
class WorkerIdentity:
    """The role in which a worker starts, its name in the cluster, and the id of this process start."""

    role: Role
    worker_id: str
    boot_id: str


def credit_of(role: Role, settings: WorkerSettings, engine: EngineClient) -> Credit:
    """Return the most work that the worker accepts at once in this role.

    A prefill worker is limited by its queue of prompt tokens; every worker by the size of its KV cache.
    """
    info = engine.info
    kv_tokens = (info.num_blocks - 1) * info.layout.block_size
    queued = settings.max_queued_tokens or _QUEUED_STEPS * settings.max_num_batched_tokens
    is_prefill = role is Role.PREFILL
    return Credit(
        max_requests=settings.max_num_seqs, max_tokens=min(queued, kv_tokens) if is_prefill else kv_tokens
    )


def registration_of(
    identity: WorkerIdentity,
    settings: WorkerSettings,
    engine: EngineClient,
    address: str,
    admin_address: str,
) -> Registration:
    """Return the facts with which a worker registers at its router."""
    info = engine.info
    return Registration(
        protocol_min=WORKER_PROTOCOL_MIN,
        protocol_max=WORKER_PROTOCOL_MAX,
        worker_id=identity.worker_id,
        boot_id=identity.boot_id,
        role=identity.role.value,
        address=address,
        control_address=info.control_address,
        model_name=first_listed(settings.served_model_name) or settings.model.name,
        model_fingerprint=info.model_fingerprint,
        kv_layout=info.side.whole,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        vocab_size=info.vocab_size,
        admin_address=admin_address,
        embeds_only=not info.has_head,
        build=version("kvbaton"),
        **process_identity(settings.num_restarts),
    )
