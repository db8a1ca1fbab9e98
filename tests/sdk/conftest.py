"""One started service for all tests with SDKs."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.service import Service, running_service


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`kvbaton up` on the demo model: 1 prefill and 1 decode worker, and a folder for files."""
    folder = tmp_path_factory.mktemp("service")
    config = folder / "kvbaton.toml"
    config.write_text(f'[router]\nfiles_dir = "{folder / "files"}"\n')
    starting = running_service(folder, "--num-threads", "1", "--config", str(config))
    with asyncio.Runner() as runner:
        yield runner.run(starting.__aenter__())
        runner.run(starting.__aexit__(None, None, None))
