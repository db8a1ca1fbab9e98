"""``python -m decode_service`` starts a decode worker."""

from pathlib import Path

import pytest

from contract.identity import Role
from tests.role_programs import role_of_started


@pytest.mark.e2e
async def test_the_folder_starts_a_decode_worker(tmp_path: Path) -> None:
    assert await role_of_started("decode_service", tmp_path) == (Role.DECODE, 0)
