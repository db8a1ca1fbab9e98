"""Converts the output of a worker's engine: ``EngineOutput`` with log probabilities and timings."""

from collections.abc import Iterable

from contract.decoding import shown
from contract.errors import InternalError
from contract.membership import Load
from contract.outputs import EngineOutput, FinishReason, RequestTimings, TokenLogprobs, TransferReport
from protos import worker_pb2 as pb
from wire.messages import check_numbers, to_proto


def step_to_proto(outputs: Iterable[EngineOutput], load: Load | None) -> pb.StepOutput:
    """Translate all outputs of one step, with the load if it has changed.

    The router converts each entry back (``output_from_proto``) only if a request waits for it.
    """
    return pb.StepOutput(
        entries=[output_to_proto(output) for output in outputs],
        load=None if load is None else to_proto(pb.Load, load),
    )


def output_to_proto(output: EngineOutput) -> pb.TokenEntry:
    """Translate one choice's new tokens of one step. ``is_leg_finished`` is not sent."""
    return pb.TokenEntry(
        request_id=output.request_id,
        choice=output.choice,
        attempt=output.attempt,
        first_index=output.first_index,
        token_ids=output.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in output.logprobs or ()],
        prompt_logprobs=[logprobs_to_proto(entry) for entry in output.prompt_logprobs or ()],
        finish_reason=output.finish_reason.value if output.finish_reason else "",
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        timings=None if output.timings is None else timings_to_proto(output.timings),
        error_kind=output.error_kind or "",
        error_message=output.error_message or "",
        error_param=output.error_param or "",
        pooled=output.pooled or (),
        handed_over=output.handed_over,
        is_rejected=output.is_rejected,
    )


def output_from_proto(entry: pb.TokenEntry) -> EngineOutput:
    """Translate one choice's new tokens of one step; empty fields become None.

    Raises BadNumberError, and InternalError for an unknown finish reason or log probabilities without their tokens.
    """
    check_numbers(entry)
    return EngineOutput(
        request_id=entry.request_id,
        choice=entry.choice,
        attempt=entry.attempt,
        first_index=entry.first_index,
        token_ids=entry.token_ids[:],
        logprobs=[*map(logprobs_from_proto, entry.logprobs)] if entry.logprobs else None,
        prompt_logprobs=[*map(logprobs_from_proto, entry.prompt_logprobs)] if entry.prompt_logprobs else None,
        finish_reason=_finish_reason(entry.finish_reason) if entry.finish_reason else None,
        stop_reason=entry.stop_reason if entry.HasField("stop_reason") else None,
        num_cached_tokens=entry.num_cached_tokens if entry.HasField("num_cached_tokens") else None,
        timings=timings_from_proto(entry.timings) if entry.HasField("timings") else None,
        error_kind=entry.error_kind or None,
        error_message=entry.error_message or None,
        error_param=entry.error_param or None,
        pooled=entry.pooled[:] if entry.pooled else None,
        handed_over=entry.handed_over,
        is_rejected=entry.is_rejected,
    )


def _finish_reason(name: str) -> FinishReason:
    try:
        return FinishReason(name)
    except ValueError:
        raise InternalError(f"{shown(name)!r} is no finish reason") from None


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.PositionLogprobs:
    """Translate the log probabilities at one position."""
    return pb.PositionLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from_proto(message: pb.PositionLogprobs) -> TokenLogprobs:
    """Translate the log probabilities at one position.

    Raises BadNumberError, and InternalError for log probabilities without their tokens.
    """
    check_numbers(message)
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InternalError(
            f"{len(message.top_logprobs)} log probabilities are for {len(message.top_token_ids)} tokens"
        )
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top_token_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def timings_to_proto(timings: RequestTimings) -> pb.LegTimings:
    """Translate one worker's timings of a request."""
    return pb.LegTimings(
        queue_seconds=timings.queue_seconds,
        prefill_seconds=timings.prefill_seconds,
        transfer_exposed_seconds=timings.transfer.exposed_seconds,
        transfer_hidden_seconds=timings.transfer.hidden_seconds,
        transfer_bytes=timings.transfer.num_bytes,
        transfer_pieces=timings.transfer.num_pieces,
        transfer_copying_seconds=timings.transfer.copying_seconds,
        transfer_waiting_seconds=timings.transfer.waiting_seconds,
        held_seconds=timings.held_seconds,
    )


def timings_from_proto(message: pb.LegTimings) -> RequestTimings:
    """Translate one worker's timings of a request."""
    check_numbers(message)
    return RequestTimings(
        queue_seconds=message.queue_seconds,
        prefill_seconds=message.prefill_seconds,
        transfer=TransferReport(
            exposed_seconds=message.transfer_exposed_seconds,
            hidden_seconds=message.transfer_hidden_seconds,
            num_bytes=message.transfer_bytes,
            num_pieces=message.transfer_pieces,
            copying_seconds=message.transfer_copying_seconds,
            waiting_seconds=message.transfer_waiting_seconds,
        ),
        held_seconds=message.held_seconds,
    )
