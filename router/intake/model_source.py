"""The source of the model card: a folder, or the first worker that sends its model's files."""

import asyncio
import logging
import time
from pathlib import Path

from contract.errors import InternalError, KvbatonError, NotFoundError, UnavailableError
from contract.processes import RunFolder
from router.concurrency import ChangeSignal
from router.workers.attached_worker import AttachedWorker
from router.workers.registry import Registry
from serving.settings import listed
from text.model_card import MODEL_FILES, ModelCard
from text.parsing.answer_format import ParserChoice

logger = logging.getLogger(__name__)

_MAX_BYTES = 256 * 2**20


class ModelSource:
    """Owns the model card, and notifies ``changes`` when it is known.

    served_model_name: names for clients, separated by commas, of which answers have the first one unless the request has
    another; None: the folder's or the worker's. parsers: how answers are parsed.
    """

    def __init__(
        self,
        changes: ChangeSignal,
        served_model_name: str | None = None,
        parsers: ParserChoice | None = None,
    ) -> None:
        self._changes = changes
        self._given_names = listed(served_model_name or "")
        self._parsers = parsers
        self._card: ModelCard | None = None
        self._settling: asyncio.Event | None = None
        self.known_since = 0
        """Unix seconds at which the card was read."""

    @property
    def is_known(self) -> bool:
        """True once the card has been read."""
        return self._card is not None

    def card(self) -> ModelCard:
        """Return the served model. Raises UnavailableError while it is not known."""
        if self._card is None:
            raise UnavailableError("no worker is ready: none has given its model, so it is not known yet")
        return self._card

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the served model, the main one first. Raises UnavailableError while it is not known."""
        return self._given_names or (self.card().name,)

    def card_named(self, name: str | None) -> ModelCard:
        """Return the served model if ``name`` is its name or None. Raises NotFoundError, UnavailableError."""
        card = self.card()
        if name and name not in self.names:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist; this service has `{card.name}`.",
                param="model",
                code="model_not_found",
            )
        return card

    async def wait_settled(self) -> None:
        """Wait while a worker is sending its model, so that requests that arrive meanwhile are not rejected."""
        if self._settling:
            await self._settling.wait()

    async def read_folder(self, folder: Path, name: str | None = None) -> None:
        """Read the card from a folder. Raises SettingError that names what is missing."""
        shown_name = self._given_names[0] if self._given_names else name
        # a tokenizer of megabytes is parsed, which would stop the event loop for as long
        card = await asyncio.to_thread(ModelCard.from_folder, folder, shown_name, self._parsers)
        if card.chat_template is None:
            logger.info("the model %s has no chat template: chats are rejected", card.name)
        else:
            report = card.chat_template.report
            logger.info("chat template of %s: %s", card.name, report.line())
            for problem in report.problems():
                logger.warning("%s", problem)
        self._card = card
        self.known_since = int(time.time())
        self._changes.notify()

    def close(self) -> None:
        """Release the card's resources. Call it when no request is left."""
        if self._card is not None:
            self._card.close()

    async def load_from_workers(self, registry: Registry) -> None:
        """Block until a worker has sent its model's files; workers that cannot send them are skipped."""
        while not self.is_known:
            # taken before the look, so that a worker that attaches meanwhile is not missed
            changed = self._changes.next
            for worker in registry.workers:
                if await self._load_from(worker):
                    return
            await changed.wait()

    async def _load_from(self, worker: AttachedWorker) -> bool:
        self._settling = asyncio.Event()
        try:
            with RunFolder("model") as folder:
                await _fetch(worker, folder.path)
                await self.read_folder(folder.path, worker.registration.model_name or None)
        except KvbatonError as error:
            logger.warning("the model cannot be loaded from worker %s: %s", worker.name, error.message)
            return False
        finally:
            # whether it came or not, requests that waited for it go on
            self._settling.set()
            self._settling = None
        logger.info("the model %s was loaded from worker %s", self.card().name, worker.name)
        return True


async def _fetch(worker: AttachedWorker, folder: Path) -> None:
    """Write the worker's small model files into ``folder``; files with unknown names are skipped."""
    files: dict[str, bytearray] = {}
    async for name, data in worker.calls.model_files():
        # a name is a path below the folder, so only known ones are written
        if name in MODEL_FILES:
            files.setdefault(name, bytearray()).extend(data)
        # a worker is trusted with its model, but a broken one must not fill the router's memory
        if sum(map(len, files.values())) > _MAX_BYTES:
            raise InternalError(f"worker {worker.name} sent model files of more than {_MAX_BYTES} bytes")
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        await asyncio.to_thread(file.write_bytes, content)
