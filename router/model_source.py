"""Where the router's knowledge of the model comes from: a folder, or the first worker that can be asked."""

import asyncio
import logging
import tempfile
import time
from pathlib import Path

from contract.errors import InternalError, KvbatonError, NotFoundError, UnavailableError
from router.attached_worker import AttachedWorker
from router.change_signal import ChangeSignal
from router.registry import Registry
from text.model_card import MODEL_FILES, ModelCard
from text.parsing.answer_format import ParserChoice

logger = logging.getLogger(__name__)

_MAX_BYTES = 256 * 2**20


class ModelSource:
    """Owns the model card, once there is one; ``changes`` is told then."""

    def __init__(
        self,
        changes: ChangeSignal,
        served_model_name: str | None = None,
        parsers: ParserChoice | None = None,
    ) -> None:
        self._changes = changes
        self._served_model_name = served_model_name
        self._parsers = parsers
        self._card: ModelCard | None = None
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self.known_since = 0
        """Unix time at which the card was read."""

    @property
    def is_known(self) -> bool:
        """True once the card has been read."""
        return self._card is not None

    def card(self) -> ModelCard:
        """The served model. Raises UnavailableError while no worker has said which one it is."""
        if self._card is None:
            raise UnavailableError("no worker is ready: none has given its model, so it is not known yet")
        return self._card

    def card_named(self, name: str | None) -> ModelCard:
        """The served model, if a client means that: by its name, or by none. Raises NotFoundError otherwise."""
        card = self.card()
        if name and name != card.name:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist; this service has `{card.name}`.",
                param="model",
                code="model_not_found",
            )
        return card

    async def settled(self) -> None:
        """Wait while a worker is being asked for its model: a request that arrives meanwhile need not be refused."""
        await self._is_settled.wait()

    async def read_folder(self, folder: Path, name: str | None = None) -> None:
        """Read the card from a folder. Raises SettingError that names what is missing."""
        shown_name = self._served_model_name or name
        card = await asyncio.to_thread(ModelCard.from_folder, folder, shown_name, self._parsers)
        _log_template(card)
        self._card = card
        self.known_since = int(time.time())
        self._changes.notify()

    def close(self) -> None:
        """End what renders chats; nothing is asked for afterwards."""
        if self._card is not None:
            self._card.close()

    async def learn(self, registry: Registry) -> None:
        """Block until a worker has given its model's files; a worker that cannot is passed over."""
        while not self.is_known:
            changed = self._changes.next
            for worker in registry.workers:
                if await self._learn_from(worker):
                    return
            await changed.wait()

    async def _learn_from(self, worker: AttachedWorker) -> bool:
        self._is_settled.clear()
        try:
            return await self._read_from(worker)
        finally:
            self._is_settled.set()

    async def _read_from(self, worker: AttachedWorker) -> bool:
        with tempfile.TemporaryDirectory(prefix="kvbaton-model-") as folder:
            try:
                await _fetch(worker, Path(folder))
                await self.read_folder(Path(folder), worker.registration.model_name or None)
            except KvbatonError as error:
                logger.warning("the model cannot be learnt from worker %s: %s", worker.name, error.message)
                return False
        logger.info("the model %s was learnt from worker %s", self.card().name, worker.name)
        return True


def _log_template(card: ModelCard) -> None:
    if card.chat_template is None:
        logger.info("the model %s has no chat template: chats are refused", card.name)
        return
    report = card.chat_template.report
    logger.info("chat template of %s: %s", card.name, report.line())
    for problem in report.problems():
        logger.warning("%s", problem)


async def _fetch(worker: AttachedWorker, folder: Path) -> None:
    """Write the worker's small model files into ``folder``; names that we do not know are left out."""
    files: dict[str, bytearray] = {}
    async for name, data in worker.calls.model_files():
        if name in MODEL_FILES:
            files.setdefault(name, bytearray()).extend(data)
        if sum(map(len, files.values())) > _MAX_BYTES:
            raise InternalError(f"worker {worker.name} sends model files of more than {_MAX_BYTES} bytes")
    for name, content in files.items():
        await asyncio.to_thread(_write, folder / name, bytes(content))


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
