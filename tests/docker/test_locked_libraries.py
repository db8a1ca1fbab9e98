"""The packages that images install from an index: exact versions with hashes, without known vulnerabilities."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
_WITHOUT_HASHES = {"torch"}
"""Its CPU build comes from an index of its own, with hashes of its own."""
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
        if name not in _WITHOUT_HASHES:
            assert name in found, f"write constraints/{lock} anew: docs/docker.md says how"
            assert found[name][0] in requirement.specifier
    for library, (version, num_hashes) in found.items():
        assert version == known[library], f"{library}: constraints/cpu.txt has another version"
        assert num_hashes > 0


def test_the_images_install_what_is_locked() -> None:
    """L11: pip refuses a file whose hash is another."""
    for lock in ("router.lock", "worker.lock", "nixl.lock"):
        assert f"install --require-hashes --only-binary :all: -r constraints/{lock}" in DOCKERFILE


@pytest.mark.parametrize("name", FIXED_IN)
def test_no_lower_bound_is_below_a_security_release(name: str) -> None:
    """L11: aiohttp's was."""
    (bound,) = (Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == name)
    lowest = min(Version(each.version) for each in bound.specifier if each.operator == ">=")
    assert lowest >= Version(FIXED_IN[name])
