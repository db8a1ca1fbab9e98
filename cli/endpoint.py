"""Where a service is asked, and what it takes to be let in."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from cli.child_settings import from_file
from cli.settings import ClientSettings, LocalSettings, child_environment, variable
from contract.errors import SettingError
from contract.identity import Role
from serving.api_keys import first_key
from worker.launch import Facts

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Endpoint:
    """A service's HTTP API. tls: which certificates it may show; None takes those that this machine trusts."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every question, over gRPC as metadata (by lower-case names)."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def open_session(self, max_connections: int = 1) -> aiohttp.ClientSession:
        """A session for questions: connecting is bounded; how long an answer may take is the service's decision."""
        return aiohttp.ClientSession(
            headers=self.headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=max_connections, ssl=self.tls or True),
        )


def endpoint_at(url: str, settings: ClientSettings) -> Endpoint:
    """The running service at ``url``. Raises SettingError for a ``ca_file`` that cannot be used."""
    return Endpoint(url, settings.api_key, _trusting(settings.ca_file) if settings.ca_file else None)


def local_endpoint(settings: LocalSettings, facts: Facts) -> Endpoint:
    """The service that a router of ``settings`` with these facts is; its own settings give the key and the certificate.

    Raises SettingError where the router would.
    """
    given = child_environment(from_file(settings, Role.ROUTER))
    environment = {name.upper(): value for name, value in given.items()}
    file = environment.get(variable("api_keys_file"))
    key = first_key(environment.get(variable("api_keys")), Path(file) if file else None)
    certificate = environment.get(variable("tls_certificate_file"))
    if not certificate:
        return Endpoint(f"http://{facts['http']}", key)
    return Endpoint(f"https://{facts['http']}", key, _pinned(Path(certificate)))


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"ca_file {ca_file} cannot be used: {error.strerror or error}", param="ca_file"
        ) from error


def _pinned(certificate: Path) -> ssl.SSLContext:
    """Accepts this one certificate, whatever name it is for: the service is asked by its address."""
    context = _trusting(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return context
