"""The environment in which an NCCL group of two is made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LEFT_TO_US = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """Have groups that are made within not end the process when a peer dies or is slow, as they do by default.

    The environment is as before afterwards, for the groups of the engine's ranks.
    """
    before = {name: os.environ.get(name) for name in _LEFT_TO_US}
    os.environ.update(_LEFT_TO_US)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
