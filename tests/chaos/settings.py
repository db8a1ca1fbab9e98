"""The seed of a run of the chaos tests, and the environment of the processes that they start.

Every run draws a fresh seed, which is printed and logged; ``KVBATON_SOAK_SEED=1234`` repeats the run of seed 1234 as far
as the machine allows: requests, victims and times are the same, the machine's speed is not.
"""

import logging
import os
import random
import secrets
import sys
from functools import cache

logger = logging.getLogger(__name__)

_NAME = "KVBATON_SOAK_SEED"
_OURS = "KVBATON_SOAK"


@cache
def chaos_seed() -> int:
    """Return the seed of this run."""
    text = os.environ.get(_NAME, "")
    if text and not text.isdigit():
        raise ValueError(f"{_NAME} is {text!r}; it must be a whole number of 0 or more")
    seed = int(text) if text else secrets.randbelow(2**32)
    sys.stderr.write(f"\nchaos: {_NAME}={seed}\n")
    return seed


def has_seed() -> bool:
    """Return True if a seed was given: then tests run all that they would select by the seed, or leave out."""
    return bool(os.environ.get(_NAME))


def drawn_transports() -> list[str]:
    """Return the transports of a long scenario: both if a seed was given, else the one that the seed selects."""
    both = ["tcp", "shm"]
    return both if has_seed() else [random.Random(chaos_seed()).choice(both)]


def chaos_rng(name: str) -> random.Random:
    """Return random numbers for one test; the same name and seed give the same numbers."""
    logger.warning("%s: %s=%d", name, _NAME, chaos_seed())
    return random.Random(f"{chaos_seed()}:{name}")


def process_environment() -> dict[str, str]:
    """Return this environment without the names that only tests read: a service rejects unknown names."""
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith(_OURS)}
    return {"GRPC_VERBOSITY": "ERROR", **own}
