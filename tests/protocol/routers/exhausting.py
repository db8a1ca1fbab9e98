"""The exploration of a world of several routers to its end, and what holds in every such world."""

import sys

from tests.protocol.explorer import Explorer, Findings
from tests.protocol.routers.chart import draw


def exhaust(explorer: Explorer) -> Findings:
    """Explore all orders of events: no law breaks, and every request is answered or has left."""
    findings = explorer.explore()
    scenario = findings.scenario
    assert findings.broken is None, draw(findings)
    assert findings.is_complete and findings.num_quiet > 0
    sys.stderr.write(
        f"\n{scenario.name}: {findings.num_worlds} worlds, {findings.num_steps} steps, {findings.cpu_seconds:.1f} s"
    )
    endings = {how for how, _ in findings.endings}
    assert endings == {"answered", *(["cancelled"] if "leave" in scenario.faults else [])}
    return findings
