"""One started service for all tests with SDKs."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.service import Service, running_service


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`kvbaton up` on the demo model: 1 prefill and 1 decode worker."""
    starting = running_service(tmp_path_factory.mktemp("service"), "--num-threads", "1")
    with asyncio.Runner() as runner:
        yield runner.run(starting.__aenter__())
        runner.run(starting.__aexit__(None, None, None))
