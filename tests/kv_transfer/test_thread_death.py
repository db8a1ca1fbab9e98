"""A bug that ends a thread of the connector ends the engine: a worker must not look healthy and hand nothing over."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from contract.errors import InternalError, TransferError
from contract.identity import Role
from contract.requests import ReceiveTransfer
from engine.client import InProcessClient, ProcessClient
from engine.connecting import Transfers
from engine.mailbox import Mailbox
from kv_transfer.connector import TransferFactory
from kv_transfer.links.framing import parse_address
from kv_transfer.protocol.orders import CommitJob
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.transports.nixl.agent import load
from kv_transfer.transports.nixl.nixl_thread import NixlThread
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from roles.table import STAGES
from tests.engine_scheduling.stepping import fake_request, fake_settings
from tests.fakes.engine.fakes import start_fake_executor
from tests.kv_transfer.builders import Pair, Sides, hand_over, pair_of, prompt_of, settings_for, worker
from tests.kv_transfer.fakes import context_of
from tests.kv_transfer.nixl_port import NAME, NixlPort, Reader, is_driving


class UnforgivingReceiver:
    """Has a bug where a dead peer is forgotten."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport) -> None:
        self._inner = inner

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        self._inner.fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        raise RuntimeError(f"a bug while {source.worker_id} is forgotten")

    def close(self) -> None:
        self._inner.close()


def dies(pair: Pair) -> None:
    """Step until the decode worker's connector reports that it is broken."""
    pair.decode.driver.wait_for(lambda: False, "the end of the engine")


BUGGY = Sides(decode={"decorate": UnforgivingReceiver})


def test_the_links_thread() -> None:
    with pair_of(BUGGY) as pair:
        fetch = pair.fetch_request("r", prompt_of(2))
        pair.decode.driver.receiver.start_fetch(fetch)
        pair.decode.driver.wait_for(lambda: pair.prefill.count("transfers_parked") == 1, "parked")
        pair.prefill.driver.close()
        with pytest.raises(
            InternalError, match=r"thread kv-control of the connector has failed: .*a bug while p"
        ):
            dies(pair)
        assert pair.decode.driver.scheduler.has_work()


def test_a_pull_thread() -> None:
    with pair_of(BUGGY) as pair:
        hand_over(pair, "r")
        pair.prefill.driver.close()
        with pytest.raises(InternalError, match="thread kv-pull-p of the connector has failed"):
            dies(pair)


def test_the_data_thread() -> None:
    """It reports the end of a job that was not posted."""
    with pair_of() as pair:
        rank: Any = pair.decode.driver.rank
        rank.post_commit(CommitJob("nobody", (), Read()))
        with pytest.raises(InternalError, match=r"thread kv-data of the connector has failed: .*nobody"):
            dies(pair)


class BuggySeconds(float):
    """A number of seconds, after which there is a time that cannot be compared."""

    def __radd__(self, other: float) -> float:
        return BuggySeconds(other)

    def __gt__(self, other: float) -> bool:
        raise RuntimeError("a bug in a comparison")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_thread_that_accepts_on_a_data_port(transport: str, tmp_path: Path) -> None:
    """P4: it ended in silence, and no peer could read any more."""
    failed = Mailbox[tuple[str, BaseException]]()
    context = context_of("b", shm_dir=tmp_path)
    settings = context.settings.model_copy(update={"read_timeout_seconds": BuggySeconds(30.0)})
    context = replace(
        context, settings=settings, on_thread_failed=lambda thread, error: failed.put((thread, error))
    )
    sender = open_transport(transport, context).sender
    is_unix = transport == "shm"
    try:
        with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.connect(sender.address if is_unix else parse_address(sender.address))
            assert failed.get(30)[0] == ("kv-shm-accept" if is_unix else "kv-data-accept")
    finally:
        sender.close()


def test_the_thread_of_nixl() -> None:
    failed = Mailbox[tuple[str, BaseException]]()
    nixl_thread = NixlThread(
        load("127.0.0.1"), "kvbaton-b", lambda thread, error: failed.put((thread, error))
    )
    try:
        nixl_thread.tell(lambda driver: driver.disconnect(cast(Any, "no pool")))
        assert failed.get(30)[0] == "kv-nixl"
        with pytest.raises(TransferError, match="is closed"):
            while True:  # it closes just after its report
                is_driving(nixl_thread)
    finally:
        nixl_thread.close()


def test_what_waits_for_the_thread_of_nixl_ends_with_it() -> None:
    """A read that is to be posted, and a question behind it."""
    port, reader = NixlPort(), Reader()
    grants = port.publish(NAME, [1])
    reader.receiver.probe(port.source, Read())
    is_busy, may_fail = threading.Event(), threading.Event()

    def fail(_driver: object) -> None:
        is_busy.set()
        may_fail.wait(30)
        raise RuntimeError("a bug")

    def until_waiting(count: int) -> None:
        while reader.nixl_thread._commands.num_waiting < count:
            time.sleep(0.001)

    with ThreadPoolExecutor(2) as pool:
        reader.nixl_thread.tell(fail)
        assert is_busy.wait(30)
        fetch = pool.submit(reader.fetch, port.source, range(1), grants)
        until_waiting(1)
        answer = pool.submit(is_driving, reader.nixl_thread)
        until_waiting(2)
        may_fail.set()
        with pytest.raises(TransferError, match="the NIXL agent is closed"):
            fetch.result(30)
        assert answer.result(30) is False
    reader.close()
    port.sender.close()


def test_what_a_transport_says_of_its_thread_ends_the_engine() -> None:
    with pair_of(transport="shm") as pair:
        rank: Any = pair.decode.driver.rank
        port = rank._senders._senders["shm"]._port
        port._context.on_thread_failed("kv-shm", RuntimeError("a bug"))
        with pytest.raises(InternalError, match=r"thread kv-shm of the connector has failed: .*a bug"):
            dies(pair)


@pytest.mark.parametrize("kind", [InProcessClient, ProcessClient])
async def test_the_engine_ends_with_its_reason(kind: type[InProcessClient] | type[ProcessClient]) -> None:
    """Its requests end with one error each, its process with a failure: the supervisor starts another."""
    factory = TransferFactory(settings_for("d", Role.DECODE, decorate=UnforgivingReceiver))
    client = await kind.start(fake_settings(), Transfers(factory, STAGES), start=start_fake_executor)
    try:
        info = client.info
        prefill_settings = settings_for("p", Role.PREFILL)
        with worker(prefill_settings, info.layout, info.model_fingerprint) as prefill:
            address = prefill.driver.address
            transfer = ReceiveTransfer("t", "p", prefill_settings.boot_id, address)
            await client.add_request(fake_request("r", [1, 2, 3], 4, transfer=transfer))
            prefill.driver.wait_for(lambda: prefill.count("transfers_parked") == 1, "parked")
        outputs = [output async for step in client.steps() for output in step]
        assert [output.is_leg_finished for output in outputs] == [True]
        assert outputs[0].error_kind in ("peer_unreachable", "internal"), "whichever was heard of first"
        with pytest.raises(Exception, match="thread kv-control of the connector has failed"):
            await client.call("pid")
    finally:
        await client.shutdown()
