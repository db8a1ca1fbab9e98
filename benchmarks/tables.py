"""Write the tables of ``docs/performance.md`` from ``results`` (``python -m benchmarks.tables``); ``--check`` compares.

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``, where NAME is a file of the results. A table without
results is marked as not measured.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    autoscale_figures,
    drafts,
    engine,
    interference,
    policies,
    router,
    router_decisions,
    service_speed,
    steps,
)
from benchmarks.facts import RESULTS

COLUMNS = 100
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_TABLE = re.compile(r"(<!-- table: (\w+?)_([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "autoscale": autoscale_figures.table,
    "engine": engine.table,
    "service": service_speed.table,
    "interference": interference.table,
    "policies": policies.table,
    "router": router.table,
    "decisions": router_decisions.table,
    "steps": steps.table,
    "drafts": drafts.table,
}


def main(arguments: list[str], page: Path = PAGE, results: Path = RESULTS) -> int:
    """Write the page, or with ``--check`` only compare; return 1 if it does not match the results."""
    is_check = arguments == ["--check"]
    return write_page(page, filled(page.read_text(), results), "benchmarks.tables", is_check=is_check)


def write_page(page: Path, expected: str, module: str, *, is_check: bool) -> int:
    """Write a page, or only compare it; return 1 and name the module that writes it if it is not as expected."""
    if not is_check:
        page.write_text(expected)
    is_same = page.read_text() == expected
    if not is_same:
        print(f"docs/{page.name} does not match the results: run `python -m {module}`", file=sys.stderr)
    return 0 if is_same else 1


def filled(text: str, results: Path) -> str:
    """Return the page's text with all tables from the results. Raises KeyError for an unknown kind of table."""
    return _TABLE.sub(lambda match: match[1] + _table(match[2], match[3], results) + match[4], text)


def _table(kind: str, rest: str, results: Path) -> str:
    write = _WRITERS[kind]
    file = results / f"{kind}_{rest}.json"
    if not file.exists():
        return "\nNot measured yet.\n\n"
    found = json.loads(file.read_text())
    figures = found["figures"]
    machine = found["machine"]
    origin = f"{machine['cpu']}, {machine['cores']} cores, {found['date']}, commit {found['commit']}"
    return _wrapped(f"\n`{figures['command']}` ({origin})\n\n{write(figures)}\n\n")


def _wrapped(text: str) -> str:
    """Wrap paragraphs and list items; rows of tables stay on one line."""
    return "\n".join(line if line.startswith("|") else _wrapped_line(line) for line in text.split("\n"))


def _wrapped_line(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
