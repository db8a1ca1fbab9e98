"""The policy of the engines of a test; see ``EACH_POLICY``."""

from collections.abc import Iterator

import pytest

from tests.engine_scheduling.stepping import policy_of_engines


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    with policy_of_engines(request.param) as policy:
        yield policy
