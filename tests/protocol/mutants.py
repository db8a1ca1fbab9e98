"""Production's rules with one rule removed, each by a class that differs in that rule alone."""

from msgspec.structs import replace

from decode_service.kv_receiver import KVReceiver
from engine.scheduling.remote_kv import TransferStages
from engine.scheduling.requests.request import Request
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.protocol import events as ev
from prefill_service.kv_sender import KVSender
from tests.protocol.scenario import Rules


class NoQuarantine(FetchTransfers):
    """Frees the blocks of a cancelled fetch while reads into them are posted."""

    def cancel_fetch(self, key: str) -> bool:
        super().cancel_fetch(key)
        return True


class EagerReceiver(KVReceiver):
    """Reserves as soon as a request arrives, not only after the sender's first ``published``."""

    def start(self, request: Request) -> None:
        super().start(request)
        self._published.add(request)

    def process_events(self) -> None:
        super().process_events()
        for key in self._num_cached_blocks:
            self._published.remove(self._waiting[key])


class EagerReader(FetchTransfers):
    """Reads again as soon as one read has failed, though others into the same blocks are posted."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None and isinstance(event, ev.JobFailed) and not incoming.fetch.has_ended:
            incoming.fetch = replace(incoming.fetch, num_posted=1)
        super().fetch_event(key, event)


class TirelessReader(FetchTransfers):
    """Forgets the retry steps that were taken."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None and isinstance(event, ev.JobFailed):
            incoming.fetch = replace(incoming.fetch, retry_steps=())
        super().fetch_event(key, event)


NO_QUARANTINE = Rules(fetch_transfers=NoQuarantine)
NO_SECOND_CHECK = Rules(checks_lease_twice=False)
NO_ATTEMPT = Rules(tells_attempts_apart=False)
NO_NEXT_ATTEMPT = Rules(names_next_attempt=False)
EAGER_READING = Rules(fetch_transfers=EagerReader)
TIRELESS = Rules(fetch_transfers=TirelessReader)
NO_RESERVATION = Rules(reserves_first=False)
EARLY_LEAVE = Rules(leaves_unbound=False)
EAGER_RESERVATION = Rules(decode_stages=TransferStages(KVSender, EagerReceiver))
