"""Slots of states that are lent to another worker, and those that receive its states."""

from contract.block_hash import BlockHash
from contract.requests import ReceiveTransfer, choice_key
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.blocks.state_snapshots import StateSnapshots
from engine.scheduling.inspection import check_integrity
from tests.engine_scheduling.stepping import SEND, fake_request
from tests.engine_scheduling.test_state_slots import SIZE, engine_of
from tests.fakes.engine.fakes import fake_answer


def test_a_lent_slot_is_free_when_it_was_read() -> None:
    """The leg has ended, and the next request waits for its slot."""
    engine = engine_of(64, 1, with_connector=True)
    engine.add(fake_request("a", [5] * 10, transfer=SEND))
    engine.step()
    engine.add(fake_request("b", [6] * 6, max_tokens=3))
    engine.step(2)
    slots = engine.scheduler.pools.states
    assert slots is not None
    assert (slots.num_free, slots.holders()) == (0, {"lease:" + choice_key("a", 0, 0)})
    check_integrity(engine.scheduler)
    assert engine.connector.sends[choice_key("a", 0, 0)].pieces == [0]
    engine.connector.end_lease(choice_key("a", 0, 0))
    engine.run()
    assert engine.tokens(choice_key("b", 0, 0)) == fake_answer([6] * 6, 3)
    assert slots.num_free == 1


def test_a_slot_waits_for_the_end_of_a_read_into_it() -> None:
    """Nothing is reserved without one, and one that a cancelled read may write to is not free."""
    engine = engine_of(64, 1, with_connector=True)
    keys = [choice_key(name, 0, 0) for name in "ab"]
    for name, key in zip("ab", keys, strict=True):
        transfer = ReceiveTransfer(name, peer_worker_id="p", peer_boot_id="boot", peer_control="127.0.0.1:9")
        engine.add(
            fake_request(
                name, [5, 5, 5, 7 + (name == "b")] * 2, max_tokens=3, transfer=transfer, first_index=1
            )
        )
        engine.connector.publish_peer(key)
    engine.step()
    assert [engine.connector.fetches[key].state for key in keys] == ["reading", "published"]
    assert engine.connector.fetches[keys[0]].pieces == [0]
    engine.core.abort([keys[0]])
    engine.step()
    slots = engine.scheduler.pools.states
    assert slots is not None
    assert (slots.num_free, slots.holders()) == (0, set())
    state = engine.core.call("debug_state", [])
    assert state["state_slots"] == {"free": 0, "held": 0, "quarantined": 1}
    check_integrity(engine.scheduler)
    engine.connector.drain(keys[0])
    engine.step()
    assert engine.connector.fetches[keys[1]].state == "reading"
    engine.connector.land(keys[1])
    engine.run()
    prompt = [5, 5, 5, 8] * 2
    assert engine.tokens(keys[1]) == fake_answer(prompt, 3)[1:]


def test_a_slot_to_receive_into_is_not_copied_any_more() -> None:
    """A read may write before the copies of the next step are made: of the slot, for a snapshot, and into it."""
    snapshots = StateSnapshots(4, 4, SIZE)
    slots = StateSlots(3, snapshots)
    hashes = [BlockHash(bytes([number]) * 16) for number in range(32)]
    for holder in "ab":
        slots.allocate(holder)
        slots.save(holder, 64 if holder == "a" else 128, 100, hashes[:32])
        slots.free(holder)
    assert [source for source, _ in slots.copies] == [1, 1]
    assert slots.allocate_to_receive("c") == [3]
    assert slots.allocate_to_receive("d") == [2]
    assert (len(slots.copies), snapshots.num_kept) == (2, 2)
    assert slots.allocate_to_receive("e") == [1]
    assert (slots.copies, snapshots.num_kept) == ([], 0)
    slots.free("c")
    slots.allocate("f")
    slots.restore("f", 4)
    slots.free("f")
    slots.allocate_to_receive("g")
    assert slots.copies == []
    # The slot of a choice that has ended is needed until the other one has its copy.
    slots.free("d")
    slots.free("g")
    slots.allocate("first")
    slots.allocate("second")
    slots.fork("first", "second")
    slots.free("first")
    assert (slots.num_free, slots.next_to_receive) == (1, 0)
    slots.pop_copies()
    assert slots.next_to_receive > 0
    slots.check_integrity()
