"""The weights that a router serves: those of its first worker, until workers report a later reload.

KV and tokens of different weights must never meet (law 7). So a worker with other weights is refused when it attaches, and
detached as soon as it offers credit. While its weights are reloaded it offers none, so that it may report them later than
others do.
"""

import logging
from collections.abc import Iterable

from msgspec import structs

from contract.layout import weights_of
from contract.membership import LoadedWeights
from router.workers.attached_worker import AttachedWorker

logger = logging.getLogger(__name__)


class ServedWeights:
    """Owns the fingerprint that a router serves. epoch: the number of the reload; a greater one counts for all workers."""

    def __init__(self) -> None:
        self.fingerprint: str | None = None
        self.epoch = 0

    def fits(self, fingerprint: str) -> bool:
        """Return whether these weights are served; their dtype does not matter."""
        return self.fingerprint is None or weights_of(fingerprint) == weights_of(self.fingerprint)

    def accepts(self, loaded: LoadedWeights) -> bool:
        """Return whether a worker with these weights may attach."""
        return self.fits(loaded.model_fingerprint) or loaded.epoch > self.epoch

    def adopt(self, loaded: LoadedWeights) -> None:
        """Serve the weights that a worker has, if no others are served, or if their reload is a later one."""
        if self.accepts(loaded):
            self.fingerprint = loaded.model_fingerprint
            self.epoch = max(self.epoch, loaded.epoch)

    def on_loaded(
        self, worker: AttachedWorker, loaded: LoadedWeights, workers: Iterable[AttachedWorker]
    ) -> None:
        """Record the weights that a worker has loaded, and what follows for it and the others."""
        epoch = loaded.epoch
        worker.registration = structs.replace(
            worker.registration, model_fingerprint=loaded.model_fingerprint, weights_epoch=epoch
        )
        self.adopt(loaded)
        for each in workers:
            self.check(each)

    def check(self, worker: AttachedWorker) -> None:
        """Detach a worker that offers credit with other weights. Call it when one of these has changed."""
        fingerprint = worker.registration.model_fingerprint
        if worker.capacity.credit.max_requests and not self.fits(fingerprint):
            logger.warning(
                "worker %s is detached: it has weights with fingerprint %s, this router serves %s",
                worker.name,
                fingerprint,
                self.fingerprint,
            )
            worker.leave()
            worker.gone.set()
