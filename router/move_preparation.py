"""The preparation of a move: the target compiles the answer's grammar while the source continues the answer.

Otherwise the client would wait for it: a compilation takes up to a second where nothing is cached and the cores are busy,
and the target may have to read its vocabulary first. It also follows the tokens that are known by now, so that the masks
of the rest need little more. What is left for the leg to do does not wait for other compilations
(``engine/grammar/compiler.py``).
"""

import logging

from contract.errors import ErrorKind, KvbatonError
from contract.requests import EngineRequest
from router.attached_worker import AttachedWorker
from router.request_run import RequestRun
from serving.waiting import ends_within
from wire.tasks import task_to_proto

logger = logging.getLogger(__name__)

PREPARATION_SECONDS = 2.0
"""The most time that a move waits for a preparation. Room at the target is reserved meanwhile."""


async def prepare_target(run: RequestRun, source: AttachedWorker, target: AttachedWorker) -> bool:
    """Let the target compile the answer's grammar, if it has one, and wait until that is over or has taken too long.

    Returns False if the target seems to be lost. No other failure is a reason not to move: a preparation changes nothing but
    the time for which the client waits later, and the target may be of a version that has no such call.
    """
    if run.request.sampling.grammar is None:
        return True
    task = task_to_proto(_continuation_of(run))
    try:
        if not await ends_within(target.calls.prepare(task), PREPARATION_SECONDS, source.gone):
            logger.info("worker %s is still compiling the grammar of %s", target.name, task.request_id)
    except KvbatonError as error:
        logger.info("worker %s is not prepared for %s: %s", target.name, task.request_id, error.message)
        return error.kind is not ErrorKind.WORKER_LOST
    return True


def _continuation_of(run: RequestRun) -> EngineRequest:
    """Return the request as the target would continue it now, but with the prompt's last token only: it computes nothing."""
    request = run.request
    return EngineRequest(
        request_id=request.request_id,
        choice=request.choice,
        prompt_token_ids=[*request.prompt_token_ids[-1:], *run.known_tokens],
        sampling=request.sampling,
        eos_token_ids=request.eos_token_ids,
        first_index=run.num_known_tokens,
    )
