"""The length of state machine tests: short in every test run, long with ``KVBATON_SOAK`` in the environment.

``KVBATON_SOAK=20`` runs twenty times as many examples, with a fresh seed that is printed;
``KVBATON_SOAK=20:1234`` repeats the run of seed 1234. Other values are refused.
"""

import os
import secrets
import sys
from functools import cache
from typing import Any, TypeVar, cast

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine

_NAME = "KVBATON_SOAK"
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
_Test = TypeVar("_Test")


def machine_settings(num_examples: int, num_steps: int) -> settings:
    """Return settings for a ``RuleBasedStateMachine``: ``num_examples`` times the soak factor, ``num_steps`` each."""
    return settings(
        max_examples=num_examples * soak_factor(),
        stateful_step_count=num_steps,
        deadline=None,
        phases=_PHASES,
        derandomize=soak_factor() == 1,
        database=None,
        suppress_health_check=list(HealthCheck) if soak_factor() > 1 else [HealthCheck.too_slow],
        print_blob=True,
    )


def machine_test(machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int) -> Any:
    """Return the test of a state machine with ``machine_settings``, and with the soak's seed if this run is a soak."""
    test: Any = machine.TestCase
    test.settings = machine_settings(num_examples, num_steps)
    test.runTest = soaked(test.runTest)
    return test


def soaked(test: _Test) -> _Test:
    """Decorate a state machine's class (or a ``given`` test): set the soak's seed if this run is a soak."""
    return cast(_Test, seed(soak_seed())(cast(Any, test))) if soak_factor() > 1 else test


def soak_factor() -> int:
    """Return the factor on the usual number of examples; 1 without a soak."""
    return _asked()[0]


def soak_seed() -> int:
    """Return the seed of this soak, the same for all machines of a run."""
    return _asked()[1]


@cache
def _asked() -> tuple[int, int]:
    text = os.environ.get(_NAME, "")  # noqa: TID251 - the one setting that only tests read
    if not text:
        return 1, 0
    factor, _, chosen = text.partition(":")
    if not factor.isdigit() or int(factor) < 2 or (chosen and not chosen.isdigit()):
        raise ValueError(
            f"{_NAME} is {text!r}; it must read FACTOR or FACTOR:SEED with a factor of 2 or more"
        )
    number = int(chosen) if chosen else secrets.randbelow(2**32)
    sys.stderr.write(f"\nsoak: {_NAME}={factor}:{number}\n")
    return int(factor), number
