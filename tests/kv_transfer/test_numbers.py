"""Every number in what a worker receives from another one has a range, by its type."""

import math
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from contract.errors import TransferError
from contract.outputs import TokenLogprobs
from engine.connector import FirstToken
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.reads import ReadRequest
from kv_transfer.transports.data_handshake import DataChallenge, DataHello, DataProve, DataReply
from kv_transfer.transports.leases import BlockGrant
from kv_transfer.transports.nccl.transport import NcclPoolInfo
from kv_transfer.transports.nixl.sender import NixlAsk, NixlPoolInfo, NixlResting
from kv_transfer.transports.shm.sender import ShmPoolInfo

RECEIVED: tuple[Any, ...] = (
    msg.AnyMessage,
    ReadRequest,
    BlockGrant,
    DataHello,
    DataChallenge,
    DataProve,
    DataReply,
    ShmPoolInfo,
    NcclPoolInfo,
    NixlPoolInfo,
    NixlAsk,
    NixlResting,
)
CHECKED_LATER = {FirstToken, TokenLogprobs}
"""``decode_message`` compares log probabilities, the scheduler token ids with the vocabulary (``check_first_tokens``)."""


def without_range(kind: inspect.Type, path: str, seen: set[type]) -> list[str]:
    """The numbers in a type that have no lower bound, or that are floats without an upper one."""
    match kind:
        case inspect.IntType():
            return [] if kind.ge is not None or kind.gt is not None else [path]
        case inspect.FloatType():
            has_low = kind.ge is not None or kind.gt is not None
            return [] if has_low and (kind.le is not None or kind.lt is not None) else [path]
        case inspect.StructType() | inspect.DataclassType():
            if kind.cls in seen | CHECKED_LATER:
                return []
            seen.add(kind.cls)
            fields = [without_range(f.type, f"{kind.cls.__name__}.{f.name}", seen) for f in kind.fields]
            return [found for each in fields for found in each]
        case inspect.UnionType():
            return [found for each in kind.types for found in without_range(each, path, seen)]
        case inspect.ListType() | inspect.VarTupleType():
            return without_range(kind.item_type, path, seen)
        case inspect.TupleType():
            return [found for each in kind.item_types for found in without_range(each, path, seen)]
        case inspect.DictType():
            return without_range(kind.value_type, path, seen)
        case _:
            return []


@pytest.mark.parametrize("kind", RECEIVED, ids=lambda kind: getattr(kind, "__name__", "AnyMessage"))
def test_every_number_has_a_range(kind: Any) -> None:
    assert without_range(inspect.type_info(kind), "", set()) == []


def test_a_number_without_a_range_would_be_found() -> None:
    class Loose(msgspec.Struct):
        first: list[int]
        second: float

    assert without_range(inspect.type_info(Loose), "", set()) == ["Loose.first", "Loose.second"]


def raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (raw(type="fetch", transfer_id="t", attempt=0, from_block=-1), "from_block"),
        (raw(type="due", transfer_id="t", attempt=0, lease="l", seconds=math.nan), "seconds"),
        (raw(type="published", transfer_id="t", attempt=-1, lease="l", first_block=0, digests=[]), "attempt"),
        (
            raw(type="published", transfer_id="t", attempt=0, lease="l", first_block=2**60, digests=[]),
            "first_block",
        ),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_its_name(frame: bytes, why: str) -> None:
    with pytest.raises(TransferError, match=why):
        msg.decode_message(frame)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
def test_a_log_probability_that_is_none_is_refused(value: float) -> None:
    for logprobs in (TokenLogprobs(1, value, 1, (), ()), TokenLogprobs(1, -1.0, 1, (2,), (value,))):
        frame = msgspec.msgpack.encode(msg.TransferComplete("t", 0, 1, [FirstToken(1, logprobs)]))
        with pytest.raises(TransferError, match="log probabilities"):
            msg.decode_message(frame)
    good = msg.TransferComplete("t", 0, 1, [FirstToken(1, TokenLogprobs(1, -1.0, 1, (1,), (-1.0,)))])
    assert msg.decode_message(msgspec.msgpack.encode(good)) == good
