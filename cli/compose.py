"""``kvbaton compose``: writes a Docker Compose file for this machine."""

from collections.abc import Sequence

from contract.errors import SettingError
from launch.arguments import parse
from launch.compose_file import compose_text
from launch.compose_settings import ComposeSettings


def compose(arguments: Sequence[str]) -> None:
    """Run ``kvbaton compose``."""
    settings = parse(ComposeSettings, "kvbaton compose", arguments)
    text = compose_text(settings)
    if settings.output.exists() and not settings.overwrite:
        raise SettingError(f"output {settings.output} exists; add --overwrite to replace it", param="output")
    settings.output.write_text(text)
    profile = "gpu" if settings.prefill_devices else "cpu"
    print(f"{settings.output} is written. Start it with")
    print(f"  COMPOSE_PROFILES={profile} docker compose -f {settings.output} up -d --build --wait")
