"""The facts of a process: what it is, for operators, and in ``/debug/state`` plain numbers that show leaks."""

import asyncio
import os
import socket
import time
from typing import Any

import psutil


def process_facts() -> dict[str, Any]:
    """Return this process's pid, open file descriptors, asyncio tasks, threads and resident memory in bytes.

    ``num_asyncio_tasks`` counts the unfinished tasks of the running loop, the caller's own included; 0 without a loop.
    """
    return {**facts_of(os.getpid()), "num_asyncio_tasks": _num_tasks()}


def process_identity(num_restarts: int) -> dict[str, Any]:
    """Return pid, host name, seconds since the start of this process, and how often it was started again before."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "age_seconds": max(0.0, time.time() - psutil.Process().create_time()),
        "num_restarts": num_restarts,
    }


def facts_of(pid: int) -> dict[str, Any]:
    """Return a process's open file descriptors, threads and resident bytes; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return {
            "pid": pid,
            "num_open_fds": process.num_fds(),
            "num_threads": process.num_threads(),
            "rss_bytes": process.memory_info().rss,
        }
    except psutil.NoSuchProcess:
        return {}


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
