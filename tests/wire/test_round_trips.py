"""Every message of the internal protocol is read as it was sent, field by field."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.layout import KVLayout
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
    grammar_from_proto,
    grammar_to_proto,
    hand_off_from_proto,
    hand_off_to_proto,
    prefill_from_proto,
    prefill_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    source_from_proto,
    source_to_proto,
    task_from_proto,
    task_to_proto,
)
from wire.messages import from_proto, to_proto
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
    load = from_proto(Load, message.load) if message.HasField("load") else None
    return [output_from_proto(entry) for entry in message.entries], load


def _embed_codec(pooling: PoolingParams) -> Codec:
    objects = strategies.requests(st.none(), pooling)
    return Codec(pb.EmbedLegRequest, objects, embed_to_proto, embed_from_proto)


def _membership_codec(
    message: type[Message], kind: type[msgspec.Struct], objects: st.SearchStrategy[Any]
) -> Codec:
    return Codec(message, objects, partial(to_proto, message), partial(from_proto, kind))


CODECS = (
    Codec(pb.Grammar, strategies.grammars, grammar_to_proto, grammar_from_proto),
    Codec(pb.EngineSampling, strategies.sampling, sampling_to_proto, sampling_from_proto),
    Codec(pb.Task, strategies.requests(st.none()), task_to_proto, task_from_proto),
    Codec(pb.PrefillRequest, strategies.prefills, prefill_to_proto, prefill_from_proto),
    Codec(pb.TransferSource, strategies.receive_transfers, source_to_proto, source_from_proto),
    Codec(pb.DecodeRequest, strategies.decodes, decode_to_proto, decode_from_proto),
    _embed_codec(PoolingParams()),
    _embed_codec(PoolingParams("max", normalize=True)),
    _embed_codec(PoolingParams("mean", normalize=False)),
    Codec(pb.HandOffRequest, strategies.hand_offs, lambda it: hand_off_to_proto(*it), hand_off_from_proto),
    Codec(pb.CancelRequest, strategies.cancels, lambda it: cancel_to_proto(*it), cancel_from_proto),
    Codec(
        pb.ModelFile,
        strategies.pieces,
        lambda it: pb.ModelFile(name=it[0], data=it[1]),
        attrgetter("name", "data"),
    ),
    _membership_codec(pb.Registration, Registration, strategies.registrations),
    _membership_codec(pb.KvLayout, KVLayout, strategies.layouts),
    _membership_codec(pb.Welcome, Welcome, strategies.welcomes),
    _membership_codec(pb.Load, Load, strategies.loads),
    _membership_codec(pb.Credit, Credit, strategies.credits),
    _membership_codec(pb.CreditUse, CreditUse, strategies.credit_uses),
    _membership_codec(pb.Drain, DrainOrder, strategies.drains),
    _membership_codec(pb.RoleChange, RoleOrder, strategies.roles),
    _membership_codec(pb.RoleTaken, RoleOrder, strategies.roles),
    _membership_codec(pb.WeightsLoaded, LoadedWeights, strategies.loaded_weights),
    _membership_codec(pb.ReloadOrder, ReloadOrder, strategies.reload_orders),
    _membership_codec(pb.ReloadReport, ReloadReport, strategies.reload_reports),
    Codec(pb.PositionLogprobs, strategies.logprobs, logprobs_to_proto, logprobs_from_proto),
    Codec(pb.LegTimings, strategies.timings, timings_to_proto, timings_from_proto),
    Codec(pb.TokenEntry, strategies.outputs, output_to_proto, output_from_proto),
    Codec(pb.StepOutput, strategies.steps, lambda it: step_to_proto(*it), _read_step),
)
EMPTY = {"Accepted", "GetModelFilesRequest", "Goodbye", "ResetPrefixCacheRequest", "Undrain"}
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
