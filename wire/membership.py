"""Converts the messages between a worker and its router about themselves: registration, acceptance, load and credit."""

from typing import Literal, get_args

from contract.layout import KVLayout
from contract.membership import Credit, CreditUse, DrainOrder, Load, Registration, RoleOrder, Welcome
from protos import worker_pb2 as pb
from wire.numbers import check_numbers

_LoadFigure = Literal[
    "queued_prompt_tokens",
    "num_free_blocks",
    "num_leases",
    "num_fetches",
    "prefill_seconds_per_token",
    "step_seconds",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "gpu_used_bytes",
    "gpu_bytes",
]
_OPTIONAL_LOAD: tuple[_LoadFigure, ...] = get_args(_LoadFigure)


def registration_to_proto(registration: Registration) -> pb.Registration:
    """Translate a worker's registration."""
    return pb.Registration(
        protocol_min=registration.protocol_min,
        protocol_max=registration.protocol_max,
        worker_id=registration.worker_id,
        boot_id=registration.boot_id,
        role=registration.role,
        address=registration.address,
        control_address=registration.control_address,
        model_name=registration.model_name,
        model_fingerprint=registration.model_fingerprint,
        kv_layout=None if registration.kv_layout is None else layout_to_proto(registration.kv_layout),
        max_model_len=registration.max_model_len,
        num_blocks=registration.num_blocks,
        vocab_size=registration.vocab_size,
        admin_address=registration.admin_address,
        pid=registration.pid,
        embeds_only=registration.embeds_only,
        build=registration.build,
        host=registration.host,
        age_seconds=registration.age_seconds,
        num_restarts=registration.num_restarts,
    )


def registration_from_proto(message: pb.Registration) -> Registration:
    """Translate a worker's registration, complete or not: the registry checks it."""
    check_numbers(message)
    return Registration(
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
        worker_id=message.worker_id,
        boot_id=message.boot_id,
        role=message.role,
        address=message.address,
        control_address=message.control_address,
        model_name=message.model_name,
        model_fingerprint=message.model_fingerprint,
        kv_layout=layout_from_proto(message.kv_layout) if message.HasField("kv_layout") else None,
        max_model_len=message.max_model_len,
        num_blocks=message.num_blocks,
        vocab_size=message.vocab_size,
        admin_address=message.admin_address,
        pid=message.pid,
        embeds_only=message.embeds_only,
        build=message.build,
        host=message.host,
        age_seconds=message.age_seconds,
        num_restarts=message.num_restarts,
    )


def layout_to_proto(layout: KVLayout) -> pb.KvLayout:
    """Translate the shape of a KV block."""
    return pb.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )


def layout_from_proto(message: pb.KvLayout) -> KVLayout:
    """Translate the shape of a KV block."""
    check_numbers(message)
    return KVLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
    )


def welcome_to_proto(welcome: Welcome) -> pb.Welcome:
    """Translate the answer to a registration."""
    return pb.Welcome(protocol=welcome.protocol, router_id=welcome.router_id, session=welcome.session)


def welcome_from_proto(message: pb.Welcome) -> Welcome:
    """Translate the answer to a registration."""
    check_numbers(message)
    return Welcome(protocol=message.protocol, router_id=message.router_id, session=message.session)


def load_to_proto(load: Load) -> pb.Load:
    """Translate the load of a worker."""
    return pb.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_cache_usage=load.kv_cache_usage,
        queued_prompt_tokens=load.queued_prompt_tokens,
        num_free_blocks=load.num_free_blocks,
        num_leases=load.num_leases,
        num_fetches=load.num_fetches,
        prefill_seconds_per_token=load.prefill_seconds_per_token,
        step_seconds=load.step_seconds,
        prefix_cache_queries=load.prefix_cache_queries,
        prefix_cache_hits=load.prefix_cache_hits,
        gpu_used_bytes=load.gpu_used_bytes,
        gpu_bytes=load.gpu_bytes,
    )


def load_from_proto(message: pb.Load) -> Load:
    """Translate the load of a worker."""
    check_numbers(message)
    given = {name: getattr(message, name) for name in _OPTIONAL_LOAD if message.HasField(name)}
    return Load(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        kv_cache_usage=message.kv_cache_usage,
        **given,
    )


def credit_to_proto(credit: Credit) -> pb.Credit:
    """Translate the credit of a worker."""
    return pb.Credit(
        max_requests=credit.max_requests,
        max_tokens=credit.max_tokens,
        number=credit.number,
        is_draining=credit.is_draining,
        drain_seconds=credit.drain_seconds,
        is_empty=credit.is_empty,
        is_unsettled=credit.is_unsettled,
        next_role=credit.next_role,
    )


def credit_from_proto(message: pb.Credit) -> Credit:
    """Translate the credit of a worker."""
    check_numbers(message)
    return Credit(
        max_requests=message.max_requests,
        max_tokens=message.max_tokens,
        number=message.number,
        is_draining=message.is_draining,
        drain_seconds=message.drain_seconds,
        is_empty=message.is_empty,
        is_unsettled=message.is_unsettled,
        next_role=message.next_role,
    )


def role_change_to_proto(order: RoleOrder) -> pb.RoleChange:
    """Translate the request to take another role."""
    return pb.RoleChange(role=order.role, epoch=order.epoch)


def role_change_from_proto(message: pb.RoleChange) -> RoleOrder:
    """Translate the request to take another role."""
    check_numbers(message)
    return RoleOrder(role=message.role, epoch=message.epoch)


def role_taken_to_proto(taken: RoleOrder) -> pb.RoleTaken:
    """Translate the report of a worker's role."""
    return pb.RoleTaken(role=taken.role, epoch=taken.epoch)


def role_taken_from_proto(message: pb.RoleTaken) -> RoleOrder:
    """Translate the report of a worker's role."""
    check_numbers(message)
    return RoleOrder(role=message.role, epoch=message.epoch)


def drain_to_proto(order: DrainOrder) -> pb.Drain:
    """Translate the request to drain."""
    return pb.Drain(deadline_seconds=order.deadline_seconds)


def drain_from_proto(message: pb.Drain) -> DrainOrder:
    """Translate the request to drain."""
    check_numbers(message)
    return DrainOrder(
        deadline_seconds=message.deadline_seconds if message.HasField("deadline_seconds") else None
    )


def credit_use_to_proto(use: CreditUse) -> pb.CreditUse:
    """Translate a router's report of what it holds."""
    return pb.CreditUse(
        number=use.number,
        num_requests=use.num_requests,
        num_tokens=use.num_tokens,
        num_former=use.num_former,
        needs_role=use.needs_role,
    )


def credit_use_from_proto(message: pb.CreditUse) -> CreditUse:
    """Translate a router's report of what it holds."""
    check_numbers(message)
    return CreditUse(
        number=message.number,
        num_requests=message.num_requests,
        num_tokens=message.num_tokens,
        num_former=message.num_former,
        needs_role=message.needs_role,
    )
