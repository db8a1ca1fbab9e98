"""Hand-overs between two real operating-system processes, without torch."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from contract.requests import EngineRequest, ReceiveTransfer
from tests.kv_transfer.builders import LAYOUT, Worker, prompt_of, request_of, settings_for, worker
from tests.processes import stop

ROOT = Path(__file__).parents[2]


class PrefillProcess:
    """The other end of ``prefill_process``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.where = self._hear()

    def tell(self, do: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def fetch_request(self, name: str, prompt: list[int]) -> EngineRequest:
        peer = ReceiveTransfer(f"t-{name}", "p", self.where["boot_id"], self.where["address"])
        return request_of(name, prompt, peer)

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard


@contextmanager
def prefill_process(
    transport: str, peer_timeout_seconds: float = 30.0, environment: dict[str, str] | None = None
) -> Iterator[PrefillProcess]:
    command = [
        sys.executable,
        "-m",
        "tests.kv_transfer.prefill_process",
        str(peer_timeout_seconds),
        transport,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        try:
            yield PrefillProcess(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(params=["tcp", "shm", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decode(transport: str) -> Iterator[Worker]:
    with worker(settings_for("d", Role.DECODE, peer_timeout_seconds=2.0, transport=transport)) as started:
        yield started


def test_a_prompt_crosses_two_processes_chunk_by_chunk(decode: Worker, transport: str) -> None:
    """The copy of chunk 1 is done before chunk 2 is computed; the content is verified (B8, B19)."""
    prompt, target = prompt_of(5, num_last=3), [40, 7, 33, 12, 21]
    driver = decode.driver
    with prefill_process(transport) as prefill:
        assert prefill.where["torch"] is False
        fetch = prefill.fetch_request("r", prompt)
        driver.receiver.start_fetch(fetch)
        prefill.tell("open", name="r", num_tokens=len(prompt))
        prefill.tell("publish", num_tokens=9)
        driver.wait_for(lambda: driver.published, "published")
        driver.receiver.receive_into(fetch.key, target, 0)
        driver.wait_for(
            lambda: decode.count(f"transfer_blocks_total{{transport={transport}}}") == 2, "chunk 1"
        )
        assert decode.holds("t-r", target[:2])
        prefill.tell("publish", num_tokens=len(prompt))
        prefill.tell("finish")
        driver.wait_for(lambda: driver.received, "received")
        received = driver.receiver.pop_received(fetch.key)
        assert (received.report.num_bytes, received.first_tokens[0].token_id) == (5 * LAYOUT.block_bytes, 42)
        assert decode.holds("t-r", target)
        assert driver.memory.committed == target
        assert prefill.tell("wait_sent")["sent"] == ["r#0.0"]


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_sender_fails_the_fetch(decode: Worker, transport: str, way: signal.Signals) -> None:
    """A closed link and a silent one are both the peer's death: one clear error, nothing committed."""
    prompt, driver = prompt_of(3), decode.driver
    with prefill_process(transport, 2.0) as prefill:
        fetch = prefill.fetch_request("r", prompt)
        prefill.tell("open", name="r", num_tokens=len(prompt))
        prefill.tell("publish", num_tokens=8)
        driver.receiver.start_fetch(fetch)
        driver.wait_for(lambda: driver.published, "published")
        driver.receiver.receive_into(fetch.key, [1, 2, 3], 0)
        driver.wait_for(
            lambda: decode.count(f"transfer_blocks_total{{transport={transport}}}") == 2, "chunk 1"
        )
        prefill.process.send_signal(way)
        driver.wait_for(lambda: fetch.key in driver.failed, "failed")
        assert driver.failed[fetch.key].kind == "peer_unreachable"
        assert "worker p" in driver.failed[fetch.key].message
        assert driver.memory.committed == []


def test_a_cancelled_read_from_a_hung_sender_drains_by_the_receivers_own_doing(transport: str) -> None:
    """The sender is stopped and cannot help: shutting the socket down here is what makes the read terminal."""
    patient = settings_for(
        "d", Role.DECODE, peer_timeout_seconds=300.0, read_timeout_seconds=300.0, transport=transport
    )
    prompt = prompt_of(3)
    with prefill_process(transport) as prefill, worker(patient) as decode:
        driver, fetch = decode.driver, prefill.fetch_request("r", prompt)
        prefill.tell("open", name="r", num_tokens=len(prompt))
        prefill.tell("publish", num_tokens=len(prompt))
        driver.receiver.start_fetch(fetch)
        fetches = driver.scheduler.debug_state
        driver.wait_for(lambda: fetches()["fetches"][0]["num_announced"] == 3, "announced")
        stop(prefill.process)
        driver.receiver.receive_into(fetch.key, [1, 2, 3], 0)
        driver.wait_for(lambda: driver.scheduler.debug_state()["data"]["current"], "a read in progress")
        assert driver.receiver.cancel_fetch(fetch.key) is False
        driver.wait_for(lambda: driver.drained == [fetch.key], "drained")
        assert decode.count("transfers_quarantined") == 0
