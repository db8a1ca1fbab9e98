"""The position of answers in their grammars: which tokens they may have next, and when they are complete."""

import numpy as np
from numpy.typing import NDArray

from contract.errors import KvbatonError
from engine.grammar.matcher import GrammarMatcher
from engine.outputs import SchedulerOutput
from engine.scheduling.finish import Finish
from engine.scheduling.request import Request
from engine.scheduling.status import RequestStatus
from engine.scheduling.step_plan import StepPlan


def advance_matcher(request: Request, matcher: GrammarMatcher) -> Finish | None:
    """Advance a request's matcher over its newest tokens; return how it finishes if nothing more is allowed."""
    start = request.num_prompt_tokens - request.asked.num_delivered_tokens
    try:
        matcher.advance(request.token_ids[start + matcher.num_tokens :])
    except KvbatonError as error:
        return Finish.by(error)
    return Finish(RequestStatus.FINISHED_STOPPED) if matcher.is_complete else None


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
