"""The demo of the autoscaler with containers: what is read from the autoscaler's log. The stack itself: tests/docker."""

import logging

from benchmarks.autoscale_docker import decisions_in
from serving.logs import LineFormatter

BEGIN = 1_790_000_000.0
DECISION = "prefill 1 → 2: add (busy 0.9) | decode 1: hold"


def logged(
    seconds: float, message: str, name: str = "autoscaler.controller", level: int = logging.INFO
) -> str:
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    record.created = BEGIN + seconds
    return LineFormatter("autoscaler").format(record)


def test_decisions_are_read_from_the_log_of_a_container() -> None:
    """Its other lines are no decisions, nor are warnings of the controller. Compose writes a control sequence first."""
    lines = (
        logged(-3.0, "settings: prefill=1 | decode=1", "autoscaler.service"),
        f"\x1b[2K{logged(0.5, DECISION)}",
        logged(1.0, "add of a prefill worker has failed: a | b", level=logging.WARNING),
        logged(2.0, "the metrics are back"),
        logged(65.25, DECISION),
    )
    assert decisions_in("\n".join(lines), BEGIN) == [(0.5, DECISION), (65.2, DECISION)]
