"""Break one law at a time, in a copy of the repository, and check that a named test fails: ``make mutants``.

Usage: python -m tools.mutants [--sample N] [--seed S] [--seeds [ROW ...]] [NAME ...]

tests/mutants.toml lists the mutants: each names the law, the file, the text to replace, and the test that must detect it.
``seeds`` names the rows of docs/design-sources.md that a mutant breaks: "--seeds" runs all of these, "--seeds ROW" those
of one row.
It is an error if a mutant survives (its test passes), if its text is not in the file, if its test cannot be run, or if it
breaks the program instead of the law. First, all their tests must pass in an unchanged copy: a test that fails anyway
detects nothing.
"""

import argparse
import compileall
import multiprocessing
import os
import py_compile
import random
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

REPOSITORY = Path(__file__).resolve().parents[1]
_LIST = Path("tests/mutants.toml")
_TEST_SECONDS = 300
_FAILED = 1  # pytest: tests were run, and some failed
_BROKEN = re.compile(
    r"^E +(?:\S+Error: )?(SyntaxError|IndentationError|ImportError|NameError|UnboundLocalError)\b", re.M
)
_REASON = re.compile(r"^(?:FAILED|ERROR) .*? - (.+)$", re.M)


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["aiohttp", "grpc.aio", "hypothesis", "msgspec", "pytest", "tokenizers", "torch", "uvloop"]
)
"""Tests run in forks of a process that has imported these: otherwise that is most of a test's time."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small change that breaks a law. old: occurs exactly once in ``file``. test: a pytest node id.

    seeds: codes of the rows of docs/design-sources.md that do not hold any more.
    """

    name: str
    law: str
    file: str
    old: str
    new: str
    test: str
    seeds: list[str] = []


class MutantList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of tests/mutants.toml."""

    mutant: list[Mutant]


@dataclass(frozen=True)
class Verdict:
    """The result of a mutant. problem: None if its test detected it; then ``reason`` is the test's failure."""

    mutant: Mutant
    seconds: float
    problem: str | None
    reason: str = ""


class _Ran(NamedTuple):
    exit_code: int
    output: str


def read_mutants(path: Path) -> list[Mutant]:
    """Read the mutants of a file. Raises msgspec.ValidationError for a malformed one, ValueError for a duplicate name."""
    mutants = msgspec.toml.decode(path.read_bytes(), type=MutantList).mutant
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two mutants have the same name; the names are {', '.join(sorted(names))}")
    return mutants


def apply(mutant: Mutant, text: str) -> str:
    """Return the file's text with the law broken. Raises ValueError unless it contains ``old`` exactly once."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} contains its text {count} times instead of once: repair the mutant")
    return text.replace(mutant.old, mutant.new)


def check_syntax(mutant: Mutant, mutated: str) -> None:
    """Raise SyntaxError for a mutant that is not valid Python: every test would detect it."""
    if mutant.file.endswith(".py"):
        compile(mutated, mutant.file, "exec")


def try_mutant(mutant: Mutant, copy: Path) -> Verdict:
    """Break the law in ``copy``, run the test there, and restore the file."""
    path = copy / mutant.file
    healthy = path.read_text()
    began = time.monotonic()
    reason = ""
    try:
        mutated = apply(mutant, healthy)
        check_syntax(mutant, mutated)
        path.write_text(mutated)
        ran = run_tests([mutant.test], copy)
        found = _REASON.search(ran.output)
        problem = _problem(ran)
        reason = found[1] if found else ""
    except (OSError, SyntaxError, ValueError, TimeoutError) as error:
        problem = str(error)
    finally:
        path.write_text(healthy)
    return Verdict(mutant, time.monotonic() - began, problem, reason)


def run_tests(tests: Sequence[str], copy: Path) -> _Ran:
    """Run pytest up to the first failure, with the modules of the copy, in child processes too.

    Raises TimeoutError after it has killed the tests' process group.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = _FORKS.Process(target=_run_pytest, args=(list(tests), str(copy), output.name))
        process.start()
        try:
            process.join(_TEST_SECONDS * len(tests))
            if process.exitcode is None:
                raise TimeoutError(f"the test has not ended after {_TEST_SECONDS} s")
        finally:
            if process.exitcode is None:
                os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
        return _Ran(process.exitcode, Path(output.name).read_text())


def _run_pytest(tests: list[str], copy: str, output: str) -> NoReturn:
    """Run pytest in the copy, as the leader of a process group; end this process with its code."""
    os.setsid()
    stream = os.open(output, os.O_WRONLY)
    os.dup2(stream, sys.stdout.fileno())
    os.dup2(stream, sys.stderr.fileno())
    environment = os.environ  # noqa: TID251 - that of this process, for pytest
    for name in ("CI", "BUILD_NUMBER"):  # with one of them, pytest explains a failure at any length: minutes
        environment.pop(name, None)
    environment.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    environment["COLUMNS"] = "250"  # of the summary, which holds the reason
    sys.dont_write_bytecode = True
    os.chdir(copy)
    sys.path[:] = [copy, *(place for place in sys.path if place not in ("", str(REPOSITORY)))]
    for module in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
        del sys.modules[module]
    # Other plugins take longer to import than most tests take.
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    rules = ["-q", "-x", "--tb=short", "--show-capture=no"]
    sys.argv = ["pytest", *rules, *plugins, "-m", "", *tests]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    raise AssertionError("pytest ends its process")


def _problem(ran: _Ran) -> str | None:
    if ran.exit_code == 0:
        return "the test passes although the law is broken"
    if ran.exit_code != _FAILED:
        return f"its test could not be run: pytest ended with {ran.exit_code}"
    if broken := _BROKEN.search(ran.output):
        return f"it breaks the program, not the law: {broken[1]}"
    return None


def _copy_repository(repository: Path, target: Path) -> Path:
    """Copy the tracked files, and those that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = repository / name
        copied = target / name
        if source.is_file():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied)
    # A mutant may be as old and as long as the text that it replaces: bytecode is compared with its source by content.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(target, maxlevels=20, quiet=2, invalidation_mode=mode)
    return target


def choose(mutants: Sequence[Mutant], names: Sequence[str], sample: int | None, seed: int) -> list[Mutant]:
    """Return the mutants of these names (all without names), or a random sample. Raises SystemExit for an unknown name."""
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"unknown mutants: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    if sample is None or sample >= len(chosen):
        return chosen
    print(f"mutants: {sample} of {len(chosen)}, --seed {seed}")
    return random.Random(seed).sample(chosen, sample)


def of_rows(mutants: Sequence[Mutant], rows: Collection[str]) -> list[str]:
    """Return the names of the mutants that break one of these rows of the seeds, or any row without ``rows``.

    Raises SystemExit for a row that none breaks.
    """
    if unknown := set(rows) - {row for mutant in mutants for row in mutant.seeds}:
        raise SystemExit(f"no mutant breaks the rows {', '.join(sorted(unknown))}")
    return [mutant.name for mutant in mutants if mutant.seeds and (not rows or set(rows) & set(mutant.seeds))]


def main(arguments: Sequence[str] | None = None, repository: Path = REPOSITORY) -> int:
    """Run mutants; return 0 if each was detected by its test."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these mutants")
    parser.add_argument("--sample", type=int, help="run a random sample of this size")
    parser.add_argument(
        "--seeds", nargs="*", metavar="ROW", help="run those that break these rows of the seeds"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="seed of the sample")
    options = parser.parse_args(arguments)
    mutants = read_mutants(repository / _LIST)
    names = options.names if options.seeds is None else [*options.names, *of_rows(mutants, options.seeds)]
    chosen = choose(mutants, names, options.sample, options.seed)
    with tempfile.TemporaryDirectory(prefix="kvbaton-mutants-") as folder:
        copy = _copy_repository(repository, Path(folder))
        healthy = run_tests(list(dict.fromkeys(mutant.test for mutant in chosen)), copy)
        if healthy.exit_code != 0:
            print(f"{healthy.output}\nmutants: these tests must pass before a law is broken")
            return 1
        num_seen = sum([_report(try_mutant(mutant, copy)) for mutant in chosen])
    print(f"mutants: {num_seen} of {len(chosen)} were detected by their tests")
    return 0 if num_seen == len(chosen) else 1


def _report(verdict: Verdict) -> bool:
    """Print the result of a mutant; return True if it was detected."""
    mutant = verdict.mutant
    is_seen = verdict.problem is None
    print(f"{'seen' if is_seen else 'UNSEEN':6} {verdict.seconds:5.1f} s  {mutant.name}: {mutant.law}")
    print(f"        {verdict.problem or verdict.reason} ({mutant.test})", flush=True)
    return is_seen


if __name__ == "__main__":
    sys.exit(main())
