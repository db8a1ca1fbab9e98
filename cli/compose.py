"""``kvbaton compose``: writes a Docker Compose file for this machine."""

from collections.abc import Sequence

from autoscaler.configured_policy import configured_policy
from autoscaler.timing_model import read_timing
from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import parse
from launch.compose_file import compose_text
from launch.compose_settings import ComposeSettings


def compose(arguments: Sequence[str]) -> None:
    """Run ``kvbaton compose``."""
    settings = parse(ComposeSettings, "kvbaton compose", arguments)
    if settings.autoscale:
        _check_scaling(settings)
    text = compose_text(settings)
    if settings.output.exists() and not settings.overwrite:
        raise SettingError(f"output {settings.output} exists; add --overwrite to replace it", param="output")
    settings.output.write_text(text)
    profile = "gpu" if settings.prefill_devices else "cpu"
    print(f"{settings.output} is written. Start it with")
    print(f"  COMPOSE_PROFILES={profile} docker compose -f {settings.output} up -d --build --wait")


def _check_scaling(settings: ComposeSettings) -> None:
    """Raise SettingError for what the autoscaler of the file would refuse at its start."""
    if settings.timing is not None:
        read_timing(settings.timing)
    least = {Role.PREFILL: settings.least_prefill, Role.DECODE: settings.least_decode}
    most = {role: len(places) for role, places in settings.places().items()}
    bounded = settings.model_copy(update={"max_prefill": most[Role.PREFILL], "max_decode": most[Role.DECODE]})
    configured_policy(bounded, least, dict.fromkeys(least, settings.tensor_parallel_size))
