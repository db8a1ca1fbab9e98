"""What a process says about itself in ``/debug/state``: plain numbers that show a leak."""

import asyncio
import os
import threading
from typing import Any

import psutil


def process_facts() -> dict[str, Any]:
    """This process's pid, open file descriptors, asyncio tasks, threads and resident memory in bytes.

    ``num_asyncio_tasks`` counts the unfinished tasks of the running loop, the caller's own included; 0 without a loop.
    """
    process = psutil.Process()
    return {
        "pid": os.getpid(),
        "num_open_fds": process.num_fds(),
        "num_asyncio_tasks": _num_tasks(),
        "num_threads": threading.active_count(),
        "rss_bytes": process.memory_info().rss,
    }


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
