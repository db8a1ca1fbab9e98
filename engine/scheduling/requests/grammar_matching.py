"""The position of answers in their grammars: which tokens they may have next, and when they are complete."""

import logging

import numpy as np
from numpy.typing import NDArray

from contract.errors import InvalidRequestError, KvbatonError
from engine.grammar.matcher import GrammarMatcher
from engine.outputs import SchedulerOutput
from engine.scheduling.requests.finish import STUCK, Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.step_plan import StepPlan

logger = logging.getLogger(__name__)


def finish_by(request: Request, error: KvbatonError) -> Finish:
    """Return how a request finishes that cannot go on in its grammar because of ``error``.

    The client of an answer that has begun gets no error: the request is not at fault for what the model wrote.
    """
    if isinstance(error, InvalidRequestError) and request.num_tokens > _num_before(request):
        logger.info("request %s ends without its grammar's end: %s", request.key, error.message)
        return STUCK
    return Finish.by(error)


def advance_matcher(request: Request, matcher: GrammarMatcher) -> Finish | None:
    """Advance a request's matcher over its newest tokens; return how it finishes if nothing more is allowed."""
    try:
        matcher.advance(request.token_ids[_num_before(request) + matcher.num_tokens :])
    except KvbatonError as error:
        return finish_by(request, error)
    return Finish(RequestStatus.FINISHED_STOPPED) if matcher.is_complete else None


def _num_before(request: Request) -> int:
    """Return the number of known tokens before the answer's first one; a decode leg has its first token later."""
    return request.num_prompt_tokens - request.asked.num_delivered_tokens


def add_bitmask(plan: StepPlan, output: SchedulerOutput) -> None:
    """Add to ``output`` the tokens that requests with a grammar may sample in this step.

    A request whose answer is complete is in a step only if that step runs ahead; its token is discarded.
    """
    rows: list[NDArray[np.int32]] = []
    for entry in plan:
        request = entry.request
        matcher = request.structured_output_request
        if matcher is not None and not matcher.is_complete and entry.num_tokens == request.num_missing_tokens:
            output.structured_output_request_ids[request.key] = len(rows)
            rows.append(matcher.bitmask)
    if rows:
        output.grammar_bitmask = np.stack(rows)
