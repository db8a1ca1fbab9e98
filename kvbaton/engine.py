"""One engine in the caller's process, which the caller steps."""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from os import PathLike, fspath
from typing import Any, Self

from contract.errors import InvalidRequestError, KvbatonError, SettingError, UnavailableError
from contract.identity import Role
from contract.outputs import EngineOutput
from engine.core import EngineCore, reload_weights
from engine.options import EngineOptions
from engine.settings import EngineSettings
from kvbaton.outputs import RequestOutput
from kvbaton.requests import PromptType
from kvbaton.running_request import RunningRequest, check_request
from kvbaton.sampling import SamplingParams
from kvbaton.service import LLMSettings
from launch.arguments import parse, to_arguments
from launch.command_settings import from_file
from launch.model import check_model, find_model, model_name
from launch.processes import worker_places
from launch.settings import available_cores
from text.model_card import ModelCard

_SETTINGS = frozenset({"device", "num_threads"}) | EngineOptions.names() - {"data_parallel_size"}


class Engine:
    """A model in this process, which computes only while ``step`` runs; ready when the constructor returns.

    model, settings: as for ``LLM``, with every option of an engine (``kvbaton up --help``); unset ones come from
    ``KVBATON_*`` variables, then the file of ``KVBATON_CONFIG``, then the defaults. Use it as a context manager, or
    ``close`` it; it ends with this process at the latest. For one thread. Raises SettingError for an invalid argument.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **settings: Any) -> None:
        of_engine = engine_settings(model, settings, "an Engine")
        self._woken = threading.Event()
        with ExitStack() as resources:
            self._card = ModelCard.from_folder(of_engine.model, model_name(fspath(model)))
            resources.callback(self._card.close)
            self._core = EngineCore(of_engine, wake=self._woken.set)
            resources.callback(self._core.close)
            # Also called when the engine is garbage, or the interpreter exits, before it was closed.
            self._close = weakref.finalize(self, resources.pop_all().close)
        self._numbers = count()
        self._running: dict[str, RunningRequest] = {}
        self._ready: dict[str, RequestOutput] = {}
        self._errors: deque[KvbatonError] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free its memory; requests that have not finished are dropped. A second call does nothing."""
        self._close()
        self._running.clear()
        self._ready.clear()
        self._errors.clear()

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Check and queue a request; nothing is computed before the next ``step``.

        request_id: not that of a request that has not finished. prompt: text, token ids, or an object with either. priority:
        higher runs earlier. Raises InvalidRequestError, which names the request; UnavailableError after ``close``.
        """
        self._check_open()
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id is {request_id!r:.60}; it must be a text", param="request_id"
            )
        if request_id in self._running:
            raise InvalidRequestError(f"request {request_id} has not finished; give the new one another id")
        # The id of an aborted request may come again, while outputs of the old one are still to come.
        name = f"{request_id}/{next(self._numbers)}"
        info = self._core.info
        running = check_request(request_id, name, prompt, sampling_params, priority, self._card, info)
        self._running[request_id] = running
        self._core.add_request(running.engine_request)

    def abort_request(self, request_id: str) -> None:
        """End a request: no step returns anything of it from now on. An unknown one is ignored."""
        self._ready.pop(request_id, None)
        if running := self._running.pop(request_id, None):
            self._core.abort(running.engine_request.keys)

    def reload_weights(self) -> None:
        """Read the weights of the model's folder again, and drop the prefix cache; new answers are those of the new ones.

        Files are replaced by renaming, since the old ones are in use until then. Raises InvalidRequestError while a request
        has not finished, SettingError if the folder has another model now: other sizes, tensors or end tokens. Nothing has
        changed then; any other error closes the engine. Raises UnavailableError after ``close``.
        """
        self._check_open()
        if self._running:
            raise InvalidRequestError(
                f"request {next(iter(self._running))} has not finished: weights are reloaded when none is left"
            )
        try:
            reload_weights(self._core)
        except (InvalidRequestError, SettingError):
            raise
        except BaseException:
            self.close()
            raise

    def has_unfinished_requests(self) -> bool:
        """Return whether ``step`` still has outputs or errors to give."""
        return bool(self._running or self._ready or self._errors)

    def step(self) -> list[RequestOutput]:
        """Advance every running request by one token, or by a chunk of its prompt; return the answers that have grown.

        Each contains the whole answer until now; ``finished`` is True in a request's last one. Waits if all requests wait,
        as for a grammar that is compiled. Without requests it returns an empty list.

        Raises the error of a request that cannot be answered, which names it and is its end; the next call continues with
        the other requests. Any other exception in the middle of a step, Ctrl-C among them, closes the engine. Raises
        UnavailableError after ``close``.
        """
        self._check_open()
        # What a step before has left behind its error.
        if self._running and not self._ready and not self._errors:
            self._compute()
        if self._errors:
            raise self._errors.popleft()
        outputs = list(self._ready.values())
        self._ready.clear()
        return outputs

    def _check_open(self) -> None:
        if not self._close.alive:
            raise UnavailableError("this Engine is closed")

    def _compute(self) -> None:
        """Run one step of the core, as soon as it would change something."""
        self._woken.clear()  # before the look: what happens after it ends the wait
        if self._core.seconds_to_start() is None:
            self._woken.wait(self._core.seconds_to_deadline())
            self._core.request_step()
        # A step that is cut off leaves scheduler and model in different states: the engine cannot go on.
        with ExitStack() as undo:
            undo.callback(self.close)
            outputs = self._core.step()
            undo.pop_all()
        for of_client in outputs.values():
            for output in of_client:
                self._process_output(output)

    def _process_output(self, output: EngineOutput) -> None:
        request_id = output.request_id.rpartition("/")[0]
        running = self._running.get(request_id)
        if running is None or running.engine_request.request_id != output.request_id:
            return
        try:
            if running.on_output(output):
                self._core.abort([output.key])
        except KvbatonError as error:
            self._errors.append(error)
            self.abort_request(request_id)
            return
        self._ready[request_id] = running.output()
        if running.is_finished:
            del self._running[request_id]


def engine_settings(model: str | PathLike[str], settings: Mapping[str, Any], whose: str) -> EngineSettings:
    """Return the settings of the one aggregated worker that ``LLM`` would start.

    whose: begins the error about a setting that is none. Raises SettingError.
    """
    if unknown := sorted(settings.keys() - _SETTINGS):
        raise SettingError(
            f"{whose} has no setting {unknown[0]}; it has {', '.join(sorted(_SETTINGS))}", param=unknown[0]
        )
    shared = parse(LLMSettings, "kvbaton up", to_arguments({"model": fspath(model), **settings}))
    folder = find_model(shared.model)
    check_model(shared, folder)
    given: Mapping[str, Any] = from_file(shared, Role.AGGREGATED)
    options = {
        **EngineOptions.values_in(shared),
        **{name: given[name] for name in given if name in EngineOptions.names()},
    }
    if options["data_parallel_size"] > 1:
        raise SettingError(
            f"data_parallel_size is {options['data_parallel_size']}: {whose} is one engine; use LLM or kvbaton up",
            param="data_parallel_size",
        )
    (place,) = worker_places(shared)[Role.AGGREGATED]
    return EngineSettings(
        **options,
        model=folder,
        device=place.device or shared.device,
        num_threads=shared.num_threads or len(available_cores()),
    )
