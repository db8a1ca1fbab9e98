"""Real reverse proxies of Debian's packages ``nginx-light`` and ``caddy``, with the files of ``examples/``, for one test."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from router.service import BoundAddresses

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAME = "llm.example.org"
_START_SECONDS = 30
_NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr; events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


@dataclass(frozen=True)
class Proxy:
    """A running proxy. session: its connections go to the proxy, whatever host a URL names. grpc: a channel's target."""

    session: aiohttp.ClientSession
    grpc: str

    def url(self, path: str) -> str:
        """Return a URL with the name of the example."""
        return f"http://{NAME}{path}"


RunProxy = Callable[..., AbstractAsyncContextManager[Proxy]]


@asynccontextmanager
async def nginx(folder: Path, router: BoundAddresses, idle_seconds: int = 610) -> AsyncIterator[Proxy]:
    """Run nginx in front of a router. idle_seconds: its limit for the silence of an answer."""
    site = (EXAMPLES / "nginx.conf").read_text()
    changes = {
        "listen 80;": f"listen unix:{folder}/http;",
        "listen 9080 http2;": f"listen unix:{folder}/grpc http2;",
        "server 127.0.0.1:8000;": f"server {router.http};",
        "grpc://127.0.0.1:9000;": f"grpc://{router.grpc};",
        "_read_timeout 610s;": f"_read_timeout {idle_seconds}s;",
    }
    (folder / "site.conf").write_text(_changed(site, changes))
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder))
    async with _running(["nginx", "-p", str(folder), "-c", str(config), "-e", "stderr"], folder) as proxy:
        yield proxy


@asynccontextmanager
async def caddy(folder: Path, router: BoundAddresses) -> AsyncIterator[Proxy]:
    """Run Caddy in front of a router."""
    site = (EXAMPLES / "Caddyfile").read_text()
    changes = {
        f"{NAME} {{": f"http://{NAME} {{\n\tbind unix/{folder}/http",
        f"{NAME}:9443 {{": f"http://{NAME}:9443 {{\n\tbind unix/{folder}/grpc",
        "127.0.0.1:8000": router.http,
        "h2c://127.0.0.1:9000": f"h2c://{router.grpc}",
    }
    config = folder / "Caddyfile"
    settings = "{\n\tadmin off\n\tservers {\n\t\tprotocols h1 h2 h2c\n\t}\n}\n"
    config.write_text(settings + _changed(site, changes))
    async with _running(["caddy", "run", "--config", str(config), "--adapter", "caddyfile"], folder) as proxy:
        yield proxy


def _changed(text: str, changes: dict[str, str]) -> str:
    """Replace what a test needs otherwise. Each text must be in the example."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@asynccontextmanager
async def _running(command: Sequence[str], folder: Path) -> AsyncIterator[Proxy]:
    program = shutil.which(command[0])
    assert program, f"{command[0]} is missing: apt-get install --no-install-recommends nginx-light caddy"
    log = folder / "proxy.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program,
            *command[1:],
            stdout=subprocess.DEVNULL,
            stderr=output,
            env=dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder)),
        )
    try:
        await _until(lambda: _accepts(folder / "http"), process, log)
        await _until(lambda: _accepts(folder / "grpc"), process, log)
        connector = aiohttp.UnixConnector(str(folder / "http"))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Proxy(session, f"unix:{folder / 'grpc'}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until(
    is_true: Callable[[], Awaitable[bool]], process: asyncio.subprocess.Process, log: Path
) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while not await is_true():
            assert process.returncode is None, log.read_text()
            await asyncio.sleep(0.05)


async def _accepts(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True
