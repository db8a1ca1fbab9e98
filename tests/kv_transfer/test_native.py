"""The compiled copy loop: compiled once and kept, safe from others, and replaced where it cannot be compiled."""

import logging
import sys
from pathlib import Path

import pytest

from kv_transfer.native.compiling import BLOCKS, last_cache_bytes, load_copy_blocks
from native.compiling import compiler_command

MISSING = Path("no such library")


def test_it_is_compiled_once_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert load_copy_blocks(MISSING, folder) is not None
    (kept,) = folder.iterdir()
    made_at = kept.stat().st_mtime_ns
    assert load_copy_blocks(MISSING, folder) is not None
    assert list(folder.iterdir()) == [kept]
    assert kept.stat().st_mtime_ns == made_at


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    """Entries that are no size are ignored; without any the size is 0."""
    assert last_cache_bytes(tmp_path) == 0
    for number, size in enumerate(("48K", "1024K", "32768K", "", "?")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 32 * 2**20


def test_what_lies_beside_the_source_is_taken_as_it_is(tmp_path: Path) -> None:
    """An image has no compiler, and no folder to keep anything in."""
    prebuilt, folder = tmp_path / "blocks.so", tmp_path / "cache"
    BLOCKS.compile_to(prebuilt)
    assert load_copy_blocks(prebuilt, folder) is not None
    assert not folder.exists()


def test_a_folder_that_others_may_write_to_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    assert load_copy_blocks(MISSING, folder) is not None
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert load_copy_blocks(MISSING, folder) is None
    assert "falling back to the slower block copy" in caplog.text
    assert "others may write to it" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_what_is_no_library_is_done_without(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    prebuilt = tmp_path / "blocks.so"
    prebuilt.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_copy_blocks(prebuilt) is None
    assert "falling back to the slower block copy" in caplog.text


def test_a_machine_without_a_compiler_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_copy_blocks(MISSING, tmp_path, compiler="no-such-compiler") is None
    assert "there is no C compiler (no-such-compiler)" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_copy_blocks(MISSING, tmp_path, compiler="false") is None
    assert "the C compiler failed" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_cc_compiles_with_zig_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert compiler_command() == (sys.executable, "-m", "ziglang", "cc")
    assert compiler_command("gcc-12") == ("gcc-12",), "a compiler that is named is used"
    cc = tmp_path / "cc"
    cc.touch(mode=0o755)
    assert compiler_command() == ("cc",)
