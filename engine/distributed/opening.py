"""How a rank's process makes its half of a connector, of which the engine knows the name only."""

import pkgutil
import socket
from collections.abc import Callable

from engine.connector import RankConnector, RankConnectorPlan


def open_half(plan: RankConnectorPlan) -> RankConnector:
    """Call the opener with its settings and the line, which it owns from then on. Raises what it raises."""
    opener: Callable[[bytes, socket.socket], RankConnector] = pkgutil.resolve_name(plan.opener)
    return opener(plan.settings, socket.socket(fileno=plan.line))
