"""Hypothesis draws contract objects with every field, within the range of its number on the wire."""

from typing import Any

from hypothesis import strategies as st

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
from contract.requests import (
    MAX_CHOICES,
    EngineRequest,
    HandOff,
    PoolingParams,
    ReceiveTransfer,
    SendTransfer,
)
from contract.sampling import Grammar, SamplingParams
from protos import worker_pb2 as pb
from wire.messages import RANGES, numbers_of

UINT32 = st.integers(0, 2**32 - 1)
FLOAT32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
TEXTS = st.text(max_size=8)
NAMES = st.text(min_size=1, max_size=8)
TOKEN_IDS = st.lists(UINT32, max_size=4).map(tuple)


def within(message: str) -> dict[str, st.SearchStrategy[Any]]:
    """A strategy for each number of a message, within the range that is declared."""
    message_type = getattr(pb, message)
    return {
        field.name: st.floats(*RANGES[message][field.name])
        if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT)
        else st.integers(*map(int, RANGES[message][field.name]))
        for field in numbers_of(message_type)
    }


_SAMPLING = within("EngineSampling")
_TASK = within("Task")
_LOAD = within("Load")
_CREDIT = within("Credit")
_USE = within("CreditUse")
_TIMINGS = within("LegTimings")
_LAYOUT = within("KvLayout")
_REGISTRATION = within("Registration")
_HAND_OFF = within("HandOffRequest")
_LOGPROB = within("PositionLogprobs")["logprob"]
_DRAIN_SECONDS = within("Drain")["deadline_seconds"]
_EPOCH = within("RoleChange")["epoch"]

grammars = st.builds(
    Grammar,
    kind=st.sampled_from(("json_schema", "json_object", "regex", "choice", "ebnf", "gbnf", "lark")),
    text=TEXTS,
)
sampling = st.builds(
    SamplingParams,
    temperature=_SAMPLING["temperature"],
    top_k=_SAMPLING["top_k"],
    top_p=_SAMPLING["top_p"],
    seed=_SAMPLING["seed"],
    max_tokens=_SAMPLING["max_tokens"],
    min_tokens=_SAMPLING["min_tokens"],
    stop_token_ids=TOKEN_IDS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | _SAMPLING["logprobs"],
    prompt_logprobs=st.none() | _SAMPLING["prompt_logprobs"],
    min_p=_SAMPLING["min_p"],
    presence_penalty=_SAMPLING["presence_penalty"],
    frequency_penalty=_SAMPLING["frequency_penalty"],
    repetition_penalty=_SAMPLING["repetition_penalty"],
    logit_bias=st.lists(st.tuples(UINT32, _SAMPLING["biases"]), max_size=3).map(tuple),
    allowed_token_ids=TOKEN_IDS,
    grammar=st.none() | grammars,
)
send_transfers = st.builds(SendTransfer, transfer_id=NAMES)
receive_transfers = st.builds(
    ReceiveTransfer, transfer_id=NAMES, peer_worker_id=TEXTS, peer_boot_id=TEXTS, peer_control=NAMES
)


def requests(
    transfers: st.SearchStrategy[SendTransfer | ReceiveTransfer | None],
    pooling: PoolingParams | None = None,
) -> st.SearchStrategy[EngineRequest]:
    """Requests of one kind of leg, or embeddings; with every field that is sent to a worker."""
    return st.builds(
        EngineRequest,
        request_id=NAMES,
        prompt_token_ids=st.lists(UINT32, min_size=1, max_size=4),
        sampling=st.just(SamplingParams()) if pooling else sampling,
        eos_token_ids=TOKEN_IDS,
        attempt=_TASK["attempt"],
        choice=_TASK["choice"],
        num_choices=st.integers(1, MAX_CHOICES),
        first_index=_TASK["first_index"],
        client_index=st.just(0),
        priority=_TASK["priority"],
        cache_salt=TEXTS,
        tenant=TEXTS,
        deadline_seconds=_TASK["deadline_seconds"],
        transfer=transfers,
        lora_request=st.none(),
        pooling_params=st.just(pooling),
        multi_modal_inputs=st.just(()),
    )


prefills = requests(send_transfers)
decodes = requests(st.none() | receive_transfers)

logprobs = st.lists(st.tuples(UINT32, _LOGPROB), max_size=3).flatmap(
    lambda top: st.builds(
        TokenLogprobs,
        token_id=UINT32,
        logprob=_LOGPROB,
        rank=within("PositionLogprobs")["rank"],
        top_token_ids=st.just(tuple(token for token, _ in top)),
        top_logprobs=st.just(tuple(value for _, value in top)),
    )
)
timings = st.builds(
    RequestTimings,
    queue_seconds=_TIMINGS["queue_seconds"],
    prefill_seconds=_TIMINGS["prefill_seconds"],
    transfer=st.builds(
        TransferReport,
        exposed_seconds=_TIMINGS["transfer_exposed_seconds"],
        hidden_seconds=_TIMINGS["transfer_hidden_seconds"],
        num_bytes=_TIMINGS["transfer_bytes"],
        num_pieces=_TIMINGS["transfer_pieces"],
        copying_seconds=_TIMINGS["transfer_copying_seconds"],
        waiting_seconds=_TIMINGS["transfer_waiting_seconds"],
    ),
    held_seconds=_TIMINGS["held_seconds"],
)
outputs = st.builds(
    EngineOutput,
    request_id=TEXTS,
    attempt=UINT32,
    choice=UINT32,
    first_index=UINT32,
    token_ids=st.lists(UINT32, max_size=3),
    logprobs=st.none() | st.lists(logprobs, min_size=1, max_size=2),
    is_leg_finished=st.just(False),
    handed_over=st.booleans(),
    is_rejected=st.booleans(),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | UINT32,
    num_cached_tokens=st.none() | UINT32,
    prompt_logprobs=st.none() | st.lists(logprobs, min_size=1, max_size=2),
    timings=st.none() | timings,
    pooled=st.none() | st.lists(FLOAT32, min_size=1, max_size=3),
    error_kind=st.none() | NAMES,
    error_message=st.none() | NAMES,
    error_param=st.none() | NAMES,
)

layouts = st.builds(KVLayout, dtype=TEXTS, parts=st.sampled_from([KEY_VALUE, LATENT]), **_LAYOUT)
registrations = st.builds(
    Registration,
    protocol_min=_REGISTRATION["protocol_min"],
    protocol_max=_REGISTRATION["protocol_max"],
    worker_id=TEXTS,
    boot_id=TEXTS,
    role=TEXTS,
    address=TEXTS,
    control_address=TEXTS,
    model_name=TEXTS,
    model_fingerprint=TEXTS,
    kv_layout=st.none() | layouts,
    max_model_len=_REGISTRATION["max_model_len"],
    num_blocks=_REGISTRATION["num_blocks"],
    vocab_size=_REGISTRATION["vocab_size"],
    admin_address=TEXTS,
    pid=_REGISTRATION["pid"],
    embeds_only=st.booleans(),
    build=TEXTS,
    weights_epoch=_REGISTRATION["weights_epoch"],
)
welcomes = st.builds(Welcome, protocol=within("Welcome")["protocol"], router_id=TEXTS, session=TEXTS)
loads = st.builds(
    Load,
    num_running=_LOAD["num_running"],
    num_waiting=_LOAD["num_waiting"],
    kv_cache_usage=_LOAD["kv_cache_usage"],
    queued_prompt_tokens=st.none() | _LOAD["queued_prompt_tokens"],
    num_free_blocks=st.none() | _LOAD["num_free_blocks"],
    num_leases=st.none() | _LOAD["num_leases"],
    num_fetches=st.none() | _LOAD["num_fetches"],
    prefill_seconds_per_token=st.none() | _LOAD["prefill_seconds_per_token"],
    step_seconds=st.none() | _LOAD["step_seconds"],
    prefix_cache_queries=st.none() | _LOAD["prefix_cache_queries"],
    prefix_cache_hits=st.none() | _LOAD["prefix_cache_hits"],
)
credits = st.builds(
    Credit,
    max_requests=_CREDIT["max_requests"],
    max_tokens=_CREDIT["max_tokens"],
    number=_CREDIT["number"],
    is_draining=st.booleans(),
    drain_seconds=_CREDIT["drain_seconds"],
    is_empty=st.booleans(),
)
roles = st.builds(RoleOrder, role=TEXTS, epoch=_EPOCH)
loaded_weights = st.builds(LoadedWeights, model_fingerprint=TEXTS, epoch=_EPOCH)
reload_orders = st.builds(ReloadOrder, step=TEXTS, epoch=_EPOCH)
reload_reports = st.builds(ReloadReport, model_fingerprint=TEXTS, error=TEXTS, is_lost=st.booleans())
drains = st.builds(DrainOrder, deadline_seconds=st.none() | _DRAIN_SECONDS)
credit_uses = st.builds(CreditUse, **_USE)
hand_offs = st.tuples(
    st.builds(
        HandOff,
        request_id=TEXTS,
        attempt=st.integers(0, 2**31),
        choice=_HAND_OFF["choice"],
        transfer_id=NAMES,
        next_attempt=st.integers(2**31 + 1, 2**32 - 1),
    ),
    _HAND_OFF["deadline_seconds"],
)
cancels = st.tuples(TEXTS, UINT32, st.none() | within("CancelRequest")["choice"])
pieces = st.tuples(TEXTS, st.binary(max_size=8))
steps = st.tuples(st.lists(outputs, max_size=2), st.none() | loads)
