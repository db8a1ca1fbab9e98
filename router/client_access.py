"""The clients of this router: what the HTTP and the gRPC API check and count together."""

import logging
from dataclasses import dataclass, field

from contract.addresses import is_loopback
from router.intake.cancellation import CancellableRequests
from router.intake.held_bytes import HeldBytes
from router.settings import RouterSettings
from serving.api_keys import ApiKeys
from serving.tls import Tls, read_tls
from serving.wrong_keys import WrongKeys

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientAccess:
    """The shared parts. tls: None if the APIs speak plain text. held: counts the bytes of requests that are answered."""

    keys: ApiKeys
    tls: Tls | None
    held: HeldBytes
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)
    running: CancellableRequests = field(default_factory=CancellableRequests)


def client_access(settings: RouterSettings) -> ClientAccess:
    """Read keys and certificates. Raises SettingError."""
    return ClientAccess(
        keys=ApiKeys(_given_keys(settings), settings.api_keys_file),
        tls=read_tls(settings.tls_certificate_file, settings.tls_key_file),
        held=HeldBytes(settings.max_held_bytes),
    )


def _given_keys(settings: RouterSettings) -> str | None:
    """Return ``api_keys``; None for an empty text, which a variable without a value is, if only this machine gets in.

    Otherwise the text stays, and is rejected: a variable that was lost must not open the service to all.
    """
    keys = settings.api_keys
    if keys is None or keys.strip() or not (is_loopback(settings.http) and is_loopback(settings.grpc)):
        return keys
    logger.warning(
        "api_keys (KVBATON_API_KEYS) is empty and counts as not set: every client of this machine is accepted"
    )
    return None
