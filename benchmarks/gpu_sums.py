"""Times the sums of a worker's ranks: NCCL and symmetric memory between GPUs, alone and in a graph; gloo on the CPU."""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_steps import seconds_of, wait_for
from contract.errors import SettingError
from engine.compute.recording import CudaRecorder
from engine.distributed.process_group import (
    SymmetricSums,
    TorchRankGroup,
    find_library,
    listen_for_ranks,
    open_store,
)

HIDDEN_SIZE = 4096
_ROWS = (1, 64, 256)
_NUM_IN_GRAPH = 32
_MAX_RANKS = 8
_SECONDS = 120.0
_Rows = list[dict[str, Any]]


def sums(device: torch.device, num_rounds: int) -> Iterator[dict[str, Any]]:
    """Measure sums of 1, 64 and 256 tokens on all GPUs, or on two ranks of the CPU; nothing on a single GPU."""
    size = min(torch.cuda.device_count(), _MAX_RANKS) if device.type == "cuda" else 2
    if size < 2:
        print("not measured: sums need two GPUs", flush=True)
        return
    context = multiprocessing.get_context("spawn")
    results: Queue[_Rows] = context.Queue()
    listening = listen_for_ranks()
    port = listening.getsockname()[1]
    ranks = [
        context.Process(
            target=_measure,
            args=(rank, size, None if rank else listening, port, device.type, num_rounds, results),
        )
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    try:
        yield from results.get(timeout=_SECONDS)
    finally:
        for each in ranks:
            each.join(timeout=_SECONDS)
            each.kill()


def _measure(
    rank: int, size: int, listening: Any, port: int, kind: str, num_rounds: int, results: "Queue[_Rows]"
) -> None:
    """Run one rank; rank 0 puts the rows of all sums."""
    is_cuda = kind == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    store = open_store(listening, port, size)
    group = TorchRankGroup(device, rank, size, store, timedelta(seconds=_SECONDS))
    rows = _rows_of("nccl" if is_cuda else "gloo", group, device, num_rounds)
    if is_cuda:
        try:
            group.sums = SymmetricSums(find_library(device, group.backend), device, rank, size, store)
            rows += _rows_of("symmetric", group, device, num_rounds)
        except SettingError as error:
            rows.append({"way": "symmetric", "error": error.message})
    if rank == 0:
        results.put(rows)
    group.close()


def _rows_of(way: str, group: TorchRankGroup, device: torch.device, num_rounds: int) -> _Rows:
    rows = []
    for num_tokens in _ROWS:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        part = torch.ones(num_tokens, HIDDEN_SIZE, dtype=dtype, device=device)
        is_right = bool((group.add_up(part.clone()) == group.size).all())

        def add(part: Tensor = part) -> Tensor:
            return group.add_up(part)

        runs: dict[str, tuple[Callable[[], object], int]] = {"alone": (add, 1)}
        if device.type == "cuda":
            part.zero_()  # a sum may overwrite its part: zeros stay what they are

            def add_many(add: Callable[[], Tensor] = add) -> Tensor:
                return [add() for _ in range(_NUM_IN_GRAPH)][-1]

            runs["in a graph"] = (CudaRecorder(device).record(add_many).replay, _NUM_IN_GRAPH)
        for name, (run, count) in runs.items():

            def waited(run: Callable[[], object] = run) -> None:
                run()
                wait_for(device)

            seconds = statistics.median(seconds_of(waited, num_rounds)) / count
            row = {"way": way, "launch": name, "num_ranks": group.size, "num_bytes": part.nbytes}
            rows.append({**row, "us": seconds * 1e6, "is_right": is_right})
    return rows
