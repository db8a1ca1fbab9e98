"""The folder of the sockets of ``shm``, and who can write to it."""

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from contract.errors import SettingError
from kv_transfer.transports.shm.sender import socket_path
from tests.kv_transfer.shm_port import NAME, Reader, ShmPort


def test_without_a_folder_each_worker_makes_a_private_one_with_an_unpredictable_name() -> None:
    """L9: /tmp/kvbaton-UID made by another user forced shm down to tcp."""
    ports = [ShmPort(None, "b"), ShmPort(None, "b")]
    first, second = (Path(port.sender.address) for port in ports)
    try:
        assert first.parent != second.parent
        for path in (first, second):
            info = path.parent.stat()
            assert (stat.S_IMODE(info.st_mode), info.st_uid) == (0o700, os.geteuid())
            assert str(os.getuid()) != path.parent.name.rpartition("-")[2]
            assert path.name == "b.sock"
    finally:
        for port in ports:
            port.sender.close()


def test_a_pool_is_shared_from_a_fresh_folder_which_is_removed_with_its_worker() -> None:
    """L9: peers get the path on their control link."""
    port, reader = ShmPort(None), Reader()
    folder = Path(port.sender.address).parent
    try:
        reader.fetch(port.source, range(2), port.publish(NAME, [6, 7]))
        assert reader.first_bytes(2) == [7, 8]
    finally:
        reader.receiver.close()
        port.sender.close()
    assert not folder.exists()


def test_what_killed_workers_left_of_fresh_folders_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9: each start has a folder of its own, so the killed ones' must not pile up, with or without a socket."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = [tmp_path / "kvbaton-shm-dead", tmp_path / "kvbaton-shm-young"]
    for folder in left:
        folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(left[0] / "dead.sock"))
    living = ShmPort(None, "living")
    other = ShmPort(None, "other")
    try:
        assert not any(folder.exists() for folder in left)
        assert Path(living.sender.address).exists()
    finally:
        living.sender.close()
        other.sender.close()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_whose_path_is_too_long_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SettingError, match="may have 107 bytes"):
        ShmPort(None, "b" * 120)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    assert socket_path(folder, "b") == folder / "b.sock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("kind", "words"),
    [("open", "others may write to it"), ("file", "cannot be used"), ("long", "may have 107 bytes")],
)
def test_a_folder_that_will_not_do_is_refused_by_name(tmp_path: Path, kind: str, words: str) -> None:
    folder = tmp_path / (kind if kind != "long" else "x" * 120)
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    if kind == "file":
        folder.write_text("")
    with pytest.raises(SettingError, match=words) as caught:
        socket_path(folder, "b")
    assert caught.value.param == "shm_dir"
