"""A process that can open no more descriptors."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let no new descriptor be opened in this process, whatever other threads and the collector close meanwhile.

    The limit is on the number of a new descriptor, and 0 to 2 are open; those above it stay open. It is not 0, because
    ``poll``, which a socket with a timeout calls, takes no more descriptors than the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
