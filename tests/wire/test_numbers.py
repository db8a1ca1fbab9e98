"""Every number of every message has a range, and every way in refuses a number out of it by the field's name."""

import math
from typing import Any, cast

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from contract.requests import PoolingParams
from protos import group_pb2
from protos import worker_pb2 as pb
from tests.wire.test_fields import EXAMPLES, request
from tests.wire.test_round_trips import CODECS, Codec
from wire.messages import RANGES, BadNumberError, check_numbers, numbers_of

KINDS = [
    cast("type[Message]", getattr(module, name))
    for module in (pb, group_pb2)
    for name in module.DESCRIPTOR.message_types_by_name
]
NUMBERS = [(kind, field) for kind in KINDS for field in numbers_of(kind)]
FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
READ_IN_PLACE = {"WorkerMessage", *group_pb2.DESCRIPTOR.message_types_by_name}
"""The envelope whose number is compared with what was sent (``OrderStream.on_carried_out``), and a group's few messages."""


def bad_values(kind: type[Message], field: FieldDescriptor) -> list[float]:
    """Values that the field's type holds and its range does not."""
    low, high = RANGES[kind.DESCRIPTOR.name][field.name]
    if high - low == math.inf:  # a log probability
        return [math.nan, math.inf, 1.0]
    if field.cpp_type in FLOATS:
        beyond = (
            [] if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else [2 * high + 1.0, low - 1.0 - abs(low)]
        )
        return [math.nan, math.inf, -math.inf, *beyond]
    message = kind()
    found: list[float] = []
    for value in (int(low) - 1, int(high) + 1, 2**60):
        if low <= value <= high:
            continue
        try:
            put(message, field, value)
        except ValueError:  # its type does not hold it
            continue
        found.append(value)
    return found


def put(message: Message, field: FieldDescriptor, value: float) -> None:
    if field.is_repeated:
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend([value, value])
    else:
        setattr(message, field.name, value)


def example_of(kind: type[Message]) -> Message:
    message = kind()
    message.CopyFrom(next(message for _, message in EXAMPLES if type(message) is kind))
    return message


def reader_of(kind: type[Message]) -> Codec:
    return next(codec for codec in CODECS if codec.message is kind)


def test_every_number_of_the_protocol_has_a_range_and_every_range_a_number() -> None:
    declared = {(message, field) for message, fields in RANGES.items() for field in fields}
    assert declared == {(kind.DESCRIPTOR.name, field.name) for kind, field in NUMBERS}


@pytest.mark.parametrize(
    ("kind", "field"), NUMBERS, ids=[f"{kind.DESCRIPTOR.name}.{field.name}" for kind, field in NUMBERS]
)
def test_a_number_out_of_its_range_is_refused_by_its_name(
    kind: type[Message], field: FieldDescriptor
) -> None:
    name = f"{kind.DESCRIPTOR.name}.{field.name}"
    low, high = RANGES[kind.DESCRIPTOR.name][field.name]
    assert math.isfinite(high)
    assert math.isfinite(low) or "logprob" in field.name
    for value in bad_values(kind, field):
        message = kind() if kind.DESCRIPTOR.name in READ_IN_PLACE else example_of(kind)
        put(message, field, value)
        read: Any = check_numbers if kind.DESCRIPTOR.name in READ_IN_PLACE else reader_of(kind).from_proto
        with pytest.raises(BadNumberError, match=f"^{name} is ") as refusal:
            read(message)
        assert refusal.value.param == name


def test_a_bad_number_deep_in_a_message_is_found() -> None:
    """A message is read by the functions of all messages in it."""
    for kind, field, value in (
        (pb.PositionLogprobs, "logprob", math.nan),
        (pb.LegTimings, "queue_seconds", -1.0),
    ):
        entry = example_of(pb.TokenEntry)
        assert isinstance(entry, pb.TokenEntry)
        inner: Message = entry.logprobs[0] if kind is pb.PositionLogprobs else entry.timings
        setattr(inner, field, value)
        with pytest.raises(BadNumberError, match=field):
            reader_of(pb.TokenEntry).from_proto(entry)
    leg = example_of(pb.DecodeRequest)
    assert isinstance(leg, pb.DecodeRequest)
    leg.task.sampling.temperature = math.nan
    with pytest.raises(BadNumberError, match=r"EngineSampling\.temperature is nan"):
        reader_of(pb.DecodeRequest).from_proto(leg)
    embedding = reader_of(pb.EmbedLegRequest).to_proto(request(pooling=PoolingParams()))
    assert isinstance(embedding, pb.EmbedLegRequest)
    embedding.task.deadline_seconds = math.inf
    with pytest.raises(BadNumberError, match=r"Task\.deadline_seconds is inf"):
        reader_of(pb.EmbedLegRequest).from_proto(embedding)
