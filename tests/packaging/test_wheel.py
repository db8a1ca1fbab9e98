"""The wheel holds everything: it is built, installed elsewhere, and every module is imported from there."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_DEMO_MODEL_BYTES = 8 * 2**20
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
needs = {
    "engine.attention.flashinfer_backend": "flashinfer",
    "engine.attention.hybrid_backend": "flashinfer",
    "engine.attention.triton_backend": "triton",
    "engine.attention.triton_kernels": "triton",
    "engine.attention.triton_paged": "triton",
    "engine.attention.triton_splits": "triton",
    "engine.compute.triton_kernels": "triton",
    "engine.fp8.triton_kernels": "triton",
    "engine.fused.decoder": "triton",
    "engine.fused.small_batch_kernels": "triton",
    "engine.fused.small_batch": "triton",
    "engine.fused.rows": "triton",
    "engine.fused.triton_kernels": "triton",
    "engine.fused.triton_rope": "triton",
    "engine.kv_cache.triton_kernels": "triton",
    "engine.sampling.triton_choosing": "triton",
    "engine.sampling.triton_draw": "triton",
    "engine.sampling.triton_kernels": "triton",
    "engine.sampling.triton_search": "triton",
    "engine.sampling.triton_weights": "triton",
}
target, *packages = sys.argv[1:]
for package in packages:
    found = [package] + [m.name for m in pkgutil.walk_packages([f"{target}/{package}"], package + ".")]
    for name in found:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name == needs.get(name), f"{name} needs {error.name}"
            continue
        assert module.__file__.startswith(target), f"{name} comes from {module.__file__}"
print(len(packages))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def packages() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed: list[str] = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return listed


@pytest.mark.slow
def test_every_module_is_imported_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, cwd=tmp_path)
    result = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_EVERYTHING, str(target), *packages()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{len(packages())}\n"


def test_the_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(packages())


def test_the_wheel_holds_the_whole_demo_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {
            name.removeprefix("kvbaton/demo_model/"): archive.getinfo(name).file_size
            for name in archive.namelist()
            if name.startswith("kvbaton/demo_model/")
        }
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert sum(files.values()) <= MAX_DEMO_MODEL_BYTES


def test_every_folder_of_python_modules_is_listed() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tools", "examples", "benchmarks", "tests"} == set(packages())
