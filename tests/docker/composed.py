"""The services of a Compose file under a profile, with variables replaced: by Compose itself, or by this file."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cli.compose import compose
from tests.docker.stack import FOLDER, docker

Services = dict[str, dict[str, Any]]
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+):-([^}]*)\}")


SHIPPED = FOLDER / "compose.yaml"
ON_CPU = """
x-cpu-entrypoint: &entrypoint
  - sh
  - -c
  - exec kvbaton "$$@" --host "$$HOSTNAME" --admin "$$HOSTNAME:9101" --worker-id "$$1-$$HOSTNAME"
  - worker
services:
  prefill-gpu:
    image: kvbaton-worker:cpu
    build: {args: {TORCH_BUILD: cpu}}
    deploy: !reset null
    entrypoint: *entrypoint
  decode-gpu:
    image: kvbaton-worker:cpu
    deploy: !reset null
    entrypoint: *entrypoint
"""
"""An override of the profile gpu for an engine without GPUs: other images, no devices, and no flag for one."""


def written(folder: Path, *flags: str) -> Path:
    """Return the file that `kvbaton compose` writes with these flags."""
    path = folder / "compose.yaml"
    compose([*flags, "--output", str(path), "--overwrite"])
    return path


def by_compose(profile: str, variables: Mapping[str, str], path: Path = SHIPPED) -> Services:
    """Return what `docker compose config` makes of a file. It needs Compose v2 and no engine."""
    given = (f"COMPOSE_PROFILES={profile}", *(f"{name}={value}" for name, value in variables.items()))
    whole = json.loads(docker("compose", "-f", str(path), "config", "--format", "json", variables=given))
    services: Services = whole["services"]
    return services


def by_hand(profile: str, variables: Mapping[str, str], path: Path = SHIPPED) -> Services:
    """Return the same services, as far as the tests read them, without Compose."""
    replaced = _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2], path.read_text())
    services: Services = {
        name: service
        for name, service in yaml.safe_load(replaced)["services"].items()
        if profile in service.get("profiles", [profile])
    }
    for service in services.values():
        environment = service.get("environment", {})
        own = {name: value for name, value in variables.items() if name in environment}
        service["environment"] = {
            **environment,
            **{name: value for name, value in own.items() if environment[name] is None},
        }
        for device in devices(service):
            device["count"] = -1 if device["count"] == "all" else device["count"]
        service["volumes"] = [_volume(short) for short in service.get("volumes", ())]
    return services


def _volume(short: str) -> dict[str, Any]:
    source, target, *options = short.split(":")
    is_named = not source.startswith((".", "/"))
    return {
        "type": "volume" if is_named else "bind",
        "source": source,
        "target": target,
        "read_only": "ro" in options,
    }


def devices(service: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the devices that a service reserves."""
    resources = service.get("deploy", {}).get("resources", {})
    found: list[dict[str, Any]] = resources.get("reservations", {}).get("devices", [])
    return found


def started(service: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Run a worker's entrypoint in a shell, with a `kvbaton` in ``folder`` that prints its flags; return them."""
    program = folder / "kvbaton"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    words = [word.replace("$$", "$") for word in (*service["entrypoint"], *service["command"])]
    environment = {k: str(v) for k, v in service["environment"].items() if v is not None}
    run = subprocess.run(
        words,
        env={**environment, "PATH": f"{folder}:/usr/bin:/bin", "HOSTNAME": "container"},
        capture_output=True,
        text=True,
        check=True,
    )
    role, *flags = run.stdout.split()
    return {"role": role, **dict(zip(flags[::2], flags[1::2], strict=True))}
