"""The clients of this router: what the HTTP and the gRPC API check and count together."""

import logging
from dataclasses import dataclass, field

from contract.addresses import is_loopback
from router.intake.cancellation import CancellableRequests
from router.intake.limits import HeldBytes
from router.settings import RouterSettings
from serving.api_keys import ApiKeys, WrongKeys
from serving.penalties import Penalties
from serving.tls import Tls, read_tls

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientAccess:
    """The shared parts. tls: None if the APIs speak plain text. held: counts the bytes of requests that are answered.

    penalties: of addresses that waste the event loop's time, on either port.
    """

    keys: ApiKeys
    tls: Tls | None
    held: HeldBytes
    penalties: Penalties
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)
    running: CancellableRequests = field(default_factory=CancellableRequests)


def client_access(settings: RouterSettings) -> ClientAccess:
    """Read keys and certificates. Raises SettingError."""
    keys = settings.api_keys
    if keys is not None and not keys.strip() and is_loopback(settings.http) and is_loopback(settings.grpc):
        # a variable without a value is an empty text; where other machines get in it stays, and is rejected, since a
        # variable that was lost must not open the service to all
        logger.warning(
            "api_keys (KVBATON_API_KEYS) is empty and counts as not set: every client of this machine is accepted"
        )
        keys = None
    tls = read_tls(settings.tls_certificate_file, settings.tls_key_file)
    return ClientAccess(
        keys=ApiKeys(keys, settings.api_keys_file),
        tls=tls,
        held=HeldBytes(settings.max_held_bytes),
        penalties=Penalties(has_tls=tls is not None),
    )
