"""An engine in a process of its own, for programs with asyncio; several processes may share it."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import count
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from contract.errors import InvalidRequestError
from engine.attaching import AttachedClient
from engine.client import ProcessClient, StreamingClient
from kvbaton.engine import engine_settings
from kvbaton.outputs import RequestOutput
from kvbaton.requests import PromptType
from kvbaton.running_request import check_request
from kvbaton.sampling import SamplingParams
from launch.model import model_name
from text.model_card import ModelCard


class AsyncLLM:
    """A client of one engine process; ``start`` and ``attach`` return one that is ready.

    For the event loop in which it was made. Use it with ``async with``, or ``shutdown`` it.
    """

    def __init__(self, client: StreamingClient, card: ModelCard) -> None:
        self._client = client
        self._card = card
        self._numbers = count()

    @classmethod
    async def start(cls, model: str | PathLike[str] = "demo", **settings: Any) -> Self:
        """Start an engine, which ends with this process. From the main thread.

        model, settings: those of ``Engine``. Raises SettingError for an invalid argument, and the error that kept the engine
        from starting.
        """
        of_engine = engine_settings(model, settings, "an AsyncLLM")
        card = ModelCard.from_folder(of_engine.model, model_name(fspath(model)))
        try:
            return cls(await ProcessClient.start(of_engine), card)
        except BaseException:
            card.close()
            raise

    @classmethod
    async def attach(cls, address: str) -> Self:
        """Attach to an engine that another process of the same user has started. address: what ``share`` returned there.

        Raises UnavailableError if no engine is there.
        """
        client = await AttachedClient.attach(address)
        try:
            folder = client.info.model
            return cls(client, ModelCard.from_folder(Path(folder), model_name(folder)))
        except BaseException:
            await client.shutdown()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def share(self) -> str:
        """Return the address at which other processes ``attach``, any number of them, while this engine runs.

        It is a folder that only this user can enter. Raises InvalidRequestError if this client has attached itself.
        """
        return await self._client.share()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the whole answer until now, each time that it has grown; ``finished`` is True in the last one.

        prompt: text, token ids, or an object with either. request_id: stands in outputs and errors; None: a number.
        priority: higher runs earlier. Leaving the iteration aborts the request.

        Raises InvalidRequestError, which names the request; UnavailableError when the engine has ended; the error with
        which the engine has ended the request.
        """
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id is {request_id!r:.60}; it must be a text", param="request_id"
            )
        running = check_request(
            request_id,
            f"{request_id}/{number}",
            prompt,
            sampling_params,
            priority,
            self._card,
            self._client.info,
        )
        async with aclosing(self._client.generate(running.engine_request)) as outputs:
            async for output in outputs:
                if running.on_output(output):  # at a stop string: the engine sees tokens only
                    await self._client.abort(output.request_id, choice=output.choice)
                yield running.output()
                if running.is_finished:
                    return

    async def shutdown(self) -> None:
        """End the engine, or leave it if another process has started it. May be called twice."""
        await self._client.shutdown()
        self._card.close()
