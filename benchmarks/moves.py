"""``python -m benchmarks.moves``: answers move between worker processes while they are decoded, to ``results/moves.json``.

One prefill and two decode workers run in processes of their own; the router runs here, so that each move is ordered at a
chosen token. A stream moves to and fro every few tokens, and begins again as a replay a few times: the gap between its
tokens at that moment, less the usual gap, is what a client notices. Prefix caches are off: every move carries the whole
context, and every replay computes it. Goals: the 99th percentile of the added gap of a move is at most three steps or 50 ms
(whichever is more), and the time in which the bytes of a move are copied (median); its median is at most a quarter of that
of a replay; all answers are those of undisturbed runs; no block stays held. Each cell is one transport and one context
length.

A step is a gap that the client of the same answers sees while nothing disturbs them. The 99th percentile of the pauses is
compared with that of these gaps, as in ``make chaos``. Without other answers 50 ms are more, whichever quantile is taken;
beside other answers single gaps are longer than three usual ones. The bound with three usual gaps is listed too.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import command_line, write_result
from benchmarks.gaps import percentile
from benchmarks.moving_pool import MovingPool, Stream, running_moving_pool
from kv_transfer.options import TransportName
from tests.checkpoints import make_checkpoint

MIN_BOUND = 0.05
NUM_STEPS = 3
MAX_SHARE = 0.25
_NUM_LARGEST = 5
MOVE_EVERY = 5
"""Tokens between two moves of a stream."""
MOVES_PER_STREAM = 8
REPLAYS_PER_STREAM = 3
TRANSPORTS: tuple[TransportName, ...] = ("shm", "tcp")
DEMO_LENGTHS = (500, 1000, 1950)
LONG_LENGTH = 4000
BUSY_LENGTH = 500
_LENGTH_OF_OTHERS = 50
_TOKENS_OF_OTHERS = 900
DEMO_VOCABULARY = 1456
LONG_VOCABULARY = 256


@dataclass(frozen=True)
class Cell:
    """One context length. num_replays: for the comparison. model: None for the demo model.

    num_others: answers that the workers decode meanwhile. A target that decodes nothing has no step that must end first.
    """

    length: int
    num_moves: int
    num_replays: int
    vocabulary: int = DEMO_VOCABULARY
    model: Path | None = None
    num_others: int = 0

    def name(self, transport: str) -> str:
        """Return the name of its figures."""
        others = f", {self.num_others} others" if self.num_others else ""
        return f"{self.model.name if self.model else 'demo'}, {self.length} tokens, {transport}{others}"


@dataclass
class Measured:
    """The figures of a cell, in seconds.

    gaps: of the undisturbed streams. steps: the usual gap of each other stream. copies: the time of each move's bytes.
    """

    moves: list[float] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    results: dict[str, int] = field(default_factory=dict)
    num_changed: int = 0

    def take(self, kind: str, stream: Stream, expected: str) -> None:
        """Add a stream, all of whose disturbances were of one kind."""
        self.num_changed += stream.text != expected
        self.steps.append(stream.step)
        added = [max(0.0, gap.seconds - stream.step) for gap in stream.gaps]
        (self.moves if kind == "move" else self.replays).extend(added)

    def figures(self) -> dict[str, Any]:
        """Return milliseconds, and whether the goals are reached."""
        step = percentile(self.steps, 0.5) or 0.0
        move = percentile(self.moves, 0.5) or 0.0
        worst = percentile(self.moves, 0.99) or 0.0
        replay = percentile(self.replays, 0.5) or 0.0
        copy = percentile(self.copies, 0.5) or 0.0
        gap = percentile(self.gaps, 0.99) or 0.0
        bound = max(NUM_STEPS * gap, MIN_BOUND) + copy
        return {
            "num_moves": len(self.moves),
            "num_replays": len(self.replays),
            "results": self.results,
            "step_ms": _ms(step),
            "added_gap_ms": {"p50": _ms(move), "p99": _ms(worst)},
            "largest_ms": [_ms(each) for each in sorted(self.moves, reverse=True)[:_NUM_LARGEST]],
            "replay_ms": {"p50": _ms(replay), "max": _ms(max(self.replays, default=0.0))},
            "copying_ms": _ms(copy),
            "undisturbed_gap_ms": {"p50": _ms(percentile(self.gaps, 0.5) or 0.0), "p99": _ms(gap)},
            "bound_ms": _ms(bound),
            "bound_with_the_usual_gap_ms": _ms(max(NUM_STEPS * step, MIN_BOUND) + copy),
            "share_of_replay": round(move / replay, 3) if replay else None,
            "is_within_bound": worst <= bound,
            "is_within_share": move <= MAX_SHARE * replay,
            "num_changed_answers": self.num_changed,
        }


def main() -> None:
    """Run all cells, write the figures; the exit code is 1 if an answer has changed or a block is held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=64, help="moves of each cell")
    parser.add_argument("--replays", type=int, default=12, help="replays of each cell")
    parser.add_argument(
        "--others", type=int, default=16, help="answers beside those that move, in the last demo cell"
    )
    parser.add_argument("--seed", type=int, help="of a run to repeat")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    sys.stderr.write(f"moves: --seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="kvbaton-moves-") as folder:
        long_model = long_checkpoint(Path(folder) / "long")
        cells = [Cell(length, given.moves, given.replays) for length in DEMO_LENGTHS]
        cells.append(Cell(BUSY_LENGTH, given.moves, given.replays, num_others=given.others))
        cells.append(Cell(LONG_LENGTH, given.moves, given.replays, LONG_VOCABULARY, long_model))
        found = asyncio.run(measure_all(Path(folder), cells, TRANSPORTS, seed))
    figures = {
        "command": command_line("benchmarks.moves"),
        "seed": seed,
        "load_average": [round(each, 2) for each in os.getloadavg()],
        **found,
    }
    path = write_result("moves", figures)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")
    sys.exit(not found["is_clean"])


def long_checkpoint(folder: Path) -> Path:
    """Write random weights of a small model that has ``LONG_LENGTH`` tokens of context."""
    folder.mkdir()
    return make_checkpoint(
        folder,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONG_LENGTH + 200,
    )


async def measure_all(
    folder: Path, cells: Sequence[Cell], transports: Sequence[TransportName], seed: int
) -> dict[str, Any]:
    """Measure all cells over all transports, those of one model on the same processes."""
    figures: dict[str, Any] = {}
    leaks: list[str] = []
    for transport in transports:
        for model in dict.fromkeys(cell.model for cell in cells):
            name = model.name if model else "demo"
            place = folder / f"{transport}-{name}"
            place.mkdir()
            async with running_moving_pool(place, transport, model) as pool:
                for cell in cells:
                    if cell.model == model:
                        rng = random.Random(f"{seed}:{transport}:{name}:{cell.length}")
                        others = [
                            _body(rng, cell, _LENGTH_OF_OTHERS, _TOKENS_OF_OTHERS)
                            for _ in range(cell.num_others)
                        ]
                        async with pool.others(others):
                            measured = await measure_cell(pool, cell, rng)
                        figures[cell.name(transport)] = measured.figures()
                        sys.stderr.write(f"{cell.name(transport)}: {measured.figures()}\n")
                leaks += await pool.leaks()
    num_changed = sum(cell["num_changed_answers"] for cell in figures.values())
    return {
        "num_moves": sum(cell["num_moves"] for cell in figures.values()),
        "num_changed_answers": num_changed,
        "leaks": leaks,
        "is_clean": not num_changed and not leaks,
        "are_within_bound": all(cell["is_within_bound"] for cell in figures.values()),
        "are_within_share": all(cell["is_within_share"] for cell in figures.values()),
        "cells": figures,
    }


async def measure_cell(pool: MovingPool, cell: Cell, rng: random.Random) -> Measured:
    """Run streams of new prompts, each undisturbed, moved, and replayed, until there are enough moves and replays."""
    measured = Measured()
    while len(measured.moves) < cell.num_moves or len(measured.replays) < cell.num_replays:
        body = _body(rng, cell, cell.length, MOVE_EVERY * (MOVES_PER_STREAM + 4))
        undisturbed = await pool.ask(body)
        expected = undisturbed.text
        measured.gaps.extend(undisturbed.undisturbed_gaps)
        if len(measured.moves) < cell.num_moves:
            moved = await pool.ask(body, pool.move, MOVE_EVERY, MOVES_PER_STREAM)
            measured.take("move", moved, expected)
        if len(measured.replays) < cell.num_replays:
            replayed = await pool.ask(body, pool.replay, MOVE_EVERY, REPLAYS_PER_STREAM)
            measured.take("replay", replayed, expected)
    measured.copies = pool.take_copies()
    measured.results = {result.value: count for result, count in pool.take_results().items()}
    return measured


def _body(rng: random.Random, cell: Cell, length: int, num_tokens: int) -> dict[str, Any]:
    """Return a request with a new prompt for the model of a cell."""
    return {
        "prompt": [rng.randrange(5, cell.vocabulary) for _ in range(length)],
        "max_tokens": num_tokens,
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.randrange(2**31),
        "ignore_eos": True,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


if __name__ == "__main__":
    main()
