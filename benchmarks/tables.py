"""``python -m benchmarks.tables``: writes the tables of ``docs/performance.md`` from ``results``; ``--check`` compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, where NAME is a file of the results. What has not been
measured yet says so.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import engine, interference, service_speed, steps
from benchmarks.facts import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_TABLE = re.compile(r"(<!-- table: (\w+?)_([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "engine": engine.table,
    "service": service_speed.table,
    "interference": interference.table,
    "steps": steps.table,
}


def main(arguments: list[str], page: Path = PAGE, results: Path = RESULTS) -> int:
    """Write the page, or with ``--check`` only compare; the exit code says whether it is what the results say."""
    wanted = filled(page.read_text(), results)
    if arguments != ["--check"]:
        page.write_text(wanted)
    is_same = page.read_text() == wanted
    if not is_same:
        print(
            f"docs/{page.name} is not what the results say: run `python -m benchmarks.tables`",
            file=sys.stderr,
        )
    return 0 if is_same else 1


def filled(text: str, results: Path) -> str:
    """The page's text with every table as the results have it. Raises KeyError for a kind of table that nobody writes."""
    return _TABLE.sub(lambda match: match[1] + _table(match[2], match[3], results) + match[4], text)


def _table(kind: str, rest: str, results: Path) -> str:
    write, file = _WRITERS[kind], results / f"{kind}_{rest}.json"
    if not file.exists():
        return "\nNot measured yet.\n\n"
    found = json.loads(file.read_text())
    figures, machine = found["figures"], found["machine"]
    told = f"{machine['cpu']}, {machine['cores']} cores, {found['date']}, commit {found['commit']}"
    return f"\n`{figures['command']}` ({told})\n\n{write(figures)}\n\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
