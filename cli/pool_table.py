"""Draws the routers and workers of a service as tables that fit the terminal."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from contract.identity import WORKER_ROLES

Worker = Mapping[str, Any]
Row = Mapping[str, Any]
"""The facts of a worker or of a router."""

_UNKNOWN = "–"
_ROLES: tuple[str, ...] = WORKER_ROLES
_ROLE_STYLES = {"prefill": "magenta", "decode": "blue", "both": "cyan"}
_STATE_STYLES = {
    "serving": "green",
    "starting": "cyan",
    "changing": "cyan",
    "draining": "yellow",
    "empty": "yellow",
}
_BAR_CELLS = 8
_GAP = 2
"""Spaces between two columns."""
_FULL = 0.95
_GPU_FULL = 0.99
_GIB = 2**30
_BUSY = 0.8


@dataclass(frozen=True)
class Column:
    """A column of the table. rank: columns with a higher one are left out first if the terminal is narrow."""

    title: str
    rank: int
    cell: Callable[[Row], Text]
    is_number: bool = True


def pool_view(pool: Mapping[str, Any], console: Console, *, remark: str = "") -> RenderableType:
    """Return the whole view of the merged list of all routers. remark: shown in red below the service's own figures."""
    # A role of a later version stands behind those that are known here.
    workers = sorted(
        pool["workers"],
        key=lambda worker: (
            _ROLES.index(worker["role"]) if worker["role"] in _ROLES else len(_ROLES),
            worker["id"],
        ),
    )
    remarks = [Text(remark, style="bold red")] if remark else []
    scaling = _scaling(pool.get("pools", {}))
    routers = _table([pool["routers"]], _ROUTER_COLUMNS, console)
    by_role = [list(same) for _, same in groupby(workers, lambda worker: worker["role"])]
    table = _table(by_role, _COLUMNS, console) if workers else Text("no worker is attached", style="yellow")
    counts = Counter(worker["role"] for worker in workers)
    parts = [
        f"kvbaton {pool['version']}",
        f"model {pool['model'] or 'not known yet'}",
        f"{pool['num_requests_running']} running",
        f"{pool['num_requests_waiting']} waiting",
        " + ".join(f"{counts[role]} {role}" for role in _ROLES if counts[role]),
        _pressure(pool.get("pools", {})),
    ]
    heading = Text(" · ".join(part for part in parts if part), style="bold")
    return Group(heading, *scaling, *remarks, routers, Text(), table)


def _pressure(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the load of each pool relative to its goals; empty without a pool that has workers."""
    known = [(role, pools[role]["scaling_pressure"]) for role in _ROLES if role in pools]
    shown = " + ".join(f"{pressure:.2f} {role}" for role, pressure in known if pools[role]["num_workers"])
    return f"pressure {shown}" if shown else ""


def _scaling(pools: Mapping[str, Mapping[str, Any]]) -> list[Text]:
    """Return a line with the workers that serve beside the desired ones; none without an autoscaler.

    Restarts of the autoscaler stand behind it, in red.
    """
    decided = {role: pools[role] for role in _ROLES if "desired_workers" in pools.get(role, {})}
    if not decided:
        return []
    shown = [
        f"{pool['num_serving']} of {pool['desired_workers']} {role} ({_reason(pool)})"
        for role, pool in decided.items()
    ]
    line = Text(f"autoscaler: serving {' + '.join(shown)}", style="bold")
    if number := max(pool.get("autoscaler_restarts", 0) for pool in decided.values()):
        line.append(f" · {number} {'restart' if number == 1 else 'restarts'}", style="red")
    return [line]


def _reason(pool: Mapping[str, Any]) -> str:
    """Return the reason of a decision, and what keeps the pool from the number that it needs."""
    reason = str(pool["scaling_reason"])
    if not (held := pool["scaling_held_workers"]):
        return reason
    number = f"{abs(held)} {'more' if held > 0 else 'fewer'}"
    by = pool["scaling_held_by"]
    return f"{number} held: {by}" if by == reason else f"{reason}, {number} held: {by}"


def _table(sections: Sequence[Sequence[Row]], available: Sequence[Column], console: Console) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold"
    )
    columns = _fitting(available, [row for section in sections for row in section], console.width)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    for section in sections:
        for row in section:
            table.add_row(*(column.cell(row) for column in columns))
        table.add_section()
    return table


def _fitting(available: Sequence[Column], rows: Sequence[Row], width: int) -> list[Column]:
    """Return the most important columns that fit next to each other, in their order."""
    columns = list(available)
    while len(columns) > 1 and _width(columns, rows) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _width(columns: Sequence[Column], rows: Sequence[Row]) -> int:
    cells = [
        max([cell_len(column.title), *(column.cell(row).cell_len for row in rows)]) for column in columns
    ]
    return sum(cells) + _GAP * (len(columns) - 1)


def _text(name: str, styles: Mapping[str, str] | None = None) -> Callable[[Worker], Text]:
    def cell(worker: Worker) -> Text:
        value = worker.get(name)
        shown = _UNKNOWN if value is None else str(value)
        # Workers name themselves: a control character must not reach the terminal.
        printable = "".join(character if character.isprintable() else "\ufffd" for character in shown)
        return Text(printable, style=(styles or {}).get(shown, "dim" if value is None else ""))

    return cell


def _number(name: str, show: Callable[[float], str]) -> Callable[[Worker], Text]:
    def cell(worker: Worker) -> Text:
        value = worker.get(name)
        return Text(_UNKNOWN, style="dim") if value is None else Text(show(value))

    return cell


def _count(value: float) -> str:
    """Return a number in at most five characters."""
    if value < 100_000:
        return f"{value:.0f}"
    return f"{value / 1e3:.0f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def _duration(seconds: float) -> str:
    """Return a duration with two or three digits and its unit."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _age(seconds: float) -> str:
    """Return the age of a process: seconds, minutes, hours or days."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 10 else _count(per_second)


def _recomputed(router: Row) -> Text:
    """Return the share of recent prompts that were computed again; red above 1 %, as the alert."""
    again = router.get("recomputed_per_second")
    if again is None:
        return Text(_UNKNOWN, style="dim")
    share = again / max(again, router["requests_per_second"]) if again else 0.0
    return Text(_percent(share), style="red" if share > 0.01 else "")


def _fault(name: str) -> Callable[[Row], Text]:
    """Return the cell of a count that is red above zero."""

    def cell(row: Row) -> Text:
        number = row.get(name)
        if number is None:
            return Text(_UNKNOWN, style="dim")
        return Text(str(number), style="red" if number else "")

    return cell


def _readiness(router: Row) -> Text:
    if "error" in router:
        return Text("silent", style="red")
    return Text("ready", style="green") if router.get("is_ready") else Text("not ready", style="yellow")


def _legs(worker: Worker) -> Text:
    """Return how many legs the router has bound to the worker, and its credit."""
    return Text(f"{worker['num_legs']}/{worker['max_requests']}")


def _kv(worker: Worker) -> Text:
    """Return the used share of the KV cache as a bar and a number."""
    usage = worker["kv_cache_usage"]
    if usage is None:
        return Text(_UNKNOWN, style="dim")
    num_full = min(_BAR_CELLS, round(_BAR_CELLS * usage))
    style = "red" if usage >= _FULL else "yellow" if usage >= _BUSY else "green"
    bar = Text("■" * num_full, style=style) + Text("·" * (_BAR_CELLS - num_full), style="dim")
    return Text.assemble(bar, f" {_percent(usage):>5}")


def _gpu(worker: Worker) -> Text:
    """Return how much of the memory of the worker's GPUs is used, and of how much, in GiB."""
    total = worker.get("gpu_bytes")
    used = worker.get("gpu_used_bytes")
    if used is None or not total:
        return Text(_UNKNOWN, style="dim")
    return Text(f"{used / _GIB:.0f}/{total / _GIB:.0f}", style="red" if used >= _GPU_FULL * total else "")


_COLUMNS = (
    Column("worker", 0, _text("id"), is_number=False),
    Column("role", 2, _text("role", _ROLE_STYLES), is_number=False),
    Column("state", 1, _text("state", _STATE_STYLES), is_number=False),
    Column("legs", 3, _legs),
    Column("run", 4, _number("num_running", _count)),
    Column("wait", 5, _number("num_waiting", _count)),
    Column("queued tok", 10, _number("queued_prompt_tokens", _count)),
    Column("KV used", 6, _kv),
    Column("hits", 9, _number("prefix_hit_rate", _percent)),
    Column("leases", 11, _number("num_leases", _count)),
    Column("fetches", 12, _number("num_fetches", _count)),
    Column("GPU GiB", 12, _gpu),
    Column("TTFT", 7, _number("ttft_seconds", _duration)),
    Column("ITL", 8, _number("itl_seconds", _duration)),
    Column("step", 13, _number("step_seconds", _duration)),
    Column("restarts", 14, _fault("num_restarts")),
    Column("bad pairs", 13, _fault("num_failed_pairs")),
    Column("age", 15, _number("age_seconds", _age)),
    Column("host", 16, _text("host"), is_number=False),
    Column("build", 17, _text("build"), is_number=False),
)
_ROUTER_COLUMNS = (
    Column("router", 0, _text("admin"), is_number=False),
    Column("state", 1, _readiness, is_number=False),
    Column("run", 2, _number("num_requests_running", _count)),
    Column("wait", 3, _number("num_requests_waiting", _count)),
    Column("req/s", 4, _number("requests_per_second", _rate)),
    Column("tok/s", 5, _number("tokens_per_second", _rate)),
    Column("errors/s", 6, _number("errors_per_second", _rate)),
    Column("replays/s", 7, _number("replays_per_second", _rate)),
    Column("recomputed", 8, _recomputed),
    Column("restarts", 9, _fault("num_restarts")),
    Column("age", 10, _number("age_seconds", _age)),
    Column("host", 11, _text("host"), is_number=False),
)
