"""A process whose event loop works for a while and then hangs, under a watch."""

import asyncio
import logging
import sys
import threading

from worker.loop_watch import LoopWatch


async def main() -> None:
    logging.basicConfig(format="%(message)s")
    with LoopWatch(0.5):
        for _ in range(20):
            await asyncio.sleep(0.05)
        sys.stdout.write("worked\n")
        sys.stdout.flush()
        threading.Event().wait()


asyncio.run(main())
