"""Between the wire's messages (protos) and the contract's: what router and engine mean by a request and its tokens."""

import msgspec

from contract.errors import InvalidRequestError
from contract.layout import KVLayout
from contract.requests import (
    EngineOutput,
    EngineRequest,
    Grammar,
    PoolingParams,
    ReceiveTransfer,
    RequestTimings,
    SamplingParams,
    SendTransfer,
    TokenLogprobs,
)
from protos import worker_pb2 as pb


def request_from_task(
    task: pb.Task,
    transfer: SendTransfer | ReceiveTransfer | None,
    pooling: PoolingParams | None = None,
) -> EngineRequest:
    """The engine's request for one leg; with ``pooling`` for an embedding.

    Raises InvalidRequestError for a task without id or prompt.
    """
    if not task.request_id or not task.prompt_token_ids:
        raise InvalidRequestError("a task needs a request id and a prompt")
    return EngineRequest(
        request_id=task.request_id,
        prompt_token_ids=list(task.prompt_token_ids),
        sampling=SamplingParams() if pooling else _sampling_from(task.sampling),
        eos_token_ids=tuple(task.eos_token_ids),
        attempt=task.attempt,
        choice=task.choice,
        num_choices=max(1, task.num_choices),
        first_index=task.first_index,
        priority=task.priority,
        cache_salt=task.cache_salt,
        tenant=task.tenant,
        deadline_seconds=task.deadline_seconds,
        transfer=transfer,
        pooling_params=pooling,
    )


def _sampling_from(sampling: pb.EngineSampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(sampling.biased_token_ids, sampling.biases, strict=True)),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        grammar=_grammar_from(sampling.grammar) if sampling.HasField("grammar") else None,
    )


def _grammar_from(grammar: pb.Grammar) -> Grammar:
    try:
        return msgspec.convert({"kind": grammar.kind, "text": grammar.text}, Grammar)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"this worker knows no grammar of kind {grammar.kind!r}", param="grammar"
        ) from error


def entry_from_output(output: EngineOutput) -> pb.TokenEntry:
    """One choice's new tokens of one step, as the router reads them."""
    return pb.TokenEntry(
        request_id=output.request_id,
        choice=output.choice,
        attempt=output.attempt,
        first_index=output.first_index,
        token_ids=output.token_ids,
        logprobs=[_logprobs_to(entry) for entry in output.logprobs or ()],
        prompt_logprobs=[_logprobs_to(entry) for entry in output.prompt_logprobs or ()],
        finish_reason=output.finish_reason.value if output.finish_reason else "",
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        timings=_timings_to(output.timings),
        error_kind=output.error_kind or "",
        error_message=output.error_message or "",
        error_param=output.error_param or "",
        pooled=output.pooled or (),
    )


def _logprobs_to(entry: TokenLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _timings_to(timings: RequestTimings | None) -> pb.LegTimings | None:
    if timings is None:
        return None
    return pb.LegTimings(
        queue_seconds=timings.queue_seconds,
        prefill_seconds=timings.prefill_seconds,
        transfer_exposed_seconds=timings.transfer.exposed_seconds,
        transfer_hidden_seconds=timings.transfer.hidden_seconds,
        transfer_bytes=timings.transfer.num_bytes,
        transfer_pieces=timings.transfer.num_pieces,
        transfer_copying_seconds=timings.transfer.copying_seconds,
    )


def layout_message(layout: KVLayout) -> pb.KvLayout:
    """What a registration says of the worker's blocks; ``layout`` is that over all its ranks."""
    return pb.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )
