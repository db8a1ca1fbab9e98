"""Refuse commit messages without a subject of what changed and a body of why.

Commits before ``SINCE`` are older than the rule. Without history (an archive, a shallow clone) there is less to check.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.check_language import REFUSED_IN_DOCS

SINCE = "2026-11-28T23:50:00Z"
MAX_SUBJECT = 72
_ROOT = Path(__file__).parents[1]


def problems_of_message(subject: str, body: str) -> Iterator[str]:
    """Yield what is wrong with one commit message."""
    if len(subject) > MAX_SUBJECT:
        yield f"the subject has {len(subject)} characters of {MAX_SUBJECT}"
    if subject.endswith("."):
        yield "the subject ends with a full stop"
    if not body.strip():
        yield "there is no body: write why"
    if found := REFUSED_IN_DOCS.search(f"{subject}\n{body}"):
        yield f"{found[0]!r} is refused: write what happens in plain words"


def messages(folder: Path, since: str = SINCE) -> list[tuple[str, str, str]]:
    """Return (short hash, subject, body) of each commit since then that is no merge; nothing where there is no history."""
    ran = subprocess.run(
        ["git", "log", "--no-merges", f"--since={since}", "--format=%h%x00%s%x00%b%x1e"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    commits = [commit.strip("\n").split("\0") for commit in ran.stdout.split("\x1e")[:-1]]
    return [(name, subject, body) for name, subject, body in commits]


def main() -> int:
    """Print what is wrong with the commits, and return the exit status."""
    problems = [
        f"{name} {subject}: {problem}"
        for name, subject, body in messages(_ROOT)
        for problem in problems_of_message(subject, body)
    ]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
