"""The service's rules for clients: the highest priority, and whose cached KV a client may reuse."""

from dataclasses import dataclass
from hashlib import sha256

from msgspec import structs

from router.prepared_request import PreparedRequest
from router.request import BACKGROUND_PRIORITY

_DOMAIN = b"kvbaton.cache_salt.v1"


@dataclass(frozen=True)
class TenantRules:
    """The rules for clients.

    shares_prefix_cache: clients with different API keys reuse each other's cached prompts. max_priority: a higher priority
    counts as this one. is_lower_first: clients give the first requests the lowest numbers; ``max_priority`` is then that of
    the number's negative.
    """

    shares_prefix_cache: bool = False
    max_priority: int = 100
    is_lower_first: bool = False

    def apply(self, request: PreparedRequest) -> PreparedRequest:
        """Return the request as it is queued and sent to workers."""
        salt = request.cache_salt
        is_turned = self.is_lower_first and request.priority != BACKGROUND_PRIORITY
        priority = min(-request.priority if is_turned else request.priority, self.max_priority)
        if request.tenant and not self.shares_prefix_cache:
            salt = tenant_salt(request.tenant, salt)
        elif request.priority == priority:
            return request
        return structs.replace(request, priority=priority, cache_salt=salt)


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Return a salt for the prefix cache that differs for every pair of tenant and salt.

    Each part is preceded by its length, so that no two pairs are encoded alike.
    """
    parts = (_DOMAIN, tenant.encode(), cache_salt.encode("utf-8", "surrogatepass"))
    return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
