"""The facts with which a worker registers at its router."""

from dataclasses import dataclass
from importlib.metadata import version

from contract.identity import Role
from contract.membership import Registration
from engine.client import EngineClient
from protos import WORKER_PROTOCOL_MAX, WORKER_PROTOCOL_MIN
from serving.admin import process_identity
from serving.settings import first_listed
from worker.settings import WorkerSettings


@dataclass(frozen=True)
class WorkerIdentity:
    """The role in which a worker starts, its name in the cluster, and the id of this process start."""

    role: Role
    worker_id: str
    boot_id: str


def registration_of(
    identity: WorkerIdentity,
    settings: WorkerSettings,
    engine: EngineClient,
    address: str,
    admin_address: str,
) -> Registration:
    """Return the facts with which a worker registers at its router."""
    info = engine.info
    # A longer prompt is ignored there (prefill-first), so no client may take it for possible.
    max_model_len = min(info.max_model_len, settings.max_prompt_tokens or info.max_model_len)
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
        max_model_len=max_model_len,
        # Where each layer has a window, a text of any length has room: then the pool is no limit.
        num_blocks=0 if info.groups and info.groups[0].window is not None else info.num_blocks,
        vocab_size=info.vocab_size,
        admin_address=admin_address,
        embeds_only=not info.has_head,
        build=version("kvbaton"),
        # Where its coordinator is: the same for all ranks, and for no other group.
        group=settings.data_parallel_address or "" if settings.data_parallel_size > 1 else "",
        group_size=settings.data_parallel_size if settings.data_parallel_size > 1 else 0,
        **process_identity(settings.num_restarts),
    )
