"""``POST /admin/reload_weights``: all workers of a service read the weights of their folders again, without a restart.

1. Every worker offers no credit any more, to any router. New requests wait in the routers' queues, and running ones end.
2. When no worker computes or lends anything, all read their weights at the same time.
3. The weights that most workers have read are served from then on. The others are detached.

Until step 2 an error, or the end of the time, lets everything go on as before.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from aiohttp import web

from contract.errors import InvalidRequestError, KvbatonError
from contract.layout import weights_of
from contract.membership import LoadedWeights
from router.admin.api import answering
from router.request_path import RequestPath
from router.workers.attached_worker import AttachedWorker
from router.workers.worker_calls import ReloadCall
from serving.admin import json_answer, seconds_in
from serving.admin_access import AdminAccess
from serving.errors import openai_error

logger = logging.getLogger(__name__)
_WAIT_SECONDS = 60.0
_REPORT_SECONDS = 5.0
"""The time in which workers that have read their weights report them."""
_NUM_NAMES = 5
_T = TypeVar("_T")
Calls = Mapping[AttachedWorker, ReloadCall]
Refused = dict[AttachedWorker, str]
"""The reasons of workers that did not do so."""


class ReloadAdmin:
    """Serves the path on a router's admin port, which checks the access. access: names operators in the log."""

    def __init__(self, path: RequestPath, access: AdminAccess) -> None:
        self._path = path
        self._access = access

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [web.post("/admin/reload_weights", answering(self._reload))]

    async def _reload(self, request: web.Request) -> web.Response:
        """Reload the weights: 200 if all workers serve the same ones now, else 409 with the reasons of the others.

        ``wait`` is the time in seconds for running requests to end. Without ``model_fingerprint`` in the answer nothing has
        changed.
        """
        wait = seconds_in(request, "wait")
        logger.info("the weights are reloaded by %s", self._access.requester(request))
        workers = list(self._path.registry.workers)
        if not workers:
            return _answer({"workers": []}, "", {})
        async with AsyncExitStack() as stack:
            calls = {each: await stack.enter_async_context(each.calls.reloading()) for each in workers}
            if refused := await self._close(calls, _WAIT_SECONDS if wait is None else wait):
                error = "the weights are not reloaded, and nothing has changed"
                return _answer({"workers": []}, error, refused)
            return await self._load(calls)

    async def _close(self, calls: Calls, seconds: float) -> Refused:
        """Wait until no worker computes or lends anything; return why some still do, or cannot be reloaded."""
        tasks = {asyncio.create_task(call.close()): worker for worker, call in calls.items()}
        try:
            done, running = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
        if refused := {tasks[task]: _reason(error) for task in done if (error := task.exception())}:
            return refused
        if running:
            # By name, since the operator may wait for them or cancel them.
            open_runs = self._path.runs.open_runs
            names = sorted({run.request.request_id for run in open_runs if run.current.attempt})
            shown = ", ".join(names[:_NUM_NAMES]) or "none of this router"
            reason = f"it was not empty after {seconds:g} s; requests that run: {shown}"
            return {tasks[task]: reason for task in running}
        if others := set(self._path.registry.workers) ^ set(calls):
            return {each: f"worker {each.name} was attached or lost meanwhile" for each in others}
        # Its tokens are those of the former weights, so it must end before these are gone.
        if interrupted := [run.request.request_id for run in self._path.runs.open_runs if run.is_interrupted]:
            return dict.fromkeys(calls, f"request {interrupted[0]} waits to be continued; a worker was lost")
        return {}

    async def _load(self, calls: Calls) -> web.Response:
        """Have all workers read their weights, and serve those that most of them have."""
        epoch = time.time_ns() // 1000  # grows with each reload that any router orders
        refused: Refused = {}
        found = await _all(calls, lambda call: call.load(epoch), refused)
        if not found:
            return _answer({"workers": []}, "no worker has reloaded its weights", refused)
        weights = self._path.registry.weights
        chosen = Counter(map(weights_of, found.values())).most_common(1)[0][0]
        fingerprint = next(each for each in found.values() if weights_of(each) == chosen)
        # Before the workers report theirs: the first one would be served.
        weights.adopt(LoadedWeights(model_fingerprint=fingerprint, epoch=epoch))
        for worker in calls:
            weights.check(worker)
        epochs = {each: epoch if weights.fits(found[each]) else 0 for each in found}
        refused |= {
            each: f"worker {each.name} has read weights with fingerprint {found[each]}, and {fingerprint} is served"
            for each, number in epochs.items()
            if not number
        }
        by_name = {each.name: number for each, number in epochs.items()}
        answered = await _all(
            {each: calls[each] for each in found}, lambda call: call.serve(by_name[call.worker_id]), refused
        )
        served = [each for each in answered if epochs[each]]

        def have_reported() -> bool:
            return all(each.registration.weights_epoch == epoch or each.gone.is_set() for each in served)

        with suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._path.wait_until(have_reported)
        logger.info("the weights with fingerprint %s are served", fingerprint)
        answer = {"workers": [each.name for each in served], "model_fingerprint": fingerprint}
        return _answer(answer, "not all workers serve the weights that were read", refused)


async def _all(
    calls: Calls, order: Callable[[ReloadCall], Awaitable[_T]], refused: Refused
) -> dict[AttachedWorker, _T]:
    """Give all workers an order at once; return what they answer, and add the reasons of the others to ``refused``."""
    results = await asyncio.gather(*map(order, calls.values()), return_exceptions=True)
    answers: dict[AttachedWorker, _T] = {}
    for worker, result in zip(calls, results, strict=True):
        if isinstance(result, BaseException):
            refused[worker] = _reason(result)
        else:
            answers[worker] = result
    return answers


def _reason(error: BaseException) -> str:
    """Return why a worker has not carried out an order. Raises another error than such a reason."""
    if isinstance(error, KvbatonError):
        return error.message
    raise error


def _answer(answer: dict[str, Any], error: str, refused: Refused) -> web.Response:
    if not refused:
        return json_answer(answer)
    message = f"{error}: {'; '.join(dict.fromkeys(refused.values()))}"
    reasons = [{"id": worker.name, "reason": reason} for worker, reason in refused.items()]
    return json_answer(answer | openai_error(InvalidRequestError(message)) | {"refused": reasons}, status=409)
