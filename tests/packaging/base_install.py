"""A folder that holds what `pip install kvbaton` (no extras) installs, linked from this environment: no torch in it."""

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def link_base_install(folder: Path) -> set[str]:
    """Link every file tree of the base dependencies and our own packages into ``folder``; the distributions' names."""
    names: set[str] = set()
    todo = [Requirement(text) for text in metadata.requires("kvbaton") or []]
    while todo:
        requirement = todo.pop()
        if requirement.name.lower() in names or not _applies(requirement):
            continue
        names.add(requirement.name.lower())
        found = metadata.distribution(requirement.name)
        _link(found, folder)
        todo += [Requirement(text) for text in found.requires or []]
    own = Path(str(metadata.distribution("kvbaton").locate_file("")))
    for described in own.glob("kvbaton-*.dist-info"):
        (folder / described.name).symlink_to(described)
    for package in REPOSITORY.iterdir():
        if (package / "__init__.py").exists() and package.name not in (
            "tests",
            "examples",
            "benchmarks",
            "tools",
        ):
            (folder / package.name).symlink_to(package)
    return names


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _link(found: metadata.Distribution, folder: Path) -> None:
    for entry in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        source, target = Path(str(found.locate_file(entry))), folder / entry
        if source.is_dir() and target.is_symlink():
            _merge(source, target)
        elif source.exists() and not target.exists():
            target.symlink_to(source)


def _merge(source: Path, target: Path) -> None:
    """Two distributions share a namespace folder: link their children side by side."""
    first = target.resolve()
    if first != source.resolve():
        target.unlink()
        target.mkdir()
        for child in [*first.iterdir(), *source.iterdir()]:
            (target / child.name).symlink_to(child)
