"""``make check`` refuses commit messages without a subject of what changed and a body of why."""

import os
import subprocess
from pathlib import Path

import pytest

from tools.check_commits import MAX_SUBJECT, messages, problems_of_message

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")


@pytest.mark.parametrize(
    ("subject", "body", "found"),
    [
        ("Rooms for the router", "Flat files hid what belongs together.", None),
        ("R" * MAX_SUBJECT, "Why.", None),
        ("R" * (MAX_SUBJECT + 1), "Why.", "73 characters of 72"),
        ("Rooms for the router", " \n", "no body"),
        ("Rooms for the router.", "Why.", "full stop"),
        ("Rooms for the router", "Requests stand in line.", "'stand in line' is refused"),
    ],
)
def test_a_message_has_what_and_why(subject: str, body: str, found: str | None) -> None:
    problems = list(problems_of_message(subject, body))
    assert len(problems) == (found is not None)
    assert all(found in problem for problem in problems if found)


def test_all_commits_since_the_rule_are_read(tmp_path: Path) -> None:
    """Bodies of several lines, none at all, and older ones."""

    def commit(*words: str, when: str = "2026-12-01T00:00:00Z") -> None:
        day = {"PATH": os.defpath, "GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        subprocess.run([*GIT, "commit", "-q", "--allow-empty", *words], cwd=tmp_path, check=True, env=day)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("-m", "Old", when="2026-11-28T23:00:00Z")
    commit("-m", "One", "-m", "Why\nso.", "-m", "More.")
    commit("-m", "Two")
    found = messages(tmp_path)
    assert [subject for _, subject, _ in found] == ["Two", "One"]
    assert [body.strip() for *_, body in found] == ["", "Why\nso.\n\nMore."]


def test_without_history_nothing_is_refused(tmp_path: Path) -> None:
    assert messages(tmp_path) == []
