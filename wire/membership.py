"""Converts the messages between a worker and its router about themselves: registration, acceptance, load and credit.

A struct and its message have fields of the same names (tests/wire/test_fields.py), so two functions convert all of them:
``to_proto(pb.Credit, credit)`` and ``from_proto(Credit, message)``. An unset field reads as 0 or empty, or as None where
that is the struct's default.
"""

from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message
from msgspec import structs

from contract.layout import KVLayout
from contract.membership import Credit, CreditUse, DrainOrder, Load, Registration, RoleOrder, Welcome
from wire.numbers import check_numbers

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T", bound=msgspec.Struct)
_STRUCTS = (Credit, CreditUse, DrainOrder, KVLayout, Load, Registration, RoleOrder, Welcome)
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
    for name in _OPTIONAL[kind]:
        if not message.HasField(name):
            fields[name] = None
        elif name == "kv_layout":
            fields[name] = from_proto(KVLayout, fields[name])
    return kind(**fields)
