"""``python -m benchmarks.attacks``: the cost of each attack to the service and other clients, to ``results/attacks.json``.

``--before PYTHON`` attacks the service of another Python environment, for example of an older commit, and keeps this
version's figures. ``--only WORD`` runs the attacks whose names contain the word. ``--repeat N`` runs each N times, keeps
the run with the median growth of p99, and records all of them.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.facts import RESULTS, command_line, read_figures, run_facts, write_result
from tests.chaos.attacks.running import AttackReport, run_attack
from tests.chaos.attacks.weapons import WEAPONS

_SECONDS = 30.0
"""At ten requests a second p99 is the third worst of 300, which excludes one or two delays by the machine itself."""


def main() -> None:
    """Run the attacks, write the figures, print the table; the exit code is 1 if a limit was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="Python of an older version, which is attacked instead of this one")
    parser.add_argument("--only", default="", help="run only attacks whose names contain this word")
    parser.add_argument("--repeat", type=int, default=1, help="number of runs of each attack")
    given = parser.parse_args()
    figures: dict[str, Any] = (
        read_figures("attacks")["attacks"] if (RESULTS / "attacks.json").exists() else {}
    )
    code, python = ("before", given.before) if given.before else ("now", sys.executable)
    for name in [name for name in WEAPONS if given.only in name]:
        figures.setdefault(name, {})[code] = {
            "commit": run_facts()["commit"],
            **_median_run(name, python, given.repeat),
        }
        write_result("attacks", {"command": command_line("benchmarks.attacks"), "attacks": figures})
    sys.stdout.write(table(figures))
    sys.exit(any(one["now"]["wrong"] for one in figures.values() if "now" in one))


def _median_run(name: str, python: str, repeat: int) -> dict[str, Any]:
    runs = sorted((_attacked(name, python) for _ in range(repeat)), key=_p99_factor)
    wrong = [text for run in runs for text in run["wrong"]]
    return {
        **runs[len(runs) // 2],
        "p99_factors": [round(_p99_factor(run), 2) for run in runs],
        "wrong": wrong,
    }


def _p99_factor(run: dict[str, Any]) -> float:
    factor: float = run["p99_during"] / (run["p99_before"] or 1.0)
    return factor


def _attacked(name: str, python: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvbaton-attack-") as folder:
        try:
            report = asyncio.run(run_attack(Path(folder), name, python, _SECONDS))
        except (AssertionError, OSError, TimeoutError) as error:
            report = AttackReport(name)
            figures = {**report.as_dict(), "wrong": [repr(error)[:2000]]}
        else:
            figures = report.as_dict()
    sys.stderr.write(json.dumps(figures) + "\n")
    return figures


def table(figures: dict[str, Any]) -> str:
    """Return a Markdown table with a row per attack: memory, the other client's p99, the first answer, the log."""
    head = "| attack | code | router MiB | workers MiB | p99 s | failed | answer after, s | log KiB |"
    rows = [
        _row(name, code, one) for name, by_code in figures.items() for code, one in sorted(by_code.items())
    ]
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- | --- |", *rows, ""])


def _row(name: str, code: str, one: dict[str, Any]) -> str:
    def span(names: list[str]) -> str:
        idle, peak = (max((one[key].get(n, 0) for n in names), default=0) for key in ("idle_mib", "peak_mib"))
        return f"{idle:.0f} → {peak:.0f}"

    workers = [worker for worker in one["idle_mib"] if worker != "router"]
    cells = (
        name.replace("_", " "),
        code,
        span(["router"]),
        span(workers),
        f"{one['p99_before']:.3f} → {one['p99_during']:.3f}",
        f"{one['num_failed']} of {one['num_asked']}",
        f"{one['answered_after']:.2f}",
        f"{one['log_bytes'] / 1024:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
