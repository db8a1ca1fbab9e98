"""A program with an engine in a process of its own: prints the engine's pid, then waits to be killed."""

import asyncio

from engine.client import ProcessClient
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import start_fake_executor


async def main() -> None:
    client = await ProcessClient.start(fake_settings(), start=start_fake_executor)
    print(await client.call("pid"), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
