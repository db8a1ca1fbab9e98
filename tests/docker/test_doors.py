"""The doors of the containers, without an engine: host names of clients, and API keys, as the shipped files set them."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from contract.identity import Role
from tests.docker.composed import SHIPPED, Services, by_hand, written
from tests.docker.test_compose_file import DOCKERFILE
from tests.fakes.router.script import Script
from tests.private_files import write_private
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END

HELLO = Script(tokens=[END])
EVIL = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
SCALED = ("--autoscale", "--prefill", "1:2", "--decode", "1:2")


def composed(folder: Path) -> list[Services]:
    """Return the services of the shipped file, and of files that the command writes."""
    files = [SHIPPED]
    for number, flags in enumerate((("--prefill", "2"), SCALED)):
        (folder / str(number)).mkdir()
        files.append(written(folder / str(number), *flags))
    return [by_hand(profile, {}, file) for file in files for profile in ("cpu", "gpu")]


def variables_of(stage: str) -> dict[str, str]:
    """Return the variables that the Dockerfile sets in a stage."""
    text = DOCKERFILE[DOCKERFILE.index(f" AS {stage}\n") :].partition("\nFROM ")[0]
    pairs = " ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE)).split()
    return dict(pair.split("=", 1) for pair in pairs)


def test_every_own_service_with_a_port_checks_host_names(tmp_path: Path) -> None:
    """A server that binds to all addresses of its container cannot see on which one it is published."""
    for services in composed(tmp_path):
        for name, service in services.items():
            if name in ("secret", "namespaces", "prometheus", "grafana"):
                continue
            names = service["environment"]["KVBATON_ALLOWED_HOSTS"].split(",")
            assert "localhost" in names and "*" not in names, name
        if "grafana" in services:
            assert services["grafana"]["environment"]["GF_SERVER_ENFORCE_DOMAIN"] == "true"
    for stage in ("router", "worker"):
        assert variables_of(stage)["KVBATON_ALLOWED_HOSTS"] == "localhost"


@pytest.mark.parametrize("source", ["image", "compose"])
async def test_a_page_that_rebinds_its_name_is_refused_as_the_containers_are_set_up(source: str) -> None:
    image = variables_of("router")
    variables = image if source == "image" else image | by_hand("cpu", {})["router"]["environment"]
    ports = {name: variables[f"KVBATON_{name.upper()}"] for name in ("http", "grpc", "internal", "admin")}
    wide = {name: f"{address.rpartition(':')[0]}:0" for name, address in ports.items()}
    assert set(wide.values()) == {"0.0.0.0:0"}
    hosts = variables["KVBATON_ALLOWED_HOSTS"]
    async with running_cluster(HELLO, (Role.AGGREGATED,), **wide, allowed_hosts=hosts) as cluster:

        async def asked(method: str, port: str, path: str, headers: Mapping[str, str]) -> int:
            address = getattr(cluster.service.addresses, port).replace("0.0.0.0", "127.0.0.1")
            url = f"http://{address}{path}"
            body = {"prompt": "x"} if method == "POST" else None
            async with cluster.session.request(method, url, json=body, headers=headers) as response:
                return response.status

        for host in (
            "127.0.0.1:8000",
            "localhost",
            "172.18.0.3:9101",
            *(["router:8000"] if source == "compose" else []),
        ):
            assert await asked("POST", "http", "/v1/completions", {"Host": host}) == 200
            assert await asked("GET", "admin", "/metrics", {"Host": host}) == 200
        for method, port, path in (
            ("POST", "http", "/v1/completions"),
            ("GET", "http", "/metrics"),
            ("GET", "http", "/v1/models"),
            ("GET", "admin", "/debug/state"),
            ("GET", "admin", "/metrics"),
            ("POST", "admin", "/admin/workers/both-0/drain"),
        ):
            assert await asked(method, port, path, EVIL) == 421, path
            assert await asked(method, port, path, {"Host": EVIL["Host"]}) == 421, path
        assert (
            await asked("GET", "admin", "/debug/state", {"Host": "localhost", "Origin": EVIL["Origin"]})
            == 403
        )


def given_keys_file(services: Services, folder: Path, secret: Path) -> str:
    """Run the router's entrypoint in a shell, with a `kvbaton` that prints the variable; return what it printed.

    secret: the file that Compose mounts as the secret.
    """
    program = folder / "kvbaton"
    program.write_text('#!/bin/sh\nprintf "%s %s" "$1" "${KVBATON_API_KEYS_FILE-unset}"\n')
    program.chmod(0o755)
    router = services["router"]
    words = [
        word.replace("$$", "$").replace("/run/secrets/api_keys", str(secret)) for word in router["entrypoint"]
    ]
    run = subprocess.run(
        [*words, *router["command"]],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def test_the_router_gets_the_api_keys_of_a_file_and_fails_closed(tmp_path: Path) -> None:
    """Only the device that stands for no keys opens the service: an empty, missing or unreadable file does not."""
    services = by_hand("cpu", {})
    assert services["router"]["secrets"] == ["api_keys"]
    assert 'api_keys: {file: "${API_KEYS_FILE:-/dev/null}"}' in SHIPPED.read_text()
    assert given_keys_file(services, tmp_path, Path("/dev/null")) == "router unset"
    keys = write_private(tmp_path / "keys", "a-key\n")
    for secret in (keys, write_private(tmp_path / "empty", ""), tmp_path / "missing", tmp_path):
        assert given_keys_file(services, tmp_path, secret) == f"router {secret}"
