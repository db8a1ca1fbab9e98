"""Between the router's objects and the messages of workers."""

import time
from collections.abc import Sequence

from contract.errors import KvbatonError, WorkerLostError, error_from_kind
from contract.requests import FinishReason, Grammar, SamplingParams, TokenLogprobs, TransferReport
from protos import worker_pb2 as pb
from router.delivery import Token
from router.request import PreparedRequest


def task_message(
    request: PreparedRequest,
    *,
    attempt: int,
    prompt: Sequence[int],
    first_index: int,
    num_choices: int,
    session: str,
) -> pb.Task:
    """Build the task of one leg. prompt: the request's prompt and the tokens that were delivered before this attempt."""
    has_delivered = len(prompt) > len(request.prompt_token_ids)
    return pb.Task(
        request_id=request.request_id,
        attempt=attempt,
        choice=request.choice,
        num_choices=num_choices,
        first_index=first_index,
        prompt_token_ids=prompt,
        sampling=None if request.is_embedding else _sampling_message(request.sampling, has_delivered),
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        deadline_seconds=max(0.001, request.deadline - time.monotonic()),
        session=session,
    )


def _sampling_message(sampling: SamplingParams, has_delivered: bool) -> pb.EngineSampling:
    return pb.EngineSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=None if has_delivered else sampling.prompt_logprobs,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        biased_token_ids=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        grammar=_grammar_message(sampling.grammar),
    )


def _grammar_message(grammar: Grammar | None) -> pb.Grammar | None:
    return None if grammar is None else pb.Grammar(kind=grammar.kind, text=grammar.text)


def error_of(entry: pb.TokenEntry, worker: str) -> KvbatonError:
    """Return the error with which a worker ended a leg."""
    if entry.finish_reason == FinishReason.ABORT:
        return WorkerLostError(f"worker {worker} gave the request up")
    message = f"worker {worker}: {entry.error_message}"
    return error_from_kind(entry.error_kind, message, entry.error_param or None)


def transfer_report_of(timings: pb.LegTimings) -> TransferReport:
    """Return what a decode worker measured of a hand-over."""
    return TransferReport(
        timings.transfer_exposed_seconds,
        timings.transfer_hidden_seconds,
        timings.transfer_bytes,
        timings.transfer_pieces,
        timings.transfer_copying_seconds,
    )


def logprobs_of(p: pb.PositionLogprobs) -> TokenLogprobs:
    """Return the log probabilities at one position."""
    return TokenLogprobs(p.token_id, p.logprob, p.rank, tuple(p.top_token_ids), tuple(p.top_logprobs))


def tokens_of(entry: pb.TokenEntry) -> list[Token]:
    """Return the tokens of an entry, each with its index and log probabilities."""
    logprobs = [logprobs_of(one) for one in entry.logprobs]
    return [
        Token(entry.first_index + i, token_id, logprobs[i] if i < len(logprobs) else None)
        for i, token_id in enumerate(entry.token_ids)
    ]
