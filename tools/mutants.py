"""Break one law at a time, in a copy of the repository, and expect that a named test fails: ``make mutants``.

Usage: python -m tools.mutants [--sample N] [--seed S] [NAME ...]

The mutants stand in tests/mutants.toml: each names the law, the file, the text to replace, and the test that must see it. A
mutant *survives* when its test passes, and that is an error; so is one whose text is not there (any more), or whose test
cannot be run at all.
"""

import argparse
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

REPOSITORY = Path(__file__).resolve().parents[1]
_LIST = Path("tests/mutants.toml")
_TEST_SECONDS = 300
_FAILED = 1  # pytest: tests were run, and some failed


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One small change that breaks a law. old: stands in ``file`` exactly once. test: a pytest node id."""

    name: str
    law: str
    file: str
    old: str
    new: str
    test: str


class MutantList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of tests/mutants.toml."""

    mutant: list[Mutant]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant; ``problem`` is None when its test has seen it."""

    mutant: Mutant
    seconds: float
    problem: str | None


def read_mutants(path: Path) -> list[Mutant]:
    """The mutants of a file. Raises msgspec.ValidationError for a malformed one, ValueError for a name given twice."""
    mutants = msgspec.toml.decode(path.read_bytes(), type=MutantList).mutant
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two mutants share a name; there are {', '.join(sorted(names))}")
    return mutants


def apply(mutant: Mutant, text: str) -> str:
    """The file's text with the law broken. Raises ValueError unless ``old`` stands there exactly once."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} holds its text {count} times instead of once: mend the mutant")
    return text.replace(mutant.old, mutant.new)


def try_mutant(mutant: Mutant, copy: Path) -> Verdict:
    """Break the law in ``copy``, run the test there, and mend it again."""
    path = copy / mutant.file
    healthy = path.read_text()
    began = time.monotonic()
    try:
        path.write_text(apply(mutant, healthy))
        problem = _problem(_run_test(mutant.test, copy))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    finally:
        path.write_text(healthy)
    return Verdict(mutant, time.monotonic() - began, problem)


def _run_test(test: str, copy: Path) -> int:
    """The exit code of pytest; modules come from the copy, in child processes too."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", test]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # noqa: TID251 - passed on, not read
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        timeout=_TEST_SECONDS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode


def _problem(exit_code: int) -> str | None:
    if exit_code == _FAILED:
        return None
    if exit_code == 0:
        return "it survives: the test passes although the law is broken"
    return f"its test could not be run: pytest ended with {exit_code}"


def _copy_repository(target: Path) -> Path:
    """The tracked files, and those that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copied = REPOSITORY / name, target / name
        if source.is_file():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied)
    return target


def _chosen(mutants: Sequence[Mutant], names: Sequence[str], sample: int | None, seed: int) -> list[Mutant]:
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    if sample is None or sample >= len(chosen):
        return chosen
    print(f"mutants: {sample} of {len(chosen)}, --seed {seed}")
    return random.Random(seed).sample(chosen, sample)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants; 0 when each was seen by its test."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these only")
    parser.add_argument("--sample", type=int, help="so many of them, by chance")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="of the chance")
    asked = parser.parse_args(arguments)
    chosen = _chosen(read_mutants(REPOSITORY / _LIST), asked.names, asked.sample, asked.seed)
    num_problems = 0
    with tempfile.TemporaryDirectory(prefix="kvbaton-mutants-") as folder:
        copy = _copy_repository(Path(folder))
        for mutant in chosen:
            verdict = try_mutant(mutant, copy)
            num_problems += verdict.problem is not None
            print(
                f"{'LIVES' if verdict.problem else 'seen'}  {verdict.seconds:5.1f} s  {mutant.name}: {mutant.law}"
            )
            if verdict.problem:
                print(f"       {verdict.problem} ({mutant.test})")
    print(f"mutants: {len(chosen) - num_problems} of {len(chosen)} were seen by their test")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
