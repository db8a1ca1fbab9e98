"""A full example of each message, written out on both sides, shows which field holds which."""

from typing import Any

import pytest
from google.protobuf.message import Message

from contract.layout import KEY_VALUE, LATENT, KVLayout
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
from contract.outputs import EngineOutput, FinishReason, RequestTimings, TokenLogprobs, TransferReport
from contract.requests import EngineRequest, HandOff, PoolingParams, ReceiveTransfer, SendTransfer
from contract.sampling import Grammar, SamplingParams
from protos import worker_pb2 as pb
from tests.wire.test_round_trips import CODECS
from wire.messages import from_proto, to_proto

SAMPLING = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    seed=-7,
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=(4, 5),
    ignore_eos=True,
    logprobs=6,
    prompt_logprobs=8,
    min_p=0.125,
    presence_penalty=1.5,
    frequency_penalty=-1.5,
    repetition_penalty=1.25,
    logit_bias=((10, 0.75), (11, -0.75)),
    allowed_token_ids=(10, 11, 12),
    grammar=Grammar("regex", "a+"),
)
SAMPLING_MESSAGE = pb.EngineSampling(
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    seed=-7,
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=[4, 5],
    ignore_eos=True,
    logprobs=6,
    prompt_logprobs=8,
    min_p=0.125,
    presence_penalty=1.5,
    frequency_penalty=-1.5,
    repetition_penalty=1.25,
    biased_token_ids=[10, 11],
    biases=[0.75, -0.75],
    allowed_token_ids=[10, 11, 12],
    grammar=pb.Grammar(kind="regex", text="a+"),
)
SOURCE = ReceiveTransfer(transfer_id="t", peer_worker_id="p-0", peer_boot_id="b", peer_control="h:1")
SOURCE_MESSAGE = pb.TransferSource(transfer_id="t", worker_id="p-0", boot_id="b", control_address="h:1")
LOGPROBS = TokenLogprobs(1, -0.5, 2, (3, 1), (-0.25, -0.5))
LOGPROBS_MESSAGE = pb.PositionLogprobs(
    token_id=1, logprob=-0.5, rank=2, top_token_ids=[3, 1], top_logprobs=[-0.25, -0.5]
)
TIMINGS = RequestTimings(0.5, 1.5, TransferReport(2.5, 3.5, 4, 5, 6.5, 7.5), 8.5)
TIMINGS_MESSAGE = pb.LegTimings(
    queue_seconds=0.5,
    prefill_seconds=1.5,
    transfer_exposed_seconds=2.5,
    transfer_hidden_seconds=3.5,
    transfer_bytes=4,
    transfer_pieces=5,
    transfer_copying_seconds=6.5,
    transfer_waiting_seconds=7.5,
    held_seconds=8.5,
)
OUTPUT = EngineOutput(
    request_id="r",
    attempt=1,
    choice=2,
    first_index=3,
    token_ids=[4, 5],
    logprobs=[LOGPROBS],
    finish_reason=FinishReason.ERROR,
    stop_reason=6,
    num_cached_tokens=7,
    prompt_logprobs=[LOGPROBS, LOGPROBS],
    timings=TIMINGS,
    pooled=[0.5, -0.5],
    handed_over=True,
    is_rejected=True,
    error_kind="deadline",
    error_message="late",
    error_param="prompt",
)
OUTPUT_MESSAGE = pb.TokenEntry(
    request_id="r",
    attempt=1,
    choice=2,
    first_index=3,
    token_ids=[4, 5],
    logprobs=[LOGPROBS_MESSAGE],
    finish_reason="error",
    stop_reason=6,
    num_cached_tokens=7,
    prompt_logprobs=[LOGPROBS_MESSAGE, LOGPROBS_MESSAGE],
    timings=TIMINGS_MESSAGE,
    pooled=[0.5, -0.5],
    handed_over=True,
    is_rejected=True,
    error_kind="deadline",
    error_message="late",
    error_param="prompt",
)
HAND_OFF = HandOff(request_id="r", attempt=1, choice=2, transfer_id="t", next_attempt=3)
HAND_OFF_MESSAGE = pb.HandOffRequest(
    request_id="r", attempt=1, choice=2, transfer_id="t", next_attempt=3, deadline_seconds=0.5
)
REPORTED: dict[str, Any] = {
    "num_running": 1,
    "num_waiting": 2,
    "kv_cache_usage": 0.5,
    "queued_prompt_tokens": 3,
    "num_free_blocks": 4,
    "num_leases": 5,
    "num_fetches": 6,
    "prefill_seconds_per_token": 0.25,
    "step_seconds": 0.125,
    "prefix_cache_queries": 7,
    "prefix_cache_hits": 8,
    "gpu_used_bytes": 9,
    "gpu_bytes": 10,
}
LOAD = Load(**REPORTED)
LOAD_MESSAGE = pb.Load(**REPORTED)
SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 2,
    "head_dim": 3,
    "block_size": 4,
    "dtype": "float32",
}
LAYOUT = KVLayout(**SHAPE, parts=LATENT)
LAYOUT_MESSAGE = pb.KvLayout(**SHAPE, parts=LATENT)

CREDIT: dict[str, Any] = {
    "max_requests": 1,
    "max_tokens": 2,
    "number": 3,
    "is_draining": True,
    "drain_seconds": 3.5,
    "is_empty": True,
    "is_unsettled": True,
    "next_role": "prefill",
}
REGISTERED: dict[str, Any] = {
    "protocol_min": 1,
    "protocol_max": 2,
    "worker_id": "w-0",
    "boot_id": "b",
    "role": "prefill",
    "address": "h:3",
    "control_address": "h:4",
    "model_name": "m",
    "model_fingerprint": "f@float32",
    "max_model_len": 5,
    "num_blocks": 6,
    "vocab_size": 7,
    "admin_address": "h:8",
    "pid": 9,
    "embeds_only": True,
    "host": "node-7",
    "age_seconds": 12.5,
    "num_restarts": 3,
    "group": "10.0.0.1:9300",
    "group_size": 4,
    "weights_epoch": 7,
    "build": "1.2.3",
}
"""The fields have the same names on both sides."""


def request(
    transfer: SendTransfer | ReceiveTransfer | None = None, pooling: PoolingParams | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[20, 21],
        sampling=SamplingParams() if pooling else SAMPLING,
        eos_token_ids=(22, 23),
        attempt=1,
        choice=2,
        num_choices=3,
        first_index=4,
        priority=-5,
        cache_salt="salt",
        tenant="client",
        deadline_seconds=6.5,
        transfer=transfer,
        pooling_params=pooling,
    )


def task(sampling: pb.EngineSampling | None = SAMPLING_MESSAGE) -> pb.Task:
    return pb.Task(
        request_id="r",
        attempt=1,
        choice=2,
        num_choices=3,
        first_index=4,
        prompt_token_ids=[20, 21],
        sampling=sampling,
        eos_token_ids=[22, 23],
        priority=-5,
        cache_salt="salt",
        tenant="client",
        deadline_seconds=6.5,
    )


EXAMPLES: tuple[tuple[Any, Message], ...] = (
    (Grammar("choice", "[]"), pb.Grammar(kind="choice", text="[]")),
    (SAMPLING, SAMPLING_MESSAGE),
    (request(), task()),
    (request(SendTransfer("t")), pb.PrefillRequest(task=task(), transfer_id="t")),
    (SOURCE, SOURCE_MESSAGE),
    (request(SOURCE), pb.DecodeRequest(task=task(), source=SOURCE_MESSAGE)),
    (
        request(pooling=PoolingParams("max", normalize=False)),
        pb.EmbedLegRequest(task=task(sampling=None), pooling_type="max", normalize=False),
    ),
    (("r", 1, 2), pb.CancelRequest(request_id="r", attempt=1, choice=2)),
    (("config.json", b"{}"), pb.ModelFile(name="config.json", data=b"{}")),
    (Registration(**REGISTERED, kv_layout=LAYOUT), pb.Registration(**REGISTERED, kv_layout=LAYOUT_MESSAGE)),
    (LAYOUT, LAYOUT_MESSAGE),
    (
        Welcome(protocol=1, router_id="router", session="s"),
        pb.Welcome(protocol=1, router_id="router", session="s"),
    ),
    (LOAD, LOAD_MESSAGE),
    (Credit(**CREDIT), pb.Credit(**CREDIT)),
    (DrainOrder(deadline_seconds=3.5), pb.Drain(deadline_seconds=3.5)),
    (RoleOrder(role="both", epoch=4), pb.RoleChange(role="both", epoch=4)),
    (RoleOrder(role="both", epoch=4), pb.RoleTaken(role="both", epoch=4)),
    (
        LoadedWeights(model_fingerprint="w@float32", epoch=4),
        pb.WeightsLoaded(model_fingerprint="w@float32", epoch=4),
    ),
    (ReloadOrder(step="load", epoch=4), pb.ReloadOrder(step="load", epoch=4)),
    (
        ReloadReport(model_fingerprint="w@float32", error="why", is_lost=True),
        pb.ReloadReport(model_fingerprint="w@float32", error="why", is_lost=True),
    ),
    (
        CreditUse(number=1, num_requests=2, num_tokens=3, num_former=4, needs_role=True),
        pb.CreditUse(number=1, num_requests=2, num_tokens=3, num_former=4, needs_role=True),
    ),
    (LOGPROBS, LOGPROBS_MESSAGE),
    (TIMINGS, TIMINGS_MESSAGE),
    (OUTPUT, OUTPUT_MESSAGE),
    ((HAND_OFF, 0.5), HAND_OFF_MESSAGE),
    (([OUTPUT], LOAD), pb.StepOutput(entries=[OUTPUT_MESSAGE], load=LOAD_MESSAGE)),
)


@pytest.mark.parametrize(("held", "message"), EXAMPLES, ids=lambda it: type(it).__name__)
def test_a_field_stands_where_the_protocol_has_it(held: Any, message: Message) -> None:
    codec = next(codec for codec in CODECS if codec.message is type(message))
    assert codec.to_proto(held) == message
    assert codec.from_proto(message) == held


def test_keys_and_values_are_no_field_of_a_layout() -> None:
    """D6: the bytes are those of versions without other parts."""
    message = to_proto(pb.KvLayout, KVLayout(**SHAPE))
    assert message.SerializeToString().hex() == "08011002180320042a07666c6f61743332"
    assert from_proto(KVLayout, message).parts == KEY_VALUE


@pytest.mark.parametrize("message", [message for _, message in EXAMPLES], ids=lambda it: type(it).__name__)
def test_an_example_has_every_field(message: Message) -> None:
    """A field that is added to the protocol is added here, and so translated."""
    named = {field.name for field in message.DESCRIPTOR.fields}
    assert {field.name for field, _ in message.ListFields()} == named


def test_every_message_has_an_example() -> None:
    assert {type(message) for _, message in EXAMPLES} == {codec.message for codec in CODECS}
