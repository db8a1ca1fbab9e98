"""``kvbaton autoscaler``: scales the workers of a Docker Compose project."""

import logging
from collections.abc import Sequence

from autoscaler.service import serve
from launch.arguments import parse
from launch.autoscaler_settings import AutoscalerCommand
from serving import event_loop
from serving.logs import configure_logs, log_settings

logger = logging.getLogger(__name__)


def autoscaler(arguments: Sequence[str]) -> None:
    """Run ``kvbaton autoscaler``."""
    settings = parse(AutoscalerCommand, "kvbaton autoscaler", arguments)
    configure_logs("autoscaler", settings.log_level)
    log_settings(logger, settings)
    event_loop.run(serve(settings, lambda address: logger.info("ready: /health at %s", address)))
