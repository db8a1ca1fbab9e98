"""The worker's flag: it reaches the engine, and roles that hand KV over refuse it."""

from pathlib import Path

import pytest

from contract.errors import SettingError
from contract.identity import Role
from worker.settings import WorkerSettings


def settings(tmp_path: Path, size: int) -> WorkerSettings:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    return WorkerSettings(model=tmp_path, secret_file=secret, tensor_parallel_size=size)


def test_the_flag_reaches_the_engine(tmp_path: Path) -> None:
    assert settings(tmp_path, 2).engine().tensor_parallel_size == 2


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_roles_that_hand_over_have_one_rank(tmp_path: Path, role: Role) -> None:
    with pytest.raises(
        SettingError, match=f"tensor_parallel_size 2 with role {role.value} is not served yet"
    ):
        settings(tmp_path, 2).transfer(role, "w", "b")
    assert settings(tmp_path, 1).transfer(role, "w", "b").worker_id == "w"
