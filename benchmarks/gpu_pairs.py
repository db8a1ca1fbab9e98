"""Two processes on one GPU as a pair of the transport ``nccl``: bytes that cross, and a peer that dies before it joins.

NCCL takes no two ranks on one GPU, unless they seem to be on two machines: each process has a ``NCCL_HOSTID`` of its own,
and the bytes go over sockets. So the code is the real one, and the speed has no meaning. On the host gloo moves the bytes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from contract.errors import KvbatonError
from kv_transfer.transports.nccl.group import RECEIVER, SENDER, PairGroup, join, meet
from kv_transfer.transports.transport import TransportSettings
from tests.chaos.settings import process_environment

_TIMEOUT_SECONDS = 10.0
_LIMIT_SECONDS = 90.0
_NUM_BYTES = 8 * 2**20
_NUM_ROUNDS = 4
_OPTIONS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
_DIES = "dies"


def pairs(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for bytes that cross, and one for a peer that is killed before it joins."""
    for what in ("crosses", _DIES):
        yield {"what": what, "way": _backend(device), "num_bytes": _NUM_BYTES} | _measured(device, what)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _measured(device: torch.device, what: str) -> dict[str, Any]:
    """Start a sender, and a receiver that finds it; return what the sender reports."""
    sender = _start(device, what, "0", "")
    assert sender.stdout is not None
    receiver = None
    try:
        address = sender.stdout.readline().strip()
        receiver = _start(device, what, "1", address)
        out, _ = sender.communicate(timeout=_LIMIT_SECONDS)
        lines = out.splitlines() or [json.dumps({"error": f"exit status {sender.returncode}"})]
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"error": f"the sender was not done after {_LIMIT_SECONDS:g} s"}
    finally:
        for process in filter(None, (sender, receiver)):
            process.kill()
            process.wait()


def _start(device: torch.device, what: str, rank: str, address: str) -> "subprocess.Popen[str]":
    environment = process_environment() | _OPTIONS | {"NCCL_HOSTID": f"kvbaton-{rank}"}
    command = [sys.executable, "-m", "benchmarks.gpu_pairs", device.type, what, rank, address]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def main(kind: str, what: str, rank: str, address: str) -> None:
    """Run one of the two processes; the sender prints its address, and then its row."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    settings = TransportSettings(boot_id="pair", host="127.0.0.1", read_timeout_seconds=_TIMEOUT_SECONDS)
    if rank == "1":
        store = join(address, settings)
        if what == _DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        group = PairGroup(_backend(device), store, RECEIVER, settings, device)
        for number in range(_NUM_ROUNDS):
            content = group.receive(_NUM_BYTES)
            group.send(torch.full_like(content, int(content[-1]) + number))
        group.close()
        return
    address, store = meet(settings)
    print(address, flush=True)
    begun = time.monotonic()
    row: dict[str, Any] = {}
    try:
        group = PairGroup(_backend(device), store, SENDER, settings, device)
        row["seconds_to_form"] = time.monotonic() - begun
        row["is_right"] = [_crosses(group, number, device) for number in range(_NUM_ROUNDS)] == [
            True
        ] * _NUM_ROUNDS
        row["seconds"] = time.monotonic() - begun
        group.close()
    except KvbatonError as error:
        row |= {"failed_after": time.monotonic() - begun, "failure": error.message}
    print(json.dumps(row), flush=True)
    os._exit(0)  # a thread that forms a group with a dead peer may not end


def _crosses(group: PairGroup, number: int, device: torch.device) -> bool:
    """Send a round's bytes; return whether those that come back were made of them."""
    group.send(torch.full((_NUM_BYTES,), 10 * number, dtype=torch.uint8, device=device))
    answer = group.receive(_NUM_BYTES)
    return bool((answer == 11 * number).all())


if __name__ == "__main__":
    main(*sys.argv[1:])
