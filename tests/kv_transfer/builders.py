"""Builders for the transfer tests: layouts, requests, connected pairs of workers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from contract.identity import Role, new_boot_id
from contract.layout import KVLayout, Side
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from contract.sampling import SamplingParams
from engine.connector import FirstToken
from kv_transfer.connector import TransferFactory
from kv_transfer.protocol.handshake import LocalIdentity
from kv_transfer.protocol.messages import Offer
from kv_transfer.settings import LocalWorker, TransferSettings
from tests.kv_transfer.fakes import ByteMemory, FilledMemory, TransferDriver

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
MODEL = "model-fingerprint"
SECRET = "the-cluster-secret"
TOKENS = [FirstToken(42)]


def settings_for(name: str, role: Role, **changes: Any) -> TransferSettings:
    """Return settings of one worker, whose timeouts suit a slow test machine."""
    defaults: dict[str, Any] = {
        "worker_id": name,
        "boot_id": new_boot_id(),
        "role": role,
        "secret": SECRET,
        "transport": "tcp",
        "peer_timeout_seconds": 30.0,
    }
    return TransferSettings(**{**defaults, **changes})


def identity_for(
    name: str, role: Role, side: Side | None = None, offers: Sequence[Offer] = (), **changes: Any
) -> LocalIdentity:
    """Return how a worker of boot "boot-NAME", which reads over TCP, introduces itself on control links."""
    settings = settings_for(name, role, **{"boot_id": f"boot-{name}", **changes})
    return LocalIdentity(settings, side or Side(LAYOUT), MODEL, ("tcp",), lambda: list(offers))


def local_worker(layout: KVLayout = LAYOUT, **changes: Any) -> LocalWorker:
    """Return what one side of the control half gets of its worker."""
    return LocalWorker(settings_for("w", Role.PREFILL, **changes), Side(layout), MODEL, lambda: None)


def block_content(transfer_id: str, index: int) -> bytes:
    """Return the content of a prompt's block: different for every transfer and index."""
    return f"{transfer_id}/{index};".encode()


def prompt_of(num_blocks: int, num_last: int = LAYOUT.block_size) -> list[int]:
    """Return a prompt of ``num_blocks`` blocks, the last one with ``num_last`` tokens."""
    return list(range((num_blocks - 1) * LAYOUT.block_size + num_last))


@dataclass
class Worker:
    """One connector with its settings, pool and driver."""

    settings: TransferSettings
    driver: TransferDriver

    @property
    def boot_id(self) -> str:
        return self.settings.boot_id

    def count(self, name: str) -> float:
        return self.driver.scheduler.counters().get(name, 0.0)

    def lend(self, transfer_id: str, block_ids: list[int]) -> None:
        """Fill the blocks with what this transfer's prompt would have computed."""
        for index, block_id in enumerate(block_ids):
            self.driver.memory.fill(block_id, block_content(transfer_id, index))

    def holds(self, transfer_id: str, block_ids: list[int], first: int = 0) -> bool:
        """Return whether the blocks hold this transfer's content."""
        probe = ByteMemory(LAYOUT, 1)
        for index, block_id in enumerate(block_ids[first:], start=first):
            probe.fill(0, block_content(transfer_id, index))
            if self.driver.memory.read_view(block_id) != probe.read_view(0):
                return False
        return True


@dataclass
class Pair:
    """A prefill and a decode worker."""

    prefill: Worker
    decode: Worker

    def send_request(self, name: str, prompt: list[int], attempt: int = 0) -> EngineRequest:
        return request_of(name, prompt, SendTransfer(f"t-{name}"), attempt)

    def fetch_request(self, name: str, prompt: list[int], attempt: int = 0, **changes: str) -> EngineRequest:
        peer = {
            "peer_worker_id": self.prefill.settings.worker_id,
            "peer_boot_id": self.prefill.boot_id,
            "peer_control": self.prefill.driver.address,
        }
        return request_of(name, prompt, ReceiveTransfer(f"t-{name}", **{**peer, **changes}), attempt)


def request_of(
    name: str, prompt: list[int], transfer: SendTransfer | ReceiveTransfer, attempt: int = 0
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        transfer=transfer,
        attempt=attempt,
    )


@contextmanager
def worker(
    settings: TransferSettings,
    layout: KVLayout = LAYOUT,
    model: str = MODEL,
    num_blocks: int = 64,
    memory: FilledMemory | None = None,
) -> Iterator[Worker]:
    """Run a connector, closed at the end."""
    driver = TransferDriver(memory or ByteMemory(layout, num_blocks))
    driver.attach(TransferFactory(settings)(Side(layout), model, driver.wake))
    try:
        yield Worker(settings, driver)
    finally:
        driver.close()


@dataclass
class Sides:
    """The settings of each side of a pair that differ from the defaults."""

    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)


@contextmanager
def pair_of(
    sides: Sides | None = None, transport: str = "tcp", memory: FilledMemory | None = None
) -> Iterator[Pair]:
    """Run two workers in one process; ``memory`` is the prefill worker's pool."""
    sides = sides or Sides()
    with ExitStack() as stack:
        prefill = settings_for("p", Role.PREFILL, **{"transport": transport, **sides.prefill})
        decode = settings_for("d", Role.DECODE, **{"transport": transport, **sides.decode})
        yield Pair(stack.enter_context(worker(prefill, memory=memory)), stack.enter_context(worker(decode)))


def hand_over(pair: Pair, name: str, num_blocks: int = 3, reads: int = 1) -> None:
    """Run one transfer from blocks 10.. into blocks 30.., released at the end, in ``reads`` ordered reads."""
    prompt, source, target = prompt_of(num_blocks), range(10, 10 + num_blocks), range(30, 30 + num_blocks)
    send, fetch = pair.send_request(name, prompt), pair.fetch_request(name, prompt)
    pair.prefill.lend(f"t-{name}", list(source))
    pair.prefill.driver.send_all(send, list(source), TOKENS)
    decode = pair.decode.driver
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: fetch.key in decode.published, "published")
    decode.receiver.receive_into(fetch.key, list(target), 0)
    decode.wait_for(lambda: fetch.key in decode.received, "received")
    num_bytes = decode.receiver.pop_received(fetch.key).report.num_bytes
    assert num_bytes == reads * num_blocks * decode.memory.layout.block_bytes
    pair.prefill.driver.wait_for(lambda: send.key in pair.prefill.driver.sent, "sent")
