"""Every message of the internal protocol is read as it was sent, field by field."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.membership import Load
from contract.outputs import EngineOutput
from contract.requests import PoolingParams
from protos import worker_pb2 as pb
from tests.wire import strategies
from wire.legs import (
    cancel_from_proto,
    cancel_to_proto,
    decode_from_proto,
    decode_to_proto,
    embed_from_proto,
    embed_to_proto,
    hand_off_from_proto,
    hand_off_to_proto,
    prefill_from_proto,
    prefill_to_proto,
    source_from_proto,
    source_to_proto,
)
from wire.membership import (
    credit_from_proto,
    credit_to_proto,
    credit_use_from_proto,
    credit_use_to_proto,
    drain_from_proto,
    drain_to_proto,
    layout_from_proto,
    layout_to_proto,
    load_from_proto,
    load_to_proto,
    registration_from_proto,
    registration_to_proto,
    role_change_from_proto,
    role_change_to_proto,
    role_taken_from_proto,
    role_taken_to_proto,
    welcome_from_proto,
    welcome_to_proto,
)
from wire.model_files import piece_from_proto, piece_to_proto
from wire.sampling import grammar_from_proto, grammar_to_proto, sampling_from_proto, sampling_to_proto
from wire.tasks import task_from_proto, task_to_proto
from wire.tokens import (
    logprobs_from_proto,
    logprobs_to_proto,
    output_from_proto,
    output_to_proto,
    step_to_proto,
    timings_from_proto,
    timings_to_proto,
)


class Codec(NamedTuple):
    """Both directions of one message, and the objects that may be sent with it."""

    message: type[Message]
    objects: st.SearchStrategy[Any]
    to_proto: Callable[[Any], Message]
    from_proto: Callable[[Any], Any]


def _read_step(message: pb.StepOutput) -> tuple[list[EngineOutput], Load | None]:
    load = load_from_proto(message.load) if message.HasField("load") else None
    return [output_from_proto(entry) for entry in message.entries], load


def _embed_codec(pooling: PoolingParams) -> Codec:
    objects = strategies.requests(st.none(), pooling)
    return Codec(
        pb.EmbedLegRequest, objects, embed_to_proto, lambda message: embed_from_proto(message, pooling)
    )


CODECS = (
    Codec(pb.Grammar, strategies.grammars, grammar_to_proto, grammar_from_proto),
    Codec(pb.EngineSampling, strategies.sampling, sampling_to_proto, sampling_from_proto),
    Codec(pb.Task, strategies.requests(st.none()), task_to_proto, task_from_proto),
    Codec(pb.PrefillRequest, strategies.prefills, prefill_to_proto, prefill_from_proto),
    Codec(pb.TransferSource, strategies.receive_transfers, source_to_proto, source_from_proto),
    Codec(pb.DecodeRequest, strategies.decodes, decode_to_proto, decode_from_proto),
    _embed_codec(PoolingParams("last", normalize=True)),
    _embed_codec(PoolingParams("mean", normalize=False)),
    Codec(pb.HandOffRequest, strategies.hand_offs, lambda it: hand_off_to_proto(*it), hand_off_from_proto),
    Codec(pb.CancelRequest, strategies.cancels, lambda it: cancel_to_proto(*it), cancel_from_proto),
    Codec(pb.ModelFile, strategies.pieces, lambda it: piece_to_proto(*it), piece_from_proto),
    Codec(pb.Registration, strategies.registrations, registration_to_proto, registration_from_proto),
    Codec(pb.KvLayout, strategies.layouts, layout_to_proto, layout_from_proto),
    Codec(pb.Welcome, strategies.welcomes, welcome_to_proto, welcome_from_proto),
    Codec(pb.Load, strategies.loads, load_to_proto, load_from_proto),
    Codec(pb.Credit, strategies.credits, credit_to_proto, credit_from_proto),
    Codec(pb.CreditUse, strategies.credit_uses, credit_use_to_proto, credit_use_from_proto),
    Codec(pb.Drain, strategies.drains, drain_to_proto, drain_from_proto),
    Codec(pb.RoleChange, strategies.roles, role_change_to_proto, role_change_from_proto),
    Codec(pb.RoleTaken, strategies.roles, role_taken_to_proto, role_taken_from_proto),
    Codec(pb.PositionLogprobs, strategies.logprobs, logprobs_to_proto, logprobs_from_proto),
    Codec(pb.LegTimings, strategies.timings, timings_to_proto, timings_from_proto),
    Codec(pb.TokenEntry, strategies.outputs, output_to_proto, output_from_proto),
    Codec(pb.StepOutput, strategies.steps, lambda it: step_to_proto(*it), _read_step),
)
EMPTY = {"Accepted", "GetModelFilesRequest", "Goodbye", "Undrain"}
ENVELOPES = {"WorkerMessage", "RouterMessage", "Orders", "Order"}
"""They hold others; the stream that reads them asks which."""


def _crossed(message: Message) -> Message:
    """The message as the other process receives it."""
    return type(message).FromString(message.SerializeToString())


def test_every_message_has_a_codec() -> None:
    named = {codec.message.DESCRIPTOR.name for codec in CODECS}
    assert named | EMPTY | ENVELOPES == set(pb.DESCRIPTOR.message_types_by_name)
    assert not any(pb.DESCRIPTOR.message_types_by_name[name].fields for name in EMPTY)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.message.DESCRIPTOR.name)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_sent_is_what_is_read(codec: Codec, data: st.DataObject) -> None:
    sent = data.draw(codec.objects)
    message = codec.to_proto(sent)
    assert type(message) is codec.message
    assert codec.from_proto(_crossed(message)) == sent
