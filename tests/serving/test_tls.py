"""Certificate and key: errors are reported at start."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from contract.errors import SettingError
from serving.tls import read_tls
from tests.private_files import write_private


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return a certificate and its key."""
    issued = trustme.CA().issue_cert("localhost")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    write_private(key, issued.private_key_pem.bytes().decode())
    return certificate, key


def test_both_or_none(pair: tuple[Path, Path]) -> None:
    certificate, key = pair
    assert read_tls(None, None) is None
    assert read_tls(certificate, key) is not None
    with pytest.raises(SettingError, match="tls_certificate_file is set but tls_key_file is not") as caught:
        read_tls(certificate, None)
    assert caught.value.param == "tls_key_file"
    with pytest.raises(SettingError, match="tls_key_file is set but tls_certificate_file is not") as caught:
        read_tls(None, key)
    assert caught.value.param == "tls_certificate_file"


def test_files_that_cannot_be_used_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = pair
    with pytest.raises(SettingError, match=r"tls_certificate_file .*none cannot be read"):
        read_tls(tmp_path / "none", key)
    with pytest.raises(SettingError, match=r"tls_key_file .*none cannot be read"):
        read_tls(certificate, tmp_path / "none")
    write_private(tmp_path / "text", "hello")
    with pytest.raises(SettingError, match="not a certificate and key in PEM"):
        read_tls(tmp_path / "text", key)
    with pytest.raises(SettingError, match="not a certificate and key in PEM"):
        read_tls(certificate, tmp_path / "text")


def test_a_key_of_another_certificate_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    write_private(other, trustme.CA().issue_cert("localhost").private_key_pem.bytes().decode())
    with pytest.raises(SettingError, match=r"other.pem is not the key of .*cert.pem") as caught:
        read_tls(pair[0], other)
    assert caught.value.param == "tls_key_file"


def test_an_encrypted_key_is_refused_without_a_question(pair: tuple[Path, Path]) -> None:
    certificate, key = pair
    loaded = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(SettingError, match="tls_key_file is encrypted"):
        read_tls(certificate, key)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(
    pair: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    """M5: a pipe as the certificate blocked the start for ever, a device filled the memory."""
    certificate = tmp_path / "other.pem"
    if kind == "pipe":
        os.mkfifo(certificate)
    elif kind == "device":
        certificate.symlink_to("/dev/zero")
    else:
        certificate.mkdir()
    with pytest.raises(SettingError, match=r"tls_certificate_file .* is not a regular file|cannot be read"):
        read_tls(certificate, pair[1])


MODERN = "ECDHE-ECDSA-AES256-GCM-SHA384"
OLD = ("ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES256-SHA384")


@pytest.mark.parametrize("suite", [MODERN, *OLD])
async def test_tls_1_2_has_suites_with_forward_secrecy_and_authenticated_encryption_only(
    suite: str, pair: tuple[Path, Path]
) -> None:
    """A suite with CBC is open to padding oracles, one without ECDHE to those who get the key later."""
    tls = read_tls(*pair)
    assert tls is not None
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls.context)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers(f"{suite}:@SECLEVEL=0")
    address = server.sockets[0].getsockname()
    async with server:
        if suite == MODERN:
            _, writer = await asyncio.open_connection(*address, ssl=client)
            assert writer.get_extra_info("cipher")[0] == suite
            writer.close()
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(*address, ssl=client)


def test_every_offered_suite_is_modern(pair: tuple[Path, Path]) -> None:
    tls = read_tls(*pair)
    assert tls is not None
    for suite in tls.context.get_ciphers():
        assert suite["aead"], suite["name"]
        assert suite["protocol"] == "TLSv1.3" or suite["name"].startswith("ECDHE-"), suite["name"]
