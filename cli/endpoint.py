"""The address of a service, and the credentials for it."""

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import grpc
import grpc.aio

from contract.addresses import local_address
from contract.errors import SettingError, UnavailableError
from contract.identity import Role
from launch.client_settings import ClientSettings
from launch.command_settings import from_file
from launch.kept_process import Facts
from launch.settings import LocalSettings, child_environment, variable
from serving.api_keys import first_key

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Endpoint:
    """A service's HTTP and gRPC APIs.

    tls: certificates to trust; None: those that this machine trusts. certificate: file of the service's certificate, if it
    is on this machine.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    certificate: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request; over gRPC they are metadata, with lower-case names."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def open_session(self, max_connections: int = 1) -> aiohttp.ClientSession:
        """Open an HTTP session with a connect timeout; the service itself limits the time of an answer."""
        return aiohttp.ClientSession(
            headers=self.headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=max_connections, ssl=self.tls or True),
        )

    async def open_channel(self, address: str) -> grpc.aio.Channel:
        """Open a channel to the service's gRPC port: with TLS if the certificate is known, else without.

        Raises UnavailableError when the HTTP port, from which the certificate's name is read, does not present it.
        """
        if self.certificate is None:
            return grpc.aio.insecure_channel(address)
        credentials = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        # gRPC always checks the host name, and this certificate may be for any name.
        name = ("grpc.ssl_target_name_override", await self._certified_name())
        return grpc.aio.secure_channel(address, credentials, options=[name])

    async def _certified_name(self) -> str:
        """Return a name in the certificate of the HTTP port."""
        where = urlsplit(self.url)
        try:
            _, writer = await asyncio.open_connection(where.hostname, where.port, ssl=self.tls)
        except OSError as error:
            raise UnavailableError(f"{self.url} does not present {self.certificate}: {error}") from error
        names = writer.get_extra_info("peercert").get("subjectAltName", ())
        writer.transport.abort()  # only the certificate is needed; closing TLS would wait for the other side
        for kind, name in names:
            if kind in ("DNS", "IP Address"):
                return str(name).replace("*", "any")
        raise UnavailableError(f"{self.certificate} names no host and no IP address; gRPC rejects it")


def endpoint_at(url: str, settings: ClientSettings) -> Endpoint:
    """Return the running service at ``url``. Raises SettingError for a ``ca_file`` that cannot be used."""
    return Endpoint(url, settings.api_key, _trusting(settings.ca_file) if settings.ca_file else None)


def local_endpoint(settings: LocalSettings, facts: Facts) -> Endpoint:
    """Return the service of a local router, with the key and the certificate from the router's own settings.

    facts: those of the running router. Raises SettingError for settings that the router would reject.
    """
    given = child_environment(from_file(settings, Role.ROUTER))
    environment = {name.upper(): value for name, value in given.items()}
    file = environment.get(variable("api_keys_file"))
    key = first_key(environment.get(variable("api_keys")), Path(file) if file else None)
    certificate = environment.get(variable("tls_certificate_file"))
    address = local_address(facts["http"])
    if not certificate:
        return Endpoint(f"http://{address}", key)
    # Only this certificate is accepted, for any name: the service is addressed by its IP address.
    pinned = _trusting(Path(certificate))
    pinned.check_hostname = False
    # The certificate may be signed by an authority that is not in the file: it is trusted itself.
    pinned.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return Endpoint(f"https://{address}", key, pinned, Path(certificate))


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"ca_file {ca_file} cannot be used: {error.strerror or error}", param="ca_file"
        ) from error
