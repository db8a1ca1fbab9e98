"""Production's rules with one rule removed, each by a class that differs in that rule alone."""

from itertools import chain

from msgspec.structs import replace

from decode_service.kv_receiver import KVReceiver
from engine.connector import Tables
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.remote_kv import TransferStages, lease_holder
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import StepPlan
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side
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


class OneGroupReader(FetchTransfers):
    """Reads, verifies and commits the blocks of the first group of layers alone."""

    def receive_into(
        self, key: str, block_ids: list[int], num_cached_blocks: int, other_groups: Tables = ()
    ) -> None:
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is None:
                return
            sections = incoming.announced.sections
            tables = zip(sections, (block_ids, *other_groups), strict=True)
            blocks = [table[section.places.start : section.places.stop] for section, table in tables]
            num_others = incoming.fetch.num_blocks - sections[0].end
            self._apply(
                incoming,
                fetch_side.reserve(
                    incoming.fetch, tuple(chain.from_iterable(blocks)), num_others, ((0, sections[0].end),)
                ),
            )


class OneGroupSender(KVSender):
    """Lends the blocks of the first group of layers; those of windows are freed as soon as the prompt is computed."""

    def _lease(self, request: Request) -> None:
        super()._lease(request)
        for pool in self._pools.pools[1:]:
            holder = lease_holder(request.key)
            pool.free_behind(holder, pool.num_blocks_of(holder))


class EarlySender(KVSender):
    """Publishes the whole prompt, and its slot, with the first chunk."""

    def publish(self, plan: StepPlan) -> None:
        for request in (entry.request for entry in plan.entries.values()):
            if request.is_sending and request.key not in self._open:
                self._publish(request, request.num_prompt_tokens)


class OneGroupQuarantine(KVReceiver):
    """Keeps the blocks of the first group of layers in quarantine, and frees those of windows."""

    def give_up(self, request: Request) -> bool:
        is_gone = super().give_up(request)
        for pool in self._pools.pools[1:]:
            if pool.is_quarantined(request.key):
                pool.release_quarantine(request.key)
        return is_gone


class UnlentSlots(StateSlots):
    """Frees the slot of a prompt that is computed, though the states in it are lent."""

    def hand_over(self, holder: str, new_holder: str) -> None:
        self.free(holder)


class UnquarantinedSlots(StateSlots):
    """Frees the slot of a request that has ended while a read into it is posted."""

    def quarantine(self, holder: str) -> None:
        self.free(holder)

    def release_quarantine(self, holder: str) -> None:
        """Do nothing: it is free."""


NO_QUARANTINE = Rules(fetch_transfers=NoQuarantine)
NO_SECOND_CHECK = Rules(checks_lease_twice=False)
NO_ATTEMPT = Rules(tells_attempts_apart=False)
NO_NEXT_ATTEMPT = Rules(names_next_attempt=False)
EAGER_READING = Rules(fetch_transfers=EagerReader)
TIRELESS = Rules(fetch_transfers=TirelessReader)
NO_RESERVATION = Rules(reserves_first=False)
EARLY_LEAVE = Rules(leaves_unbound=False)
ONE_GROUP_READ = Rules(fetch_transfers=OneGroupReader)
EARLY_STATES = Rules(prefill_stages=TransferStages(EarlySender, KVReceiver))
SLOT_NOT_LENT = Rules(state_slots=UnlentSlots)
SLOT_NOT_QUARANTINED = Rules(state_slots=UnquarantinedSlots)
ONE_GROUP_LENT = Rules(prefill_stages=TransferStages(OneGroupSender, KVReceiver))
ONE_GROUP_QUARANTINED = Rules(decode_stages=TransferStages(KVSender, OneGroupQuarantine))
EAGER_RESERVATION = Rules(decode_stages=TransferStages(KVSender, EagerReceiver))
