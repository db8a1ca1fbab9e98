"""The preparation of a move: what would take the target long is done while the source continues the answer.

1. The target compiles the answer's grammar. That takes up to a second where nothing is cached and the cores are busy, and
   the target may have to read its vocabulary first. It also follows the tokens that are known by now, so that the masks of
   the rest need little more. What is left for the leg to do does not wait for other compilations
   (``engine/grammar/compiler.py``).
2. The target connects to the source. Two workers that decode have read nothing from each other until an answer moves between
   them, so otherwise nearly every drain would begin with that. KV of a source that is connected already can be read before
   the target's next step (``kv_transfer/data/data_half.py``).

A second target is not prepared: the source has ended the answer by then, and the leg itself begins with both at once.
"""

import logging
from weakref import WeakKeyDictionary, WeakSet

from contract.errors import ErrorKind, KvbatonError
from contract.requests import EngineRequest, ReceiveTransfer
from router.attempts.request_run import RequestRun
from router.workers.attached_worker import AttachedWorker
from serving.event_loop import ends_within
from wire.legs import decode_to_proto

logger = logging.getLogger(__name__)

PREPARATION_SECONDS = 2.0
"""The most time that a move waits for a preparation. Room at the target is reserved meanwhile."""


class Preparations:
    """Prepares targets, and remembers which sources they have been connected to."""

    def __init__(self) -> None:
        self._connected: WeakKeyDictionary[AttachedWorker, WeakSet[AttachedWorker]] = WeakKeyDictionary()

    async def prepare(self, run: RequestRun, source: AttachedWorker, target: AttachedWorker) -> bool:
        """Let the target prepare for an answer, if there is anything to do, and wait until that is over or takes too long.

        Returns False if the target seems to be lost. No other failure is a reason not to move: a preparation changes nothing
        but the time for which the client waits later, and the target may be of a version that has no such call.
        """
        sources = self._connected.setdefault(target, WeakSet())
        if run.request.sampling.grammar is None and source in sources:
            return True
        name = f"{run.request.request_id} from worker {source.name}"
        leg = decode_to_proto(_continuation_of(run, source))
        try:
            if await ends_within(target.calls.prepare(leg), PREPARATION_SECONDS, source.gone):
                sources.add(source)
            else:
                logger.info("worker %s is not prepared for %s yet", target.name, name)
        except KvbatonError as error:
            logger.info("worker %s is not prepared for %s: %s", target.name, name, error.message)
            return error.kind is not ErrorKind.WORKER_LOST
        return True


def _continuation_of(run: RequestRun, source: AttachedWorker) -> EngineRequest:
    """Return the request as the target would continue it now, but with the prompt's last token only: it computes nothing."""
    request = run.request
    peer = source.registration
    return EngineRequest(
        request_id=request.request_id,
        choice=request.choice,
        prompt_token_ids=[*request.prompt_token_ids[-1:], *run.known_tokens],
        sampling=request.sampling,
        eos_token_ids=request.eos_token_ids,
        first_index=len(run.known_tokens),
        transfer=ReceiveTransfer(
            transfer_id=f"{request.request_id}.prepared",  # nothing is lent or fetched under it
            peer_worker_id=peer.worker_id,
            peer_boot_id=peer.boot_id,
            peer_control=peer.control_address,
        ),
    )
