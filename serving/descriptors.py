"""The limit of a process's file descriptors, and their division among its listeners."""

import logging
import resource
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_MAX_LIMIT = 2**17
_MIN_RESERVE = 64
_MIN_SHARE = 8
_PER_GRPC_CLIENT = 3
_MAX_INTERNAL = 2**14
_OWN_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class ConnectionCaps:
    """Limits of the open connections of each listener. internal: those of workers, authenticated or not.

    grpc: a connection of a client has up to three descriptors, since its front connects to gRPC's server.
    """

    http: int
    grpc: int
    internal: int


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open descriptors to the hard one (at most 131,072); return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = min(hard, _MAX_LIMIT) if hard != resource.RLIM_INFINITY else _MAX_LIMIT
    if soft == resource.RLIM_INFINITY or soft >= target:
        return _MAX_LIMIT if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of %d open descriptors cannot be raised to %d: %s", soft, target, error)
        return soft
    return target


def num_open_descriptors() -> int:
    """Count the open descriptors of this process; 64 if the system does not list them."""
    return sum(1 for _ in _OWN_DESCRIPTORS.iterdir()) if _OWN_DESCRIPTORS.is_dir() else _MIN_RESERVE


def internal_connections(limit: int, num_open: int) -> int:
    """Return the limit of connections on the internal port of a process without public ports."""
    reserve = _reserve(limit)
    return min(_MAX_INTERNAL, max(reserve // 2, limit - num_open - 2 * reserve))


def _reserve(limit: int) -> int:
    return max(_MIN_RESERVE, limit // 8)


def connection_caps(
    max_connections: int, limit: int, num_open: int, num_files: int | None = None
) -> ConnectionCaps:
    """Divide the descriptors that the process does not need itself among its public listeners.

    max_connections: the configured limit of each listener. limit: the process's limit on descriptors. num_open: number of
    open ones. One eighth of the limit (at least 64) is reserved for workers and operators. HTTP gets three quarters of the
    rest, gRPC one quarter. The internal port gets the remainder, and at least half of the reserve. num_files: files that
    batches have open, for which up to a third of the rest is reserved; if it is given, each HTTP client may also open one.
    """
    reserve = _reserve(limit)
    free = limit - num_open - reserve
    free -= min(num_files or 0, free // 3)
    per_client = 1 if num_files is None else 2
    http = max(_MIN_SHARE, min(max_connections, free * 3 // 4 // per_client))
    public = max(_MIN_SHARE, min(max_connections, free // 4 // _PER_GRPC_CLIENT))
    left = free - per_client * http - _PER_GRPC_CLIENT * public
    caps = ConnectionCaps(http, public, min(_MAX_INTERNAL, max(reserve // 2, left)))
    if caps.http < max_connections:
        logger.warning(
            "max_connections is %d; the limit of %d open descriptors allows %d for HTTP and %d for gRPC: "
            "raise it (ulimit -n, LimitNOFILE)",
            *(max_connections, limit, caps.http, caps.grpc),
        )
    return caps
