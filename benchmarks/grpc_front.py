"""``python -m benchmarks.grpc_front``: processor time of the front of a public gRPC port (ADR 0033).

One process has gRPC's server, its own port, and the front; it does nothing else. Clients in this process take turns at both
doors, and the server's own clock counts its processor time, all threads of the library included, so other processes change
the figures little. Writes ``results/grpc_front.json``: microseconds per call and per message of a stream.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.facts import RESULTS, command_line, write_result
from serving import event_loop
from serving.grpc_front import start_front
from serving.grpc_options import public_server_options
from serving.http_connections import HttpLimits

_SERVICE = "benchmarks.Front"
_PATIENCE_SECONDS = 60.0
_TOKEN = b"t" * 60
"""About the size of a token's message."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a run. step_seconds: time between two messages of a stream, as between two tokens."""

    rounds: int = 7
    num_calls: int = 1000
    num_messages: int = 1000
    num_streams: int = 8
    step_seconds: float = 0.002


@dataclass(frozen=True)
class Doors:
    """The two addresses of the same server."""

    direct: str
    front: str


Work = Callable[[grpc.aio.Channel], Awaitable[int]]
"""Uses a server over a channel, and returns the number of calls or messages."""


def main() -> None:
    """Measure, write the figures, print them; with ``--serve``, be the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        event_loop.run(_serve())
        return
    figures = asyncio.run(measure(Plan(rounds=given.rounds)))
    path = write_result("grpc_front", {"command": command_line("benchmarks.grpc_front"), **figures}, RESULTS)
    sys.stdout.write(f"{json.dumps(figures['microseconds'], indent=2)}\n{path}\n")


async def measure(plan: Plan) -> dict[str, Any]:
    """Return the medians of the rounds and all rounds, by kind of work and door."""
    works: dict[str, Work] = {
        "call": lambda channel: _calls(channel, plan.num_calls),
        "message of one stream": lambda channel: _streams(channel, 1, plan),
        f"message of {plan.num_streams} streams": lambda channel: _streams(channel, plan.num_streams, plan),
    }
    found: dict[str, dict[str, list[float]]] = {name: {"direct": [], "front": []} for name in works}
    async with _server() as doors:
        for number in range(plan.rounds + 1):
            for name, work in works.items():
                for door, address in asdict(doors).items():
                    figure = await _microseconds(address, work)
                    if number:  # the first round warms up
                        found[name][door].append(round(figure, 1))
    medians = {
        name: {door: statistics.median(figures) for door, figures in doors_of.items()}
        for name, doors_of in found.items()
    }
    return {"plan": asdict(plan), "microseconds": medians, "rounds": found}


@asynccontextmanager
async def _server() -> AsyncIterator[Doors]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.grpc_front", "--serve"),
        cwd=Path(__file__).parents[1],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            doors = Doors(**json.loads(await process.stdout.readline()))
        yield doors
    finally:
        process.stdin.close()
        await process.wait()


async def _microseconds(address: str, work: Work) -> float:
    """Return the server's processor time for each call or message of ``work``."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        used: Any = channel.unary_unary(f"/{_SERVICE}/Used")
        before = float(await used(b"", wait_for_ready=True))
        number = await work(channel)
        return (float(await used(b"")) - before) / number * 1e6


async def _calls(channel: grpc.aio.Channel, number: int) -> int:
    call: Any = channel.unary_unary(f"/{_SERVICE}/Echo")
    for _ in range(number):
        await call(_TOKEN)
    return number


async def _streams(channel: grpc.aio.Channel, number: int, plan: Plan) -> int:
    count: Any = channel.unary_stream(f"/{_SERVICE}/Count")
    request = f"{plan.num_messages} {plan.step_seconds}".encode()

    async def read() -> int:
        return sum([1 async for _ in count(request)])

    return sum(await asyncio.gather(*(read() for _ in range(number))))


async def _serve() -> None:
    """Serve until stdin ends."""

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def used(_request: bytes, _: Any) -> bytes:
        return str(time.process_time()).encode()

    async def count(request: bytes, _: Any) -> AsyncIterator[bytes]:
        number, seconds = request.split()
        for _each in range(int(number)):
            await asyncio.sleep(float(seconds))
            yield _TOKEN

    options = public_server_options(
        2**20, max_connections=1000, handshake_seconds=10, idle_seconds=60, call_seconds=600
    )
    server = grpc.aio.server(options=options)
    handlers: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Used": grpc.unary_unary_rpc_method_handler(used),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    direct = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    front, address = await start_front(server, "127.0.0.1:0", param="grpc", limits=HttpLimits())
    print(json.dumps(asdict(Doors(direct, address))), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    front.stop_listening()
    await server.stop(0)
    front.close()


if __name__ == "__main__":
    main()
