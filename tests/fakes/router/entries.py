"""The messages of scripted legs, made of their scripts."""

from collections.abc import Sequence
from itertools import chain, repeat

from contract.errors import KvbatonError
from contract.outputs import FinishReason
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script


def token_entry(task: pb.Task, script: Script, index: int, chunk: Sequence[int], total: int) -> pb.TokenEntry:
    """Return the entry for tokens from ``index`` on. total: tokens of the whole answer."""
    is_first = index == task.first_index
    if script.surplus_tokens and index + len(chunk) == total:
        chunk = [*chunk, *([chunk[-1]] * script.surplus_tokens)]
        total += script.surplus_tokens
    is_last = index + len(chunk) == total
    was_cut = total < len(script.tokens)
    reason = FinishReason.LENGTH if was_cut else script.finish_reason
    return pb.TokenEntry(
        request_id=task.request_id,
        attempt=task.attempt,
        choice=task.choice,
        first_index=index,
        token_ids=chunk,
        logprobs=[_logprobs(t, script) for t in chunk] if task.sampling.HasField("logprobs") else [],
        finish_reason=reason.value if is_last else "",
        stop_reason=script.stop_reason if is_last and not was_cut else None,
        num_cached_tokens=script.num_cached_tokens if is_first else None,
        prompt_logprobs=_prompt_logprobs(task, script) if index == 0 else [],
        timings=script.timings if is_first else None,
    )


def embedding_entry(task: pb.Task, script: Script) -> pb.TokenEntry:
    """Return the entry with the embedding."""
    entry = token_entry(task, script, 0, (), len(script.tokens))
    entry.finish_reason = FinishReason.STOP.value
    entry.pooled[:] = script.embedding
    return entry


def handed_over_entry(order: pb.HandOffRequest, next_index: int) -> pb.TokenEntry:
    """Return the entry that ends a leg which was handed off after ``next_index`` tokens of the answer."""
    return pb.TokenEntry(
        request_id=order.request_id,
        attempt=order.attempt,
        choice=order.choice,
        first_index=next_index,
        handed_over=True,
    )


def error_entry(task: pb.Task, error: KvbatonError) -> pb.TokenEntry:
    """Return the entry that ends a leg with an error."""
    return pb.TokenEntry(
        request_id=task.request_id,
        attempt=task.attempt,
        choice=task.choice,
        finish_reason=FinishReason.ERROR.value,
        error_kind=error.kind.value,
        error_message=error.message,
        error_param=error.param or "",
    )


def rejection_entry(task: pb.Task, error: KvbatonError) -> pb.TokenEntry:
    """Return the entry with which a leg is rejected."""
    entry = error_entry(task, error)
    entry.is_rejected = True
    return entry


def _prompt_logprobs(task: pb.Task, script: Script) -> list[pb.PositionLogprobs]:
    if not task.sampling.HasField("prompt_logprobs"):
        return []
    pairs = zip(task.prompt_token_ids[1:], chain(script.prompt_logprobs, repeat(-1.0)), strict=False)
    return [pb.PositionLogprobs(token_id=token, logprob=value, rank=1) for token, value in pairs]


def _logprobs(token: int, script: Script) -> pb.PositionLogprobs:
    """Return the script's log probabilities, best first; the sampled token's is −1 if the script has none."""
    best = sorted(script.logprobs.items(), key=lambda item: -item[1])
    rank = next((i for i, (found, _) in enumerate(best, 1) if found == token), len(best) + 1)
    return pb.PositionLogprobs(
        token_id=token,
        logprob=script.logprobs.get(token, -1.0),
        rank=rank,
        top_token_ids=[found for found, _ in best],
        top_logprobs=[value for _, value in best],
    )
