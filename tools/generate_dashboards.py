"""Write docker/grafana/dashboards from ``tools.dashboards``, or check that the committed files are in sync."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from tools.dashboards import DASHBOARDS, Dashboard, Panel
from tools.generated_files import write_or_check

FOLDER = Path(__file__).resolve().parent.parent / "docker" / "grafana" / "dashboards"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_SCHEMA_VERSION = 39
_WIDTH = 12
_HEIGHT = 8


def files() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    for dashboard in DASHBOARDS:
        yield f"{dashboard.uid}.json", json.dumps(_dashboard(dashboard), indent=2) + "\n"


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["kvbaton"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_variable(dashboard.variable)] if dashboard.variable else []},
        "panels": [_panel(index, panel) for index, panel in enumerate(dashboard.panels)],
    }


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values(kvbaton_worker_info, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, 2)
    return {
        "id": index + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": letter, "datasource": _SOURCE, "expr": target.expression, "legendFormat": target.legend}
            for letter, target in zip(ascii_uppercase, panel.targets, strict=False)
        ],
    }


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Write the files, or with ``--check`` only compare."""
    wanted = {folder / name: text for name, text in files()}
    complaint = f"{folder} is out of sync with tools/dashboards.py: run `make dashboards`"
    return write_or_check(wanted, arguments, complaint, present=folder.glob("*.json"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
