"""Hypothesis draws contract objects with every field, within the range of its number on the wire."""

from hypothesis import strategies as st

from contract.layout import KVLayout
from contract.membership import Credit, CreditUse, DrainOrder, Load, Registration, RoleOrder, Welcome
from contract.outputs import EngineOutput, FinishReason, RequestTimings, TokenLogprobs, TransferReport
from contract.requests import EngineRequest, HandOff, PoolingParams, ReceiveTransfer, SendTransfer
from contract.sampling import Grammar, SamplingParams

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
SINT32 = st.integers(-(2**31), 2**31 - 1)
SINT64 = st.integers(-(2**63), 2**63 - 1)
DOUBLES = st.floats(allow_nan=False)
FLOAT32 = st.floats(allow_nan=False, width=32)
TEXTS = st.text(max_size=8)
NAMES = st.text(min_size=1, max_size=8)
TOKEN_IDS = st.lists(UINT32, max_size=4).map(tuple)

grammars = st.builds(
    Grammar,
    kind=st.sampled_from(("json_schema", "json_object", "regex", "choice", "ebnf", "gbnf", "lark")),
    text=TEXTS,
)
sampling = st.builds(
    SamplingParams,
    temperature=DOUBLES,
    top_k=UINT32,
    top_p=DOUBLES,
    seed=SINT64,
    max_tokens=UINT32,
    min_tokens=UINT32,
    stop_token_ids=TOKEN_IDS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | UINT32,
    prompt_logprobs=st.none() | UINT32,
    min_p=DOUBLES,
    presence_penalty=DOUBLES,
    frequency_penalty=DOUBLES,
    repetition_penalty=DOUBLES,
    logit_bias=st.lists(st.tuples(UINT32, DOUBLES), max_size=3).map(tuple),
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
        attempt=UINT32,
        choice=UINT32,
        num_choices=st.integers(1, 2**32 - 1),
        first_index=UINT32,
        client_index=st.just(0),
        arrival_time=st.just(0.0),
        priority=SINT32,
        cache_salt=TEXTS,
        tenant=TEXTS,
        deadline_seconds=DOUBLES,
        transfer=transfers,
        lora_request=st.none(),
        pooling_params=st.just(pooling),
        multi_modal_inputs=st.just(()),
    )


prefills = requests(send_transfers)
decodes = requests(st.none() | receive_transfers)

logprobs = st.builds(
    TokenLogprobs,
    token_id=UINT32,
    logprob=DOUBLES,
    rank=UINT32,
    top_token_ids=TOKEN_IDS,
    top_logprobs=st.lists(DOUBLES, max_size=3).map(tuple),
)
timings = st.builds(
    RequestTimings,
    queue_seconds=DOUBLES,
    prefill_seconds=DOUBLES,
    transfer=st.builds(
        TransferReport,
        exposed_seconds=DOUBLES,
        hidden_seconds=DOUBLES,
        num_bytes=UINT64,
        num_pieces=UINT32,
        copying_seconds=DOUBLES,
        waiting_seconds=DOUBLES,
    ),
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

layouts = st.builds(
    KVLayout, num_layers=UINT32, num_kv_heads=UINT32, head_dim=UINT32, block_size=UINT32, dtype=TEXTS
)
registrations = st.builds(
    Registration,
    protocol_min=UINT32,
    protocol_max=UINT32,
    worker_id=TEXTS,
    boot_id=TEXTS,
    role=TEXTS,
    address=TEXTS,
    control_address=TEXTS,
    model_name=TEXTS,
    model_fingerprint=TEXTS,
    kv_layout=st.none() | layouts,
    max_model_len=UINT32,
    num_blocks=UINT32,
    vocab_size=UINT32,
    admin_address=TEXTS,
    pid=UINT32,
    embeds_only=st.booleans(),
    build=TEXTS,
)
welcomes = st.builds(Welcome, protocol=UINT32, router_id=TEXTS, session=TEXTS)
loads = st.builds(
    Load,
    num_running=UINT32,
    num_waiting=UINT32,
    kv_cache_usage=DOUBLES,
    queued_prompt_tokens=st.none() | UINT64,
    num_free_blocks=st.none() | UINT32,
    num_leases=st.none() | UINT32,
    num_fetches=st.none() | UINT32,
    prefill_seconds_per_token=st.none() | DOUBLES,
    step_seconds=st.none() | DOUBLES,
    prefix_cache_queries=st.none() | UINT64,
    prefix_cache_hits=st.none() | UINT64,
)
credits = st.builds(
    Credit,
    max_requests=UINT32,
    max_tokens=UINT64,
    number=UINT64,
    is_draining=st.booleans(),
    drain_seconds=DOUBLES,
    is_empty=st.booleans(),
)
roles = st.builds(RoleOrder, role=TEXTS, epoch=UINT64)
drains = st.builds(DrainOrder, deadline_seconds=st.none() | DOUBLES)
credit_uses = st.builds(CreditUse, number=UINT64, num_requests=UINT32, num_tokens=UINT64)
hand_offs = st.tuples(
    st.builds(
        HandOff,
        request_id=TEXTS,
        attempt=st.integers(0, 2**31),
        choice=UINT32,
        transfer_id=NAMES,
        next_attempt=st.integers(2**31 + 1, 2**32 - 1),
    ),
    DOUBLES,
)
cancels = st.tuples(TEXTS, UINT32, st.none() | UINT32)
pieces = st.tuples(TEXTS, st.binary(max_size=8))
steps = st.tuples(st.lists(outputs, max_size=2), st.none() | loads)
