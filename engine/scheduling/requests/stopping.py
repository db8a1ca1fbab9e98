"""The end of an answer: at a stop token, at a limit of its length, or where its grammar is complete or allows no more."""

import logging

import numpy as np
from numpy.typing import NDArray

from contract.errors import InvalidRequestError, KvbatonError
from engine.outputs import SchedulerOutput
from engine.scheduling.requests.finish import STUCK, Finish, RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import StepPlan

logger = logging.getLogger(__name__)


def finish_after(request: Request, index: int, max_length: int) -> Finish | None:
    """Return how the newest known token, number ``index`` (from 0) of the answer, ends it.

    A stop token counts from ``min_tokens`` on. If the answer continues, its matcher is advanced over the new tokens.
    """
    sampling = request.engine_request.sampling
    token = request.token_ids[-1]
    if token in request.stop_token_ids and index >= sampling.min_tokens:
        reason = token if token in sampling.stop_token_ids else None
        return Finish(RequestStatus.FINISHED_STOPPED, stop_reason=reason)
    if index + 1 >= sampling.max_tokens or len(request.token_ids) >= max_length:
        return Finish(RequestStatus.FINISHED_LENGTH_CAPPED)
    if (matcher := request.structured_output_request) is None:
        return None
    try:
        matcher.advance(request.token_ids[_num_before(request) + matcher.num_tokens :])
    except KvbatonError as error:
        return finish_by(request, error)
    return Finish(RequestStatus.FINISHED_STOPPED) if matcher.is_complete else None


def ends_with_next_token(request: Request, max_length: int) -> bool:
    """Return whether the next token of an answer ends it, whatever it is."""
    max_tokens = request.engine_request.sampling.max_tokens
    return request.answer_length + 1 >= max_tokens or len(request.token_ids) + 1 >= max_length


def stop_tokens(request: Request, max_length: int) -> frozenset[int] | None:
    """Return the tokens that might end the answer as its next one.

    None if any token might: by the answer's length or grammar, or as its first token.
    """
    if (
        ends_with_next_token(request, max_length)
        or request.structured_output_request
        or not request.is_decoding
    ):
        return None
    return request.stop_token_ids


def finish_by(request: Request, error: KvbatonError) -> Finish:
    """Return how a request finishes that cannot go on in its grammar because of ``error``.

    The client of an answer that has begun gets no error: the request is not at fault for what the model wrote.
    """
    if isinstance(error, InvalidRequestError) and request.num_tokens > _num_before(request):
        logger.info("request %s ends without its grammar's end: %s", request.key, error.message)
        return STUCK
    return Finish.by(error)


def _num_before(request: Request) -> int:
    """Return the number of known tokens before the answer's first one; a decode leg has its first token later."""
    return request.num_prompt_tokens - request.engine_request.num_delivered_tokens


def add_bitmask(plan: StepPlan, output: SchedulerOutput) -> None:
    """Add to ``output`` the tokens that requests with a grammar may sample in this step.

    A request whose answer is complete is in a step only if that step runs ahead; its token is discarded.
    """
    rows: list[NDArray[np.int32]] = []
    for entry in plan.entries.values():
        request = entry.request
        matcher = request.structured_output_request
        # A row only where a token is sampled: a chunk in the middle of a prompt needs no mask.
        num_known = entry.num_tokens - len(entry.drafts)
        if matcher is not None and not matcher.is_complete and num_known == request.num_missing_tokens:
            output.structured_output_request_ids[request.key] = len(rows)
            rows += [matcher.bitmask, *entry.bitmasks]
    if rows:
        output.grammar_bitmask = np.stack(rows)
