"""The messages between a worker and its router about themselves: registration, acceptance, load and credit."""

import msgspec

from contract.layout import KVLayout


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a worker to its router. Every field may be missing (zero or empty): the router checks it.

    protocol_min, protocol_max: the protocol versions that the worker speaks. role: a ``Role`` other than the router's.
    address, control_address, admin_address: host:port of its Worker service, its control link and its
    admin server. kv_layout: the shape of its KV blocks over all its ranks. max_model_len: tokens that prompt and answer
    may have together. num_blocks: blocks of its pool. vocab_size: token ids are below this. embeds_only: the model has no
    output head. build, host: the version of its code and the name of its machine, for operators. age_seconds: time since
    the process started. num_restarts: how often a supervisor has started the worker again before this process. group: of
    data-parallel ranks, which are drained and change their role together; it has group_size of them. weights_epoch: see
    ``LoadedWeights``.
    """

    protocol_min: int = 0
    protocol_max: int = 0
    worker_id: str = ""
    boot_id: str = ""
    role: str = ""
    address: str = ""
    control_address: str = ""
    model_name: str = ""
    model_fingerprint: str = ""
    kv_layout: KVLayout | None = None
    max_model_len: int = 0
    num_blocks: int = 0
    vocab_size: int = 0
    admin_address: str = ""
    pid: int = 0
    embeds_only: bool = False
    build: str = ""
    host: str = ""
    age_seconds: float = 0.0
    num_restarts: int = 0
    group: str = ""
    group_size: int = 0
    weights_epoch: int = 0


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answers a registration that the router accepts.

    protocol: the version to speak. session: the unique name of this stream; tasks repeat it.
    """

    protocol: int = 0
    router_id: str = ""
    session: str = ""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Reports how busy a worker is. A field is None if the worker has not measured or reported it.

    kv_cache_usage: 0..1. queued_prompt_tokens: tokens of prompts that are not computed yet. num_leases: finished prompts
    whose KV is still lent. num_fetches: requests that wait for KV from another worker. prefill_seconds_per_token: moving
    average of steps that compute prompts. step_seconds: that of steps that only continue answers. prefix_cache_queries,
    prefix_cache_hits: prompt tokens that were looked up since the start, and found. gpu_used_bytes, gpu_bytes: memory of all
    GPUs of the worker, and what every process together uses of it.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    queued_prompt_tokens: int | None = None
    num_free_blocks: int | None = None
    num_leases: int | None = None
    num_fetches: int | None = None
    prefill_seconds_per_token: float | None = None
    step_seconds: float | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    gpu_used_bytes: int | None = None
    gpu_bytes: int | None = None


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """Limits the work that a worker accepts at once; the default is none.

    max_requests: legs that may be bound to it. max_tokens: tokens of all these legs. A decode leg must fit; a prefill leg
    may be bound while the sum is below the limit. number: counts the credits of one stream, from 1; the router repeats it
    in its ``CreditUse``. Without a drain, a credit of no requests that has a number means that other routers hold all that
    there is now. is_draining: the worker drains; drain_seconds: the time until the legs that are left are taken away from
    it. is_empty: a draining worker holds no leg and lends no KV any more. is_unsettled: the worker may lend and fetch KV at
    once, because it has changed its role or answers are moved away from it; every router has answered a credit of nothing
    since. next_role: the role that it takes when every router has answered this credit, unless one of them needs the present
    role.
    """

    max_requests: int = 0
    max_tokens: int = 0
    number: int = 0
    is_draining: bool = False
    drain_seconds: float = 0.0
    is_empty: bool = False
    is_unsettled: bool = False
    next_role: str = ""


class CreditUse(msgspec.Struct, frozen=True, kw_only=True):
    """Reports what a router holds of a worker's credit: the answer to each credit that has a number.

    number: that of the last credit that it has received. num_requests, num_tokens: bound or reserved legs, and their tokens,
    without the num_former that were bound before the worker took its role. Moves of answers away from it count as former.
    needs_role: the worker must not take its ``next_role``.
    """

    number: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_former: int = 0
    needs_role: bool = False


class RoleOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a worker to take another role, or reports the role that a worker has taken. epoch: the greatest one counts."""

    role: str = ""
    epoch: int = 0


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a worker to drain. deadline_seconds: the time for its legs; None: the worker's own ``drain_seconds``."""

    deadline_seconds: float | None = None


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the weights that a worker has. epoch: the number of their reload; a router serves the greatest one.

    0: those with which its process started.
    """

    model_fingerprint: str = ""
    epoch: int = 0


class ReloadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Orders a step of a reload of the weights, "load" or "serve". epoch: see ``protos/worker.proto``."""

    step: str = ""
    epoch: int = 0


class ReloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that a step of a reload is done. After "load": the fingerprint of the weights, or why none were read.

    is_lost: the former ones are gone, and the worker ends when the call has ended.
    """

    model_fingerprint: str = ""
    error: str = ""
    is_lost: bool = False
