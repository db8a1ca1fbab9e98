"""The clients of this router: what the HTTP and the gRPC API check and count together."""

from dataclasses import dataclass, field

from router.cancellation import CancellableRequests
from router.held_bytes import HeldBytes
from router.settings import RouterSettings
from serving.api_keys import ApiKeys
from serving.tls import Tls, read_tls
from serving.wrong_keys import WrongKeys


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
        keys=ApiKeys(settings.api_keys, settings.api_keys_file),
        tls=read_tls(settings.tls_certificate_file, settings.tls_key_file),
        held=HeldBytes(settings.max_held_bytes),
    )
