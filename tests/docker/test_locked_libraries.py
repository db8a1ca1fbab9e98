"""The packages that images install from an index: exact versions with hashes, without known vulnerabilities."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
INSTALL = re.compile(r"\bpip3?\b[^&|;]*?\b(?:install|download)\b[^&|;]*")
_OWN_LOCKS = {"torch"}
"""Its two builds come from two indexes: torch-cpu.lock and torch-cuda.lock."""
FIXED_IN = {"aiohttp": "3.14.3", "cryptography": "46.0.5", "jinja2": "3.1.6", "protobuf": "6.33.5"}
"""Releases with the security fixes that were known when this was written."""


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by library."""
    text = (ROOT / "constraints" / name).read_text().replace("\\\n", " ")
    found: dict[str, tuple[str, int]] = {}
    for line in filter(None, text.splitlines()):
        requirement = Requirement(line.partition(" --hash")[0].strip())
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        found[canonicalize_name(requirement.name)] = (
            pin.version,
            len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line)),
        )
    return found


@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("router.lock", PROJECT["dependencies"]),
        ("worker.lock", PROJECT["optional-dependencies"]["worker"]),
        ("nixl.lock", PROJECT["optional-dependencies"]["nixl"]),
        ("torch-cpu.lock", ["torch>=2.11"]),
        ("torch-cuda.lock", ["torch>=2.11", "triton>=3"]),
        ("build.lock", BUILD),
        ("sbom.lock", ["cyclonedx-bom>=7"]),
        ("flashinfer.lock", ["flashinfer-python==0.6.14", "apache-tvm-ffi==0.1.15.post2"]),
        ("nvcc.lock", ["nvidia-cuda-nvcc==13.0.*"]),
    ],
)
def test_every_library_of_an_image_is_locked_with_hashes(lock: str, wanted: list[str]) -> None:
    """L11: images were built by tags and ranges, without hashes."""
    found = locked(lock)
    pins = [
        line.split("==")
        for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    ]
    known: dict[str, str] = {canonicalize_name(name): version for name, version in pins}
    for text in wanted:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name not in _OWN_LOCKS or lock.startswith("torch"):
            assert name in found, f"write constraints/{lock} anew: docs/docker.md says how"
            assert found[name][0] in requirement.specifier
    for library, (version, num_hashes) in found.items():
        public = Version(version).public
        assert public == known.get(library, public), f"{library}: constraints/cpu.txt has another version"
        assert num_hashes > 0


def installs(text: str) -> list[str]:
    """Every command of a Dockerfile or Makefile that lets pip fetch something; of a wheel made there, none."""
    code = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    commands = [
        found.group() for line in code.replace("\\\n", " ").splitlines() for found in INSTALL.finditer(line)
    ]
    return [
        each for each in commands if not ("--no-deps" in each.split() and each.split()[-1] == "/dist/*.whl")
    ]


def recipe(target: str) -> str:
    """The commands of a target of the Makefile."""
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(found)


def test_whatever_pip_installs_for_an_image_has_hashes() -> None:
    """L11, A9: torch with its dependencies, and what builds our wheel, had none. pip refuses a file with another hash."""
    files = [
        path
        for folder in ("docker", "tests/docker")
        for path in (ROOT / folder).iterdir()
        if "Dockerfile" in path.name
    ]
    commands = [each for path in files for each in installs(path.read_text())]
    locks = {name for each in commands for name in re.findall(r"-r constraints/(\S+\.lock)", each)}
    assert locks == {path.name for path in (ROOT / "constraints").glob("*.lock")}
    for each in [*commands, *installs(recipe("sbom"))]:
        words = each.split()
        assert {"--require-hashes", "--only-binary"} <= set(words), each
        assert re.fullmatch(r"constraints/\S+\.lock", words[words.index("-r") + 1]), each


@pytest.mark.parametrize(
    "line",
    [
        "RUN pip install torch",
        "RUN true && python -m pip install -r worker.txt -c constraints/cpu.txt",
        "RUN pip --python /opt/python \\\n    install --no-deps numpy",
        "RUN if true; then pip3 download xxhash; fi",
    ],
)
def test_an_install_without_hashes_is_found_wherever_it_stands(line: str) -> None:
    (found,) = installs(line)
    assert "--require-hashes" not in found


def test_locks_that_share_a_library_agree_on_its_version() -> None:
    """The CUDA image installs several into one environment, one after the other."""
    versions: dict[str, set[str]] = {}
    for path in (ROOT / "constraints").glob("*.lock"):
        for library, (version, _) in locked(path.name).items():
            versions.setdefault(library, set()).add(Version(version).public)
    assert {library: found for library, found in versions.items() if len(found) > 1} == {}


def stage(name: str) -> str:
    """The instructions of one stage of the Dockerfile."""
    (found,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_flashinfer_is_built_in_only_if_asked_for_and_its_compiler_stays_out() -> None:
    """F7: on a machine without nvcc, FlashInfer can load only what was compiled beforehand."""
    condition = 'if [ "$TORCH_BUILD" = cuda ] && [ -n "$FLASHINFER_ARCHS" ]; then'
    for name, lock in (("worker-libraries", "flashinfer.lock"), ("flashinfer-kernels", "nvcc.lock")):
        (ours,) = [run for run in re.split(r"^RUN ", stage(name), flags=re.MULTILINE) if lock in run]
        assert condition in ours
        assert "ARG FLASHINFER_ARCHS=\n" in stage(name)
    assert "nvcc.lock" not in stage("worker-libraries") + stage("worker")
    assert "from=flashinfer-kernels,source=/kernels" in stage("worker")
    assert (ROOT / "benchmarks" / "gpu_modules.py").is_file()
    assert "COPY benchmarks/gpu_modules.py" in stage("flashinfer-kernels")
    assert "!benchmarks/gpu_modules.py" in (ROOT / ".dockerignore").read_text().splitlines()


def test_each_image_has_the_bill_of_materials_of_what_it_was_installed_from() -> None:
    """A9: it was in no image."""
    for image in ("router", "worker"):
        assert f"COPY --from={image}-components /sbom /usr/share/kvbaton/sbom" in stage(image)
        assert f"from={image}-libraries,source=/locks" in stage(f"{image}-components")
        for lock in re.findall(r"-r constraints/(?!torch-)(\S+\.lock)", stage(f"{image}-libraries")):
            assert f"cp constraints/{lock} /locks" in stage(f"{image}-libraries")
    assert 'cp "constraints/torch-$build.lock" /locks' in DOCKERFILE
    assert "io.kvbaton.sbom=/usr/share/kvbaton/sbom" in DOCKERFILE


def test_components_are_listed_for_each_lock_and_a_failure_ends_the_build(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase $last in *bad*) exit 3;; esac\n[ "$7" = -o ] && echo "$@" > "$8"\n'
    )
    tool.chmod(0o755)

    def run(*locks: str) -> int:
        command = [str(ROOT / "docker" / "list-components"), str(tool), str(tmp_path / "bill"), *locks]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    assert run("constraints/router.lock", "constraints/nixl.lock") == 0
    assert {path.name for path in (tmp_path / "bill").iterdir()} == {
        "router.lock.cdx.json",
        "nixl.lock.cdx.json",
    }
    assert run("constraints/bad.lock", "constraints/worker.lock") == 3
    assert not (tmp_path / "bill" / "worker.lock.cdx.json").exists()


@pytest.mark.parametrize("name", FIXED_IN)
def test_no_lower_bound_is_below_a_security_release(name: str) -> None:
    """L11: aiohttp's was."""
    (bound,) = (Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == name)
    lowest = min(Version(each.version) for each in bound.specifier if each.operator == ">=")
    assert lowest >= Version(FIXED_IN[name])
