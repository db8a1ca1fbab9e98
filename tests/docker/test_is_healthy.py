"""The containers' health check without an engine: docker/is-healthy itself, run against real ports."""

import asyncio
from pathlib import Path

import trustme

from contract.addresses import split_address
from contract.identity import Role
from tests.certificates import write_certificate
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END

SCRIPT = Path(__file__).parents[2] / "docker" / "is-healthy"


async def is_healthy(address: str) -> bool:
    """Run the script for this port, with the host name that a container has."""
    host, port = split_address(address)
    environment = {"PATH": "/usr/bin:/bin", "HOSTNAME": host}
    check = await asyncio.create_subprocess_exec(
        str(SCRIPT), str(port), env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    return await check.wait() == 0


async def test_a_router_with_tls_and_keys_is_healthy_when_its_workers_are_there(tmp_path: Path) -> None:
    certificate, key = write_certificate(trustme.CA(), tmp_path, "example.org")
    door = {"tls_certificate_file": certificate, "tls_key_file": key, "api_keys": "sk-a"}
    async with running_cluster(Script(tokens=[END]), (), **door) as cluster:
        addresses = cluster.service.addresses
        assert not await is_healthy(addresses.admin)
        await cluster.add(Role.AGGREGATED)
        async with asyncio.timeout(20):
            await cluster.service.wait_ready()
        assert await is_healthy(addresses.admin)
        assert not await is_healthy(addresses.http)
    assert not await is_healthy(addresses.admin)
