"""``make install`` on machines with and without a GPU, and on machines where something is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that is the whole PATH: only what make itself needs, so no driver of this machine is found."""
    for name in ("bash", "make", "sed", "grep", "expand"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def fake(programs: Path, name: str, script: str) -> None:
    program = programs / name
    program.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    program.chmod(0o755)


def planned(programs: Path, *arguments: str) -> list[str]:
    """The commands that make would run, line continuations joined."""
    command = ["make", "--no-print-directory", "--always-make", "--dry-run", *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(programs)}, capture_output=True, text=True, check=True
    )
    return result.stdout.replace("\\\n", " ").splitlines()


def torch_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if "torch==" in line and "pip" in line]


def test_a_machine_without_a_gpu_gets_the_cpu_build_and_goes_on_without_its_index(programs: Path) -> None:
    (line,) = torch_lines(planned(programs, "install"))
    first, second = (part.split() for part in line.split("||"))
    assert {"--no-deps", "--retries", "torch==2.13.0", CPU_INDEX} <= set(first)
    assert first[first.index("--retries") + 1] == "0"
    assert second[-3:] == ["torch==2.13.0", "--constraint", "constraints/cpu.txt"]
    assert CPU_INDEX not in second


def test_a_machine_with_a_gpu_gets_the_cuda_build(programs: Path) -> None:
    fake(programs, "nvidia-smi", "exit 0")
    lines = planned(programs, "install")
    (line,) = torch_lines(lines)
    assert line.split()[-3:] == ["torch==2.13.0", "--constraint", "constraints/cuda.txt"]
    assert not any(CPU_INDEX in line for line in lines)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_rest_is_installed_after_torch_under_the_same_constraints(programs: Path, gpu: bool) -> None:
    if gpu:
        fake(programs, "nvidia-smi", "exit 0")
    lines = planned(programs, "install")
    rest = next(line for line in lines if "--editable" in line)
    assert lines.index(rest) > lines.index(torch_lines(lines)[0])
    assert rest.endswith(f"'.[worker,dev]' --constraint constraints/{'cuda' if gpu else 'cpu'}.txt")


def test_a_machine_without_a_c_compiler_gets_one(programs: Path) -> None:
    wanted = "--requirement constraints/compiler.txt"
    assert any(line.endswith(wanted) for line in planned(programs, "install"))
    fake(programs, "cc", "exit 0")
    assert not any(line.endswith(wanted) for line in planned(programs, "install"))


ANYWHERE = "not explore and not gpu and not docker and not sdk and not triton and not system"


def test_the_tests_of_each_kind_are_chosen_by_marker(programs: Path) -> None:
    (quick,) = (line for line in planned(programs, "test") if "-m pytest" in line)
    assert f'-n 3 --dist worksteal -m "not slow and {ANYWHERE}"' in quick
    beside, alone = (line for line in planned(programs, "test-slow") if "-m pytest" in line)
    assert f'-n 3 --dist worksteal -m "slow and not alone and {ANYWHERE}"' in beside
    assert f'-m pytest -m "slow and alone and {ANYWHERE}"' in alone
    assert any(
        "-m pytest -c tests/gpu/alone.ini --rootdir . -m gpu" in line
        for line in planned(programs, "gpu-check")
    )
    (system,) = (line for line in planned(programs, "test-system") if "-m pytest" in line)
    assert "-m pytest -m system " in system
    for marker, how in (("docker", ""), ("sdk", ""), ("triton", "-n 3 --dist worksteal ")):
        lines = planned(programs, f"test-{marker}")
        assert any(line.endswith(f"-m pytest {how}-m {marker} tests/{marker}") for line in lines)


def test_triton_is_installed_beside_the_environment_and_interpreted(programs: Path) -> None:
    """It brings an older NumPy, which nothing else shall see."""
    install, *_, run = planned(programs, "test-triton")[-3:]
    assert "--no-deps" in install and "--target .venv/triton" in install
    assert "TRITON_INTERPRET=1" in run and "/.venv/triton " in run


def test_the_gpu_tests_run_under_a_python_of_ones_own(programs: Path) -> None:
    line, measuring = planned(programs, "gpu-check", "GPU_PYTHON=python3")
    assert measuring.startswith("python3 -m benchmarks.gpu")
    assert line.strip() == "python3 -m pytest -c tests/gpu/alone.ini --rootdir . -m gpu tests/gpu"


def test_make_alone_lists_the_targets(programs: Path) -> None:
    result = subprocess.run(
        ["make"], cwd=ROOT, env={"PATH": str(programs)}, capture_output=True, text=True, check=True
    )
    targets = [line.split()[0] for line in result.stdout.splitlines()]
    wanted = [
        "install",
        "demo",
        "test",
        "test-slow",
        "check",
        "protos",
        "settings-docs",
        "metrics-docs",
        "format",
        "test-system",
    ]
    assert {*wanted, "mutants", "soak", "gpu-check", "test-docker", "test-sdk", "clean"} <= set(targets)


def test_check_compares_what_is_generated(programs: Path) -> None:
    lines = planned(programs, "check")
    for tool in ("generate_protos", "generate_settings_docs", "generate_metrics_docs", "generate_dashboards"):
        assert any(line.endswith(f"-m tools.{tool} --check") for line in lines)


def check_machine(programs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "check_machine.sh")],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bare_machine_gets_the_apt_line(programs: Path) -> None:
    result = check_machine(programs)
    assert result.returncode == 1
    assert "sudo apt-get update && sudo apt-get install -y git python3 python3-venv" in result.stderr


def test_a_machine_without_venv_gets_the_apt_line(programs: Path) -> None:
    fake(programs, "git", "exit 0")
    fake(programs, "python3", "exit 1")
    assert "apt-get install -y python3-venv" in check_machine(programs).stderr


def test_an_old_python_is_named(programs: Path) -> None:
    fake(programs, "git", "exit 0")
    fake(programs, "python3", 'case "$*" in *version_info*) exit 1;; -V) echo Python 3.9.2;; esac')
    result = check_machine(programs)
    assert result.returncode == 1
    assert "kvbaton needs Python 3.11 or newer; python3 is Python 3.9.2." in result.stderr


def test_a_complete_machine_passes_silently(programs: Path) -> None:
    fake(programs, "git", "exit 0")
    fake(programs, "python3", "exit 0")
    result = check_machine(programs)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
