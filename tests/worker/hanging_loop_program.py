"""A process whose event loop works for a while and then hangs, under the watch of a router's command."""

import asyncio
import logging
import sys
import threading

from cli.service import end_if_hung


async def main() -> None:
    logging.basicConfig(format="%(message)s")
    await end_if_hung(work(), 0.5)


async def work() -> None:
    for _ in range(20):
        await asyncio.sleep(0.05)
    sys.stdout.write("worked\n")
    sys.stdout.flush()
    threading.Event().wait()


asyncio.run(main())
