"""Slots of states against a plain model, in any order of events: none is lost, has two owners, or another text's state."""

from hashlib import blake2b

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.block_hash import BlockHash
from contract.state_layout import NO_SLOT
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.blocks.state_snapshots import StateSnapshots
from tests.soak_settings import machine_test

SIZE = 4
NUM_SLOTS = 4
NUM_SNAPSHOTS = 2
WORDS = st.sampled_from([1, 2])
Text = tuple[int, ...]
"""Each word stands for a block of tokens, and a text for the state behind it."""


def hashes_of(text: Text) -> list[BlockHash]:
    return [BlockHash(blake2b(bytes(text[:end]), digest_size=16).digest()) for end in range(1, len(text) + 1)]


class SlotMachine(RuleBasedStateMachine):
    """The model: the text of each request and lease, the slots that are read into, and what each slot contains.

    texts: by request that is computed; its prompt's length is beside it. leases: texts that are lent. reading: slots that
    are received into. late: quarantined ones. copied_into: requests whose states are copied by the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.snapshots = StateSnapshots(NUM_SLOTS + 1, NUM_SNAPSHOTS, SIZE)
        self.snapshots.unit = SIZE
        self.slots = StateSlots(NUM_SLOTS, self.snapshots)
        self.texts: dict[str, Text] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.leases: dict[str, Text] = {}
        self.reading: dict[str, int] = {}
        self.late: dict[str, int] = {}
        self.copied_into: set[str] = set()
        self.contents: dict[int, Text | None] = {}
        self.num_requests = 0

    def add(self, text: Text, num_prompt_words: int) -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.texts[name] = text
        self.num_prompt_tokens[name] = num_prompt_words * SIZE + 1
        return name

    def slot_of(self, holder: str) -> int:
        (slot,) = self.slots.table_of(holder)
        return slot

    @precondition(lambda self: self.slots.num_free)
    @rule(text=st.lists(WORDS, max_size=3).map(tuple))
    def start(self, text: Text) -> None:
        """Continue the longest beginning of which there is a snapshot."""
        found = [(end, self.snapshots.find(each)) for end, each in enumerate(hashes_of(text), 1)]
        end, snapshot = max(((end, slot) for end, slot in found if slot), default=(0, NO_SLOT))
        name = self.add(text[:end], len(text))
        self.slots.allocate(name)
        if snapshot:
            self.slots.restore(name, snapshot)
            self.copied_into.add(name)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Make all copies, then compute a word of each request; what is lent stays."""
        for source, target in self.slots.pop_copies():
            self.contents[target] = self.contents.get(source)
        self.copied_into.clear()
        for name, text in self.texts.items():
            slot = self.slot_of(name)
            assert not text or self.contents[slot] == text, f"{name} continues another state"
            text = (*text, data.draw(WORDS))
            self.texts[name] = self.contents[slot] = text
            self.slots.save(name, len(text) * SIZE, self.num_prompt_tokens[name], hashes_of(text))
        for lease, text in self.leases.items():
            assert self.contents[self.slot_of(lease)] == text, f"{lease} lends another state"

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        self.slots.free(name)
        del self.texts[name]

    @property
    def computed(self) -> list[str]:
        """Requests whose state is in their slot."""
        return sorted(name for name, text in self.texts.items() if text and name not in self.copied_into)

    @precondition(lambda self: self.computed and self.slots.num_free)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(self.computed))
        name = self.add(self.texts[first], len(self.texts[first]))
        self.slots.allocate(name)
        self.slots.fork(first, name)
        self.copied_into.add(name)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.computed))
        self.slots.hand_over(name, f"lease:{name}")
        self.leases[f"lease:{name}"] = self.texts.pop(name)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.slots.free(lease)
        del self.leases[lease]

    @precondition(lambda self: self.slots.next_to_receive != NO_SLOT)
    @rule()
    def receive(self) -> None:
        """A read may write at once."""
        self.num_requests += 1
        name = f"r{self.num_requests}"
        (slot,) = self.slots.allocate_to_receive(name)
        self.reading[name] = slot
        self.contents[slot] = None

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), text=st.lists(WORDS, min_size=1, max_size=3).map(tuple))
    def land(self, data: st.DataObject, text: Text) -> None:
        name = data.draw(st.sampled_from(sorted(self.reading)))
        self.contents[self.reading.pop(name)] = self.texts[name] = text
        self.num_prompt_tokens[name] = len(text) * SIZE

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reading)))
        self.slots.quarantine(name)
        self.late[name] = self.reading.pop(name)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """The last write lands, and the read is terminal."""
        name = data.draw(st.sampled_from(sorted(self.late)))
        self.contents[self.late.pop(name)] = None
        self.slots.release_quarantine(name)

    @invariant()
    def books_are_right(self) -> None:
        self.slots.check_integrity()
        assert self.slots.holders() == {*self.texts, *self.leases, *self.reading}
        written = {*self.reading.values(), *self.late.values()}
        held = [self.slot_of(holder) for holder in (*self.texts, *self.leases)]
        in_use = [*held, *self.reading.values(), *self.late.values()]
        assert len(set(in_use)) == len(in_use), "a slot has two owners"
        assert self.slots.num_free == NUM_SLOTS - len(in_use)
        for pair in self.slots.copies:
            assert written.isdisjoint(pair), "a slot is copied while a read writes into it"


TestSlots = machine_test(SlotMachine, 120, 50)
