"""Windows of a recorded trace: those that are committed, or the same ones of the whole file."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulation.load import Arrival, azure_trace

EXCERPT = Path(__file__).parent / "traces" / "azure_llm_2023_code_windows.csv"


@dataclass(frozen=True)
class Window:
    """Some minutes of a trace. begin: seconds since its first request."""

    begin: float
    seconds: float

    def requests_of(self, trace: Sequence[Arrival]) -> list[Arrival]:
        """Return the requests of the window; the window begins at 0. Raises ValueError if it has none."""
        end = self.begin + self.seconds
        found = [replace(one, time=one.time - self.begin) for one in trace if self.begin <= one.time < end]
        if not found:
            raise ValueError(f"the trace has no requests from second {self.begin:g} to {end:g}")
        return found


STEADY = Window(1680.0, 420.0)
"""Seven minutes of few pauses, of which the calm parts are made, and which the growing part stretches over its ramp."""
BUSY = Window(1320.0, 180.0)
"""The busiest three minutes without a pause."""
WINDOWS = (BUSY, STEADY)


def read_trace(path: Path | None) -> list[Arrival]:
    """Return the requests of a whole trace in Azure's form, or without a path those of the committed windows.

    Raises SettingError if the file cannot be used.
    """
    return excerpt() if path is None else azure_trace(path)


def excerpt() -> list[Arrival]:
    """Return the committed requests."""
    with EXCERPT.open(newline="") as file:
        return [
            Arrival(float(row["seconds"]), int(row["prompt_tokens"]), int(row["answer_tokens"]))
            for row in csv.DictReader(file)
        ]


def write_excerpt(trace: Sequence[Arrival], path: Path = EXCERPT) -> None:
    """Write the requests of all windows."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("seconds", "prompt_tokens", "answer_tokens"))
        for window in WINDOWS:
            for one in window.requests_of(trace):
                seconds = round(window.begin + one.time, 3)
                writer.writerow((seconds, one.prompt_tokens, one.answer_tokens))
