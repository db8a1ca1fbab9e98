"""The commands that run one worker: ``kvbaton prefill | decode | both``."""

from collections.abc import Sequence

from cli.service import enter_service, run_service
from contract.identity import Role
from launch.worker_settings import BothCommand, DecodeCommand, PrefillCommand


def prefill(arguments: Sequence[str]) -> None:
    """Run ``kvbaton prefill``."""
    settings = enter_service(PrefillCommand, Role.PREFILL, arguments)
    from prefill_service.service import serve

    run_service(settings, serve)


def decode(arguments: Sequence[str]) -> None:
    """Run ``kvbaton decode``."""
    settings = enter_service(DecodeCommand, Role.DECODE, arguments)
    from decode_service.service import serve

    run_service(settings, serve)


def both(arguments: Sequence[str]) -> None:
    """Run ``kvbaton both``."""
    settings = enter_service(BothCommand, Role.AGGREGATED, arguments)
    from worker.service import serve_both

    run_service(settings, serve_both)
