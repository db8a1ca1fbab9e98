"""The worker's flag for the number of ranks reaches the engine, for every role."""

from pathlib import Path

import pytest

from contract.errors import SettingError
from contract.identity import Role
from engine.client import InProcessClient
from engine.connecting import Transfers
from engine.connector import RanksConnector
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.fakes.engine.fakes import FakeExecutor
from tests.fakes.engine.transfer import fake_connector_factory
from worker.settings import WorkerSettings


def settings(tmp_path: Path, size: int) -> WorkerSettings:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    return WorkerSettings(model=tmp_path, secret_file=secret, tensor_parallel_size=size)


def test_the_flag_reaches_the_engine(tmp_path: Path) -> None:
    assert settings(tmp_path, 2).engine_settings().tensor_parallel_size == 2


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_roles_that_hand_over_may_have_several_ranks(tmp_path: Path, role: Role) -> None:
    for size in (1, 2):
        assert settings(tmp_path, size).transfer(role, "w", "b").worker_id == "w"


async def test_an_engine_of_several_ranks_rejects_a_connector_for_one() -> None:
    """Before it is used, with the name of the setting."""

    class TwoRanks(FakeExecutor):
        def set_connector(self, connector: RanksConnector) -> None:
            connector.connect([], [0, 1])

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        executor = TwoRanks(settings)
        return executor, executor.memory.num_blocks

    several = EngineSettings(model=Path("fake"), tensor_parallel_size=2)
    with pytest.raises(
        SettingError, match="tensor_parallel_size is 2, and this connector serves engines of one"
    ):
        await InProcessClient.start(several, Transfers(fake_connector_factory, STAGES), start=start)
