"""A supervisor of two scripted children, in a process of its own; argument: the ready file. Prints "ready"."""

import asyncio
import sys
from pathlib import Path

from launch.kept_process import RestartPolicy
from launch.supervisor import Supervisor
from serving.signals import until_stopped
from tests.launch.children import spec


async def main(ready_file: Path) -> None:
    async with until_stopped() as stopped:
        supervisor = Supervisor(
            [spec("router"), spec("decode-0", needs=("router",))],
            ready_file=ready_file,
            policy=RestartPolicy(grace_seconds=20.0),
        )
        run = asyncio.create_task(supervisor.run(stopped))
        await supervisor.wait_ready()
        print("ready", flush=True)  # noqa: T201 (the test reads it)
        await run


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
