"""Converts the output of a worker's engine: ``EngineOutput`` with log probabilities and timings."""

from collections.abc import Callable, Iterable
from typing import Any

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
    values: dict[str, Any] = {"request_id": ""}
    # most entries have three of the 17 fields, and to ask for one that is unset takes as long as for one that is set
    for field, value in entry.ListFields():
        name, read = _READERS[field]
        values[name] = value if read is None else read(value)
    if "pooled" in values:
        check_numbers(entry)
    return EngineOutput(**values)


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


_READ: dict[str, Callable[[Any], Any]] = {
    "token_ids": list,
    "logprobs": lambda entries: [*map(logprobs_from_proto, entries)],
    "prompt_logprobs": lambda entries: [*map(logprobs_from_proto, entries)],
    "finish_reason": _finish_reason,
    "timings": timings_from_proto,
    "pooled": list,
}
_READERS = {field: (field.name, _READ.get(field.name)) for field in pb.TokenEntry.DESCRIPTOR.fields}
"""Field of an entry → that of the output, and its reader; None for a value that is taken as it is."""
