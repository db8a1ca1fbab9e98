"""Both sides of a hand-over, joined by links that lose, repeat, reorder and break, under crashes, cancels and expiry.

Checked at every step: nothing is committed that was not verified, nothing is released before, no block is freed while a
read into it or from it runs, an older attempt is refused, and no event is impossible. Once the world is quiet and time
has passed, every fetch and every lease is gone.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.connector import FirstToken
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.handshake import Session
from tests.kv_transfer.protocol_world import LEASE_SECONDS, Fetcher, Lender, Reading, Wire, prompt_of
from tests.soak_settings import machine_settings, soaked

NUMBERS, ATTEMPTS = st.integers(0, 3), st.integers(0, 2)
PICKS = st.integers(0, 7)
RARELY, MOSTLY = st.sampled_from([False] * 5 + [True]), st.sampled_from([True] * 5 + [False])
PARTS = ["compute", "network", "step", "move", "move", "commit"]
FATES = st.sampled_from(["take"] * 12 + ["lose", "repeat"])


def session_of(boot_id: str) -> Session:
    return Session("p", boot_id, "prefill", 30.0, (), "token")


@soaked
class ProtocolMachine(RuleBasedStateMachine):
    """One prefill and one decode worker at a time, of any number of incarnations."""

    @initialize(num_tokens=st.sampled_from([0, 2, 3, 9]), is_digested=MOSTLY)
    def begin(self, num_tokens: int, is_digested: bool) -> None:
        """Start two transfers, unless ``num_tokens`` is 0."""
        self.now = 0.0
        self.num_boots = 0
        self.wires: list[Wire] = []
        self.lender, self.fetcher = (
            Lender(self.new_boot("p"), self.clock),
            Fetcher(self.new_boot("d"), self.clock),
        )
        for number in (2, 1) if num_tokens else ():
            self.open(number, 0, True)
            self.send_and_deliver()
            self.compute(number - 1, 2, True, False)
            self.send_and_deliver()
            self.decode_step(0, True)
            self.compute(2 - number, num_tokens, is_digested, True)
            self.send_and_deliver()

    def clock(self) -> float:
        return self.now

    def new_boot(self, letter: str) -> str:
        self.num_boots += 1
        return f"{letter}{self.num_boots}"

    # The prefill worker.

    @rule(number=NUMBERS, attempt=ATTEMPTS, is_fetched=MOSTLY)
    def open(self, number: int, attempt: int, is_fetched: bool) -> None:
        is_older = any(other >= attempt for known, other in self.lender.opened if known == number)
        if not is_older and len(self.lender.pool.free) >= 3:
            self.lender.open(number, attempt)
        if is_fetched:
            self.start_fetch(number, attempt, False)

    @rule(pick=PICKS, num_tokens=st.sampled_from([1, 2, 2, 3, 3, 9]), is_digested=MOSTLY, is_finished=MOSTLY)
    def compute(self, pick: int, num_tokens: int, is_digested: bool, is_finished: bool) -> None:
        """Run a step over one prompt; its last one samples the first token."""
        going = [lent for lent in self.lender.requests.values() if not lent.is_over]
        if not going:
            return
        lent = going[pick % len(going)]
        prompt = prompt_of(lent.number)
        lent.num_published = min(len(prompt), lent.num_published + num_tokens)
        self.lender.sends.publish(lent.request.key, lent.num_published)
        self.prefill_step()
        while is_digested and self.lender.orders:
            self.digest(False)
        if is_finished and lent.num_ordered == len(prompt):
            lent.is_over = True
            self.lender.sends.finish_send(lent.request.key, [FirstToken(lent.number)])

    @rule()
    def prefill_step(self) -> None:
        self.lender.step()
        self.lender.collect(self.blocks_being_read())

    @precondition(lambda self: self.lender.orders)
    @rule(is_failing=RARELY)
    def digest(self, is_failing: bool) -> None:
        self.lender.digest_next(is_failing)

    @precondition(lambda self: self.lender.requests)
    @rule(pick=PICKS, kind=st.sampled_from(["not_needed", "cancelled"]), is_true=RARELY)
    def abandon(self, pick: int, kind: str, is_true: bool) -> None:
        if is_true:
            lent = list(self.lender.requests.values())[pick % len(self.lender.requests)]
            lent.is_over = True
            self.lender.sends.abandon_send(lent.request.key, kind, "played")

    # The decode worker.

    @rule(number=NUMBERS, attempt=ATTEMPTS, is_stale=RARELY)
    def start_fetch(self, number: int, attempt: int, is_stale: bool) -> None:
        boot_id = "p0" if is_stale else self.lender.boot_id
        asked = (number, attempt, boot_id)
        running = {(one.number, one.request.attempt, one.boot_id) for one in self.fetcher.requests.values()}
        if asked not in running and len(self.fetcher.pool.free) >= 3:
            self.fetcher.start(*asked)

    @rule(num_cached=st.sampled_from([0, 0, 0, 1, 3]), is_reserving=MOSTLY)
    def decode_step(self, num_cached: int, is_reserving: bool) -> None:
        self.fetcher.step()
        for key, one in self.fetcher.requests.items() if is_reserving else ():
            if (
                one.is_published
                and not one.block_ids
                and not one.is_given_up
                and len(self.fetcher.pool.free) >= 3
            ):
                self.fetcher.reserve(key, num_cached)

    @precondition(lambda self: self.fetcher.requests)
    @rule(pick=PICKS, is_true=RARELY)
    def cancel(self, pick: int, is_true: bool) -> None:
        waiting = [key for key, one in self.fetcher.requests.items() if not one.is_given_up]
        if waiting and is_true:
            self.fetcher.cancel(waiting[pick % len(waiting)])

    @precondition(lambda self: self.readings())
    @rule(
        pick=PICKS,
        num_stages=st.sampled_from([1, 1, 2, 3, 6]),
        how=st.sampled_from(["go"] * 8 + ["break", "corrupt", "corrupt"]),
    )
    def move_bytes(self, pick: int, num_stages: int, how: str) -> None:
        for _ in range(num_stages):
            lanes = [source for source, lane in self.fetcher.lanes.items() if lane]
            if lanes:
                self.advance(lanes[pick % len(lanes)], how)

    @precondition(lambda self: self.fetcher.commits)
    @rule()
    def commit(self) -> None:
        self.fetcher.commit_next()

    @precondition(lambda self: self.readings())
    @rule(pick=PICKS, num_stages=st.integers(0, 2))
    def cancel_amid_its_reads(self, pick: int, num_stages: int) -> None:
        readings = self.readings()
        key = readings[pick % len(readings)].job.key
        if key in self.fetcher.requests and not self.fetcher.requests[key].is_given_up:
            self.fetcher.cancel(key)
        for _ in range(num_stages):
            self.move_bytes(pick, 1, "go")
        self.decode_step(0, False)

    @precondition(lambda self: self.blocks_being_read() or self.lender.orders)
    @rule(is_expiry=st.booleans(), num_aborts=st.integers(0, 2), is_reused=MOSTLY)
    def end_leases_amid_reads(self, is_expiry: bool, num_aborts: int, is_reused: bool) -> None:
        """Abandon or expire leases; reuse the reported blocks at once."""
        if is_expiry:
            self.pass_time(LEASE_SECONDS)
        for lent in list(self.lender.requests.values()):
            for _ in range(num_aborts):
                lent.is_over = True
                self.lender.sends.abandon_send(lent.request.key, "cancelled", "played")
        if is_reused:
            self.prefill_step()

    # The links.

    @rule(num_commands=st.integers(1, 4))
    def send(self, num_commands: int) -> None:
        """Carry out the commands of the I/O threads."""
        for _ in range(num_commands):
            self.send_of_fetcher()
            self.send_of_lender()

    @rule()
    def send_and_deliver(self) -> None:
        """Send and deliver everything."""
        self.send(20)
        for _ in range(20):
            self.deliver(0, "take", True)

    @rule(pick=PICKS, fate=FATES, is_in_order=MOSTLY)
    def deliver(self, pick: int, fate: str, is_in_order: bool) -> None:
        busy = [wire for wire in self.wires if not wire.is_broken and (wire.to_lender or wire.to_fetcher)]
        if busy:
            wire = busy[pick % len(busy)]
            for queue, hear in ((wire.to_lender, self.lender_hears), (wire.to_fetcher, self.fetcher_hears)):
                if queue:
                    index = 0 if is_in_order else pick % len(queue)
                    message = queue[index] if fate == "repeat" else queue.pop(index)
                    if fate != "lose":
                        hear(wire, message)

    @rule()
    def ping(self) -> None:
        for wire in self.wires:
            if not wire.is_broken:
                wire.lender.sends.on_heartbeat(wire.fetcher.boot_id)

    @precondition(lambda self: self.wires)
    @rule(is_true=RARELY)
    def break_link(self, is_true: bool) -> None:
        for wire in self.wires:
            wire.is_broken = wire.is_broken or is_true

    @rule(is_lender=st.booleans())
    def notice_a_broken_link(self, is_lender: bool) -> None:
        for wire in list(self.wires):
            if wire.is_broken:
                self.notice(wire, is_lender)

    @rule(parts=st.lists(st.sampled_from(PARTS), min_size=4, max_size=20), pick=PICKS)
    def work(self, parts: list[str], pick: int) -> None:
        """Let both workers work undisturbed."""
        for part in parts:
            match part:
                case "compute":
                    self.compute(pick, 3, True, True)
                case "network":
                    self.send_and_deliver()
                case "step":
                    self.decode_step(0, True)
                case "move":
                    self.move_bytes(pick, 1, "go")
                case "commit" if self.fetcher.commits:
                    self.commit()

    # Death and time.

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS / 2, LEASE_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.lender.sends.tick(self.now)

    @precondition(lambda self: self.num_boots < 6)
    @rule(is_true=RARELY)
    def restart_prefill(self, is_true: bool) -> None:
        if not is_true:
            return
        self.break_link(True)
        for lane in self.fetcher.lanes.values():
            for reading in lane:
                reading.stack = type(reading.stack)()  # the process that counted this reader is gone
        self.lender = Lender(self.new_boot("p"), self.clock)

    @precondition(lambda self: self.num_boots < 6)
    @rule(is_true=RARELY)
    def restart_decode(self, is_true: bool) -> None:
        if not is_true:
            return
        self.break_link(True)
        for reading in self.readings():
            reading.stack.close()
        self.fetcher = Fetcher(self.new_boot("d"), self.clock)

    def teardown(self) -> None:
        """Give up what waits; the rest must end by itself."""
        if not hasattr(self, "lender"):
            return
        for key in [key for key, one in self.fetcher.requests.items() if not one.is_given_up]:
            self.fetcher.cancel(key)
        for lent in list(self.lender.requests.values()):
            if not lent.is_over:
                lent.is_over = True
                self.lender.sends.abandon_send(lent.request.key, "cancelled", "played")
        for _ in range(3):
            self.settle()
            self.pass_time(LEASE_SECONDS)
        self.settle()
        fetcher_state = self.fetcher.fetches.debug_state()
        assert fetcher_state["fetches"] == []
        assert self.lender.sends.debug_state() == []
        assert self.fetcher.requests == {}
        assert self.lender.requests == {}
        assert fetcher_state["quarantine"]["num_blocks"] == 0
        assert self.lender.num_sent == len(self.lender.opened)

    # What the rules are made of.

    def settle(self) -> None:
        """Carry out everything that can be carried out now."""
        while self.lender.orders:
            self.digest(False)
        for source in list(self.fetcher.lanes):
            while self.fetcher.lanes[source]:
                self.advance(source, "go")
        while self.fetcher.commits:
            self.commit()
        while self.fetcher.commands or self.lender.commands:
            self.send(1)
        for wire in self.wires:
            while not wire.is_broken and wire.to_lender:
                self.lender_hears(wire, wire.to_lender.pop(0))
            while not wire.is_broken and wire.to_fetcher:
                self.fetcher_hears(wire, wire.to_fetcher.pop(0))
        self.notice_a_broken_link(True)
        self.notice_a_broken_link(False)
        self.prefill_step()
        self.decode_step(0, False)

    def readings(self) -> list[Reading]:
        return [reading for lane in self.fetcher.lanes.values() for reading in lane]

    def blocks_being_read(self) -> set[int]:
        mine = (one.source_blocks for one in self.readings() if one.lender is self.lender)
        return set().union(*mine)

    def advance(self, source: tuple[str, str], how: str) -> None:
        self.fetcher.advance_lane(source, self.lender if source[0] == self.lender.boot_id else None, how)

    def wire_to(self, ref: PeerRef) -> Wire | None:
        """Return the link that is up for the decode worker."""
        return next((wire for wire in self.wires if wire.ref == ref and wire.is_known_to_fetcher), None)

    def send_of_fetcher(self) -> None:
        if not self.fetcher.commands:
            return
        target, ref, message = self.fetcher.commands.popleft()
        wire = self.wire_to(ref)
        if wire is None and target is not None:
            if target.boot_id != self.lender.boot_id:
                self.fetcher.fetches.link_down(ref, "worker_lost", "a stranger answers there")
                return
            wire = self.connect(ref)
        if wire is not None and not wire.is_broken:
            wire.to_lender.append(message)

    def connect(self, ref: PeerRef) -> Wire:
        for older in list(self.wires):  # the dialed side ends an older link before it accepts the new one
            self.notice(older, is_lender=True)
        wire = Wire(self.lender, self.fetcher)
        self.wires.append(wire)
        self.fetcher.fetches.link_up(ref, session_of(ref.boot_id))
        return wire

    def send_of_lender(self) -> None:
        if self.lender.commands:
            ref, message = self.lender.commands.popleft()
            for wire in self.wires:
                if not wire.is_broken and wire.fetcher.boot_id == ref.boot_id:
                    wire.to_fetcher.append(message)

    def notice(self, wire: Wire, is_lender: bool) -> None:
        if is_lender and wire.is_known_to_lender:
            wire.is_known_to_lender = False
            wire.lender.sends.on_peer_gone(wire.fetcher.boot_id, "gone")
        if not is_lender and wire.is_known_to_fetcher:
            wire.is_known_to_fetcher = False
            wire.fetcher.fetches.link_down(wire.ref, "worker_lost", "gone")
        if not wire.is_known_to_lender and not wire.is_known_to_fetcher:
            self.wires.remove(wire)

    def lender_hears(self, wire: Wire, message: msg.Message) -> None:
        lender, peer = wire.lender, wire.fetcher.boot_id
        lender.sends.on_heartbeat(peer)
        if not isinstance(message, msg.FetchBlocks):
            assert isinstance(message, (msg.ReleaseLease, msg.CancelFetch))
            lender.sends.on_release(peer, message)
            return
        is_older = message.attempt < lender.newest.get(message.transfer_id, 0)
        lender.sends.on_fetch(peer, message)
        if is_older:
            _, answer = lender.commands[-1]
            assert isinstance(answer, msg.TransferFailed)
            assert (answer.transfer_id, answer.attempt) == (message.transfer_id, message.attempt)
        answered = lender.commands[-1][1] if lender.commands else None
        if not (isinstance(answered, msg.TransferFailed) and answered.kind == "overloaded"):
            lender.saw(message.transfer_id, message.attempt)

    def fetcher_hears(self, wire: Wire, message: msg.Message) -> None:
        assert isinstance(message, msg.SenderMessage)
        wire.fetcher.fetches.on_message(wire.ref, message)


TestProtocol = ProtocolMachine.TestCase
TestProtocol.settings = machine_settings(200, 60)
