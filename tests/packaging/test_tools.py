"""The checks that ``make check`` runs."""

import re
import subprocess
import sys
from pathlib import Path

from tools.check_sizes import main, oversized, own_files

ROOT = Path(__file__).resolve().parents[2]


def test_a_long_file_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "long.py"
    module.write_text("x = 1\n" * 400)
    assert list(oversized(module)) == []
    module.write_text("x = 1\n" * 401)
    (line,) = oversized(module)
    assert line.endswith("long.py: 401 lines; a file may have 400: cut it by concern")


def test_a_long_function_is_refused_wherever_it_hides(tmp_path: Path) -> None:
    module = tmp_path / "nested.py"
    body = "        x = 1\n"
    module.write_text("class A:\n    async def f(self):\n" + body * 59)
    assert list(oversized(module)) == []
    module.write_text("class A:\n    async def f(self):\n" + body * 60)
    (line,) = oversized(module)
    assert line.endswith("nested.py:2: f has 61 lines; a function may have 60")


def test_generated_code_hidden_folders_and_builds_are_left_out(tmp_path: Path) -> None:
    for name in ("protos/a_pb2.py", ".venv/b.py", "build/c.py", "engine/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * 500)
    assert [file.name for file in own_files(tmp_path)] == ["d.py"]
    assert main(tmp_path) == 1


def test_the_lock_names_exact_versions_without_build_tags() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tools.lock"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    comment, *lines = result.stdout.splitlines()
    assert comment.startswith("#")
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line) for line in lines)
    assert not any(line.startswith("kvbaton==") for line in lines)
    assert any(line.startswith("torch==") for line in lines)


def test_the_cuda_constraints_pin_the_same_torch() -> None:
    def pins(name: str) -> set[str]:
        lines = (ROOT / "constraints" / name).read_text().splitlines()
        return {line for line in lines if line.startswith("torch==")}

    assert pins("cuda.txt") == pins("cpu.txt") != set()
