"""Hand-overs between workers of several ranks: real connectors and transports, torch-free pools, no processes."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from contract.errors import InternalError
from contract.identity import Role
from kv_transfer.protocol.events import NOT_NEEDED
from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, prompt_of, settings_for
from tests.kv_transfer.fakes import ByteMemory, GatedMemory
from tests.kv_transfer.played_ranks import SHARE, worker_of_ranks

NUM_BLOCKS = 5
SOURCE, TARGET = list(range(10, 10 + NUM_BLOCKS)), list(range(30, 30 + NUM_BLOCKS))


@dataclass
class Ranks:
    """Two workers of two ranks each, with every rank's pool, and one request."""

    pair: Pair
    prefill: list[ByteMemory]
    decode: list[ByteMemory]
    name: str = "r"
    prompt: list[int] = field(default_factory=lambda: prompt_of(NUM_BLOCKS))

    def fill(self) -> None:
        """Compute the prompt: every rank has another share of it."""
        for rank, memory in enumerate(self.prefill):
            for index, block in enumerate(SOURCE):
                memory.fill(block, f"rank {rank}, block {index};".encode())

    def has_arrived(self) -> bool:
        """Every rank has its own share."""
        return all(
            ours.read_view(target) == theirs.read_view(source)
            for ours, theirs in zip(self.decode, self.prefill, strict=True)
            for source, target in zip(SOURCE, TARGET, strict=True)
        )

    def fetch(self) -> str:
        """Ask for it, and go on when every rank has digested its share; the request's key.

        Whatever is written into the prefill worker's pools from then on is damage.
        """
        request, driver = self.pair.fetch_request(self.name, self.prompt), self.pair.decode.driver
        driver.receiver.start_fetch(request)
        driver.wait_for(lambda: request.key in driver.published, "published")
        sender = self.pair.prefill.driver
        sender.wait_for(
            lambda: sender.scheduler.debug_state()["leases"][0]["num_published"] == NUM_BLOCKS, "digested"
        )
        return request.key


@contextmanager
def ranks_over(transport: str, gated: GatedMemory | None = None) -> Iterator[Ranks]:
    """gated: the prefill worker's pool of rank 1."""
    prefill = [ByteMemory(SHARE, 64), gated or ByteMemory(SHARE, 64)]
    decode = [ByteMemory(SHARE, 64) for _ in range(2)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_of_ranks(settings_for(name, role, transport=transport), memories))
            for name, role, memories in (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode))
        ]
        yield Ranks(Pair(*workers), prefill, decode)


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
def test_every_rank_reads_its_own_share(transport: str) -> None:
    """Rank r reads rank r, straight into its pool; blocks and bytes are counted over all ranks."""
    with ranks_over(transport) as ranks:
        sender, receiver = ranks.pair.prefill.driver, ranks.pair.decode.driver
        ranks.fill()
        send = ranks.pair.send_request(ranks.name, ranks.prompt)
        sender.send_all(send, SOURCE, TOKENS)
        key = ranks.fetch()
        receiver.receiver.receive_into(key, TARGET, 0)
        receiver.wait_for(lambda: key in receiver.received, "received")
        assert ranks.has_arrived()
        assert [memory.committed for memory in ranks.decode] == [TARGET, TARGET]
        received = receiver.receiver.pop_received(key)
        assert (received.first_tokens, received.report.num_bytes) == (TOKENS, NUM_BLOCKS * LAYOUT.block_bytes)
        sender.wait_for(lambda: send.key in sender.sent, "sent")
        used = "shm" if transport == "auto" else transport
        assert ranks.pair.decode.count(f"transfer_blocks_total{{transport={used}}}") == 2 * NUM_BLOCKS
        assert (
            ranks.pair.decode.count(f"transfer_bytes_total{{transport={used}}}") == received.report.num_bytes
        )
        assert ranks.pair.decode.count("transfer_converted_blocks_total") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_in_one_rank_fails_the_whole(rank: int) -> None:
    """Every rank's share is verified by the digests of that rank, and the error names the rank."""
    with ranks_over("tcp") as ranks:
        sender, receiver = ranks.pair.prefill.driver, ranks.pair.decode.driver
        ranks.fill()
        sender.send_all(ranks.pair.send_request(ranks.name, ranks.prompt), SOURCE, TOKENS)
        key = ranks.fetch()
        ranks.prefill[rank].fill(SOURCE[3], b"something else")
        receiver.receiver.receive_into(key, TARGET, 0)
        receiver.wait_for(lambda: key in receiver.failed, "failed")
        assert f"block 3 of rank {rank} of transfer t-r" in receiver.failed[key].message
        assert [memory.committed for memory in ranks.decode] == [[], []]
        assert receiver.scheduler.debug_state()["quarantine"]["num_blocks"] == 0
        assert receiver.scheduler.debug_state()["data"]["current"] == []
        sender.wait_for(lambda: len(sender.sent) == 1, "sent")


def test_shares_of_two_ranks_cannot_be_mixed_up() -> None:
    """Were rank 0's blocks read in place of rank 1's, no digest would match."""
    with ranks_over("tcp") as ranks:
        receiver = ranks.pair.decode.driver
        ranks.fill()
        ranks.pair.prefill.driver.send_all(ranks.pair.send_request(ranks.name, ranks.prompt), SOURCE, TOKENS)
        key = ranks.fetch()
        for block in SOURCE:
            ranks.prefill[1].write_view(block)[:] = ranks.prefill[0].read_view(block)
        receiver.receiver.receive_into(key, TARGET, 0)
        receiver.wait_for(lambda: key in receiver.failed, "failed")
        assert "block 0 of rank 1" in receiver.failed[key].message


def test_a_rank_that_still_digests_keeps_the_blocks_lent() -> None:
    """An abandoned transfer is reported only when no rank looks at its blocks any more."""
    gated = GatedMemory(SHARE, 64)
    with ranks_over("tcp", gated) as ranks:
        sender = ranks.pair.prefill.driver
        ranks.fill()
        gated.gated_block = SOURCE[-1]
        send = ranks.pair.send_request(ranks.name, ranks.prompt)
        sender.sender.open_send(send, SOURCE, 0)
        sender.sender.publish(send.key, len(ranks.prompt))
        sender.step()
        assert gated.is_waiting.wait(30)
        sender.wait_for(lambda: sender.scheduler.debug_state()["data"]["uneven_ranges"], "rank 0 is ahead")
        sender.sender.abandon_send(send.key, NOT_NEEDED, "token 0 ended the answer")
        later = ranks.pair.fetch_request("later", ranks.prompt)
        ranks.pair.decode.driver.receiver.start_fetch(later)
        sender.wait_for(
            lambda: ranks.pair.prefill.count("transfers_parked"), "both ranks answered what came later"
        )
        assert sender.sent == []
        gated.gate.set()
        sender.wait_for(lambda: send.key in sender.sent, "sent")
        assert [lent["request"] for lent in sender.scheduler.debug_state()["leases"]] == [None]


def test_a_cancelled_read_is_drained_when_every_rank_is_terminal() -> None:
    """And the blocks stay lent as long as one rank's sender still looks at them."""
    gated = GatedMemory(SHARE, 64)
    with ranks_over("tcp", gated) as ranks:
        sender, receiver = ranks.pair.prefill.driver, ranks.pair.decode.driver
        ranks.fill()
        send = ranks.pair.send_request(ranks.name, ranks.prompt)
        sender.send_all(send, SOURCE, TOKENS)
        key = ranks.fetch()
        gated.gate_after_digest(SOURCE[2], sender)
        receiver.receiver.receive_into(key, TARGET, 0)
        assert gated.is_waiting.wait(30)
        assert not receiver.receiver.cancel_fetch(key)
        receiver.wait_for(lambda: key in receiver.drained, "drained")
        assert receiver.scheduler.debug_state()["data"]["current"] == []
        assert (receiver.received, [memory.committed for memory in ranks.decode]) == ([], [[], []])
        later = ranks.pair.fetch_request("later", ranks.prompt)
        receiver.receiver.start_fetch(later)
        sender.wait_for(lambda: ranks.pair.prefill.count("transfers_parked"), "the cancel came before this")
        assert sender.sent == []
        gated.gate.set()
        sender.wait_for(lambda: send.key in sender.sent, "sent")


def test_a_bug_in_a_thread_of_a_rank_ends_the_engine() -> None:
    """Nothing that the thread served can end properly any more."""
    with ranks_over("tcp") as ranks:
        played: Any = ranks.pair.decode.driver.rank
        played.halves[1].thread_failed("kv-data", RuntimeError("a bug"))
        message = r"thread kv-data of the connector has failed: .*on rank 1: RuntimeError\('a bug'\)"
        with pytest.raises(InternalError, match=message):
            ranks.pair.decode.driver.wait_for(lambda: False, "the end")


def test_a_data_thread_that_hangs_in_one_rank_is_the_one_that_makes_no_progress() -> None:
    """P4: the ranks' listeners answer all the while, and an idle data thread counts as well."""
    gated = GatedMemory(SHARE, 64)
    gated.gated_block = SOURCE[3]
    with ranks_over("tcp", gated) as ranks, ExitStack() as stack:
        stack.callback(gated.gate.set)
        sender = ranks.pair.prefill.driver
        control: Any = sender.scheduler
        data, listener = "thread that publishes KV on rank {}", "listener on rank {}"

        def wait_moved(*names: str) -> dict[str, int]:
            """Ask until each of these has moved by two: its last count was begun after this call."""
            before = control.progress()
            sender.wait_for(
                lambda: all(control.progress().get(name, 0) >= before.get(name, 0) + 2 for name in names),
                f"progress of {names}",
            )
            counts: dict[str, int] = control.progress()
            return counts

        ranks.fill()
        wait_moved(data.format(0), data.format(1))
        sender.send_all(ranks.pair.send_request(ranks.name, ranks.prompt), SOURCE, TOKENS)
        assert gated.is_waiting.wait(30)
        stuck = wait_moved(listener.format(1))[data.format(1)]
        assert wait_moved(data.format(0), listener.format(1))[data.format(1)] == stuck
        gated.gate.set()
        assert wait_moved(data.format(1))[data.format(1)] > stuck


def test_a_rank_that_cannot_open_its_half_ends_the_start() -> None:
    """The second rank's port is taken; the first one's is free again afterwards."""
    with ExitStack() as stack:
        first, taken = two_ports_in_a_row()
        stack.enter_context(taken)
        settings = settings_for("p", Role.PREFILL, data_port=first)
        memories = [ByteMemory(SHARE, 4) for _ in range(2)]
        with pytest.raises(OSError, match="in use"):
            stack.enter_context(worker_of_ranks(settings, memories))
        stack.enter_context(socket.create_server(("127.0.0.1", first)))


def two_ports_in_a_row() -> tuple[int, socket.socket]:
    """A free port, and a socket that listens on the next one."""
    for _ in range(100):
        listening = socket.create_server(("127.0.0.1", 0))
        first = listening.getsockname()[1] - 1
        with suppress(OSError), socket.create_server(("127.0.0.1", first)):
            return first, listening
        listening.close()
    raise AssertionError("there are no two free ports in a row")
