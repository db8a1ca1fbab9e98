"""The queries of all dashboards, run as Grafana runs them."""

from collections.abc import AsyncIterator

from tests.monitoring.prometheus import Prometheus
from tools.dashboards import DASHBOARDS, RATE, Panel


async def panels_with_data(
    prometheus: Prometheus, worker: str, interval: str
) -> AsyncIterator[tuple[Panel, str, bool]]:
    """Yield each query of each panel, and whether it returns a number.

    worker: the one that is chosen on its dashboard. interval: what Grafana would take for its interval of rates.
    """
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for target in panel.targets:
                query = target.expression.replace(RATE, interval).replace("$worker", worker)
                found = await prometheus.query(query)
                yield panel, query, any(each["value"][1] != "NaN" for each in found)
