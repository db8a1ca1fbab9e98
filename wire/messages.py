"""The messages between routers and workers: the range of each number, the check of a received one, and their conversion.

A peer chooses these numbers: one that is not finite, negative or absurd would spoil what is calculated from it far away
from here. So every ``*from_proto`` begins with ``check_numbers``, and a test compares ``RANGES`` with the protocol's
descriptors. A field that is unset reads as 0, which every range therefore contains unless the field is always sent. A range
that is all of the field's type costs nothing: an attempt compares the numbers of a TokenEntry with what it has asked for.

Messages about workers and routers themselves (registration, acceptance, load, credit) have the fields of a struct of that
name (tests/wire/test_fields.py), so two functions convert all of them: ``to_proto(pb.Credit, credit)`` and
``from_proto(Credit, message)``. Those of requests are in ``legs.py`` and ``tokens.py``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from msgspec import structs

from contract.errors import InvalidRequestError
from contract.layout import KEY_VALUE, KVLayout
from contract.membership import (
    Credit,
    CreditUse,
    DrainOrder,
    Load,
    LoadedWeights,
    Registration,
    ReloadOrder,
    ReloadReport,
    RoleOrder,
    Welcome,
)
from contract.options import MAX_SECONDS
from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, NUMBERS, PARAMETERS
from protos import group_pb2, worker_pb2


class Range(NamedTuple):
    """The values that a number may have, both ends included. No range contains NaN, and one of log probabilities -inf."""

    low: float
    high: float


class BadNumberError(InvalidRequestError):
    """A peer sent a number out of its range. The message and ``param`` name the field."""


UINT32 = Range(0, 2**32 - 1)
INT32 = Range(-(2**31), 2**31 - 1)
INT64 = Range(-(2**63), 2**63 - 1)
COUNT = Range(0, 2**31 - 1)
# The engine of a worker, and the attempt in a router, compare token ids with the vocabulary.
TOKEN = UINT32
# A count that grows for as long as a process runs. A float, and so JSON, holds it exactly.
TOTAL = Range(0, 2**53)
SECONDS = Range(0.0, MAX_SECONDS)
# Longer than any setting: a process may run for years.
AGE_SECONDS = Range(0.0, 1e10)
STEP_SECONDS = Range(0.0, 3600.0)
TOKEN_SECONDS = Range(0.0, 60.0)
SHARE = Range(0.0, 1.0)
# At most 0, but for rounding. -inf: the model gives the token no probability at all.
LOGPROB = Range(-math.inf, 1e-3)
FLOAT32 = Range(-3.5e38, 3.5e38)
VERSION = Range(0, 2**16)
PORT = Range(0, 2**16 - 1)
# Always sent, and a divisor.
DIMENSION = Range(1, 2**20)
# With KV: a model of recurrent layers alone has none.
LAYERS = Range(0, 2**20)

_SAMPLING = {
    # 0 is an unset field, and ``seed`` is signed here while an engine takes any number of 64 bits
    parameter.name: Range(min(0, low), min(high, INT64.high))
    for parameter in NUMBERS
    for low, high in [parameter.bounds]
} | {parameter.name: TOKEN for parameter in PARAMETERS if parameter.kind == "token_ids"}

RANGES: Mapping[str, Mapping[str, Range]] = MappingProxyType(
    {
        "EngineSampling": {
            **_SAMPLING,
            "biased_token_ids": TOKEN,
            "biases": Range(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
        },
        "Task": {
            "attempt": UINT32,
            "choice": COUNT,
            "num_choices": Range(0, MAX_CHOICES),
            "first_index": COUNT,
            "prompt_token_ids": TOKEN,
            "eos_token_ids": TOKEN,
            "priority": INT32,
            "deadline_seconds": SECONDS,
        },
        "HandOffRequest": {
            "attempt": UINT32,
            "choice": COUNT,
            "next_attempt": UINT32,
            "deadline_seconds": SECONDS,
        },
        "CancelRequest": {"attempt": UINT32, "choice": COUNT},
        "Registration": {
            "protocol_min": VERSION,
            "protocol_max": VERSION,
            "max_model_len": COUNT,
            "num_blocks": COUNT,
            "vocab_size": COUNT,
            "pid": UINT32,
            "age_seconds": AGE_SECONDS,
            "num_restarts": COUNT,
            "group_size": COUNT,
            "weights_epoch": TOTAL,
        },
        "KvLayout": {
            "num_layers": LAYERS,
            "num_kv_heads": DIMENSION,
            "head_dim": DIMENSION,
            "block_size": DIMENSION,
        },
        "Load": {
            "num_running": COUNT,
            "num_waiting": COUNT,
            "kv_cache_usage": SHARE,
            "queued_prompt_tokens": COUNT,
            "num_free_blocks": COUNT,
            "num_leases": COUNT,
            "num_fetches": COUNT,
            "prefill_seconds_per_token": TOKEN_SECONDS,
            "step_seconds": STEP_SECONDS,
            "prefix_cache_queries": TOTAL,
            "prefix_cache_hits": TOTAL,
            "gpu_used_bytes": TOTAL,
            "gpu_bytes": TOTAL,
        },
        "Credit": {"max_requests": COUNT, "max_tokens": TOTAL, "drain_seconds": SECONDS, "number": TOTAL},
        "CreditUse": {"number": TOTAL, "num_requests": COUNT, "num_tokens": TOTAL, "num_former": COUNT},
        "PositionLogprobs": {
            "token_id": TOKEN,
            "logprob": LOGPROB,
            "rank": COUNT,
            "top_token_ids": TOKEN,
            "top_logprobs": LOGPROB,
        },
        "LegTimings": {
            "queue_seconds": SECONDS,
            "prefill_seconds": SECONDS,
            "transfer_exposed_seconds": SECONDS,
            "transfer_hidden_seconds": SECONDS,
            "transfer_bytes": TOTAL,
            "transfer_pieces": COUNT,
            "transfer_copying_seconds": SECONDS,
            "transfer_waiting_seconds": SECONDS,
            "held_seconds": SECONDS,
        },
        "TokenEntry": {
            "choice": UINT32,
            "attempt": UINT32,
            "first_index": UINT32,
            "token_ids": TOKEN,
            "stop_reason": TOKEN,
            "num_cached_tokens": UINT32,
            "pooled": FLOAT32,
        },
        "WorkerMessage": {"num_orders": TOTAL},
        "Drain": {"deadline_seconds": SECONDS},
        "RoleChange": {"epoch": TOTAL},
        "RoleTaken": {"epoch": TOTAL},
        "WeightsLoaded": {"epoch": TOTAL},
        "ReloadOrder": {"epoch": TOTAL},
        "Welcome": {"protocol": VERSION},
        "Part": {"dp_rank": COUNT, "dp_size": COUNT, "port": PORT},
        "Group": {"store_port": PORT},
        "GroupStep": {"step": TOTAL},
    }
)
"""By message and field."""

_Check = tuple[str, Callable[[Any], Any], float, float]
"""Name, getter and range of a field that has one value; or of one with several."""


def check_numbers(message: Message) -> None:
    """Check the numbers of a message from a peer, but not those of the messages in it. Raises BadNumberError."""
    single, repeated = _CHECKS[type(message)]
    for check in single:
        value = check[1](message)
        if not check[2] <= value <= check[3]:
            raise _error(message, check, value)
    for check in repeated:
        values = check[1](message)
        for value in values if values else ():  # an iterator costs more than the question
            if not check[2] <= value <= check[3]:
                raise _error(message, check, value)


def _error(message: Message, check: _Check, value: float) -> BadNumberError:
    name, _, low, high = check
    field = f"{message.DESCRIPTOR.name}.{name}"
    return BadNumberError(f"{field} is {value}; it must lie in {low:.16g}..{high:.16g}", param=field)


def numbers_of(message: type[Message]) -> list[FieldDescriptor]:
    """Return the fields of a kind of message that hold numbers."""
    no_numbers = (
        FieldDescriptor.CPPTYPE_BOOL,
        FieldDescriptor.CPPTYPE_STRING,
        FieldDescriptor.CPPTYPE_MESSAGE,
    )
    fields = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    return [field for field in fields if field.cpp_type not in no_numbers]


def _checks_of(message: type[Message]) -> tuple[list[_Check], list[_Check]]:
    """Return the checks of fields with one value, and of those with several. One that its type fulfils is left out."""
    ranges = RANGES.get(message.DESCRIPTOR.name, {})
    single: list[_Check] = []
    repeated: list[_Check] = []
    for field in numbers_of(message):
        low, high = ranges[field.name]
        if (low, high) != _TYPES.get(field.cpp_type):
            checks = repeated if field.is_repeated else single
            checks.append((field.name, attrgetter(field.name), low, high))
    return single, repeated


_TYPES = {
    FieldDescriptor.CPPTYPE_UINT32: UINT32,
    FieldDescriptor.CPPTYPE_INT32: INT32,
    FieldDescriptor.CPPTYPE_INT64: INT64,
}
_CHECKS = {
    kind: _checks_of(kind)
    for pb in (worker_pb2, group_pb2)
    for name in pb.DESCRIPTOR.message_types_by_name
    for kind in [cast("type[Message]", getattr(pb, name))]
}


_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T", bound=msgspec.Struct)
_STRUCTS = (
    Credit,
    CreditUse,
    DrainOrder,
    KVLayout,
    Load,
    LoadedWeights,
    Registration,
    ReloadOrder,
    ReloadReport,
    RoleOrder,
    Welcome,
)
# A number that a worker measures may be 0, so a worker that measures none leaves the field out.
_OPTIONAL: dict[type[msgspec.Struct], list[Any]] = {
    kind: [field.name for field in structs.fields(kind) if field.default is None] for kind in _STRUCTS
}


def to_proto(kind: type[_M], content: msgspec.Struct) -> _M:
    """Return the message of this kind with the fields of ``content``; those that are None stay unset."""
    return kind(**msgspec.to_builtins(content))


def from_proto(kind: type[_T], message: Message) -> _T:
    """Return the struct with the fields of a message from a peer. Raises BadNumberError.

    A registration may be incomplete: the registry checks it.
    """
    check_numbers(message)
    fields = {name: getattr(message, name) for name in kind.__struct_fields__}
    if kind is KVLayout:
        fields["parts"] = tuple(fields["parts"]) or KEY_VALUE
    for name in _OPTIONAL[kind]:
        if not message.HasField(name):
            fields[name] = None
        elif name == "kv_layout":
            fields[name] = from_proto(KVLayout, fields[name])
    return kind(**fields)
