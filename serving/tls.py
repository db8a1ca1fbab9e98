"""TLS of the public ports: one certificate and its key, read again when they have changed.

Every handshake checks the files. A renewed pair is used from the next connection on; open connections keep the old one.
While the files cannot be used, such as between the writing of the two, all connections use the old pair.

"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from contract.errors import SettingError
from serving.private_files import Stamp, read_private_file, read_public_file, stamp_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pair:
    """The contexts of HTTP and gRPC listeners with one certificate, which differ in the protocol that they name."""

    http: ssl.SSLContext
    grpc: ssl.SSLContext


# Suites of TLS 1.2 with forward secrecy and authenticated encryption (RFC 9325, section 4.2). TLS 1.3 has no others.
_SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"


class Tls:
    """The TLS contexts with one certificate, of HTTP and of gRPC listeners. Owns the newest usable pair.

    Raises SettingError for files that cannot be used at the start.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._stamps = self._look()
        self._pair = _read_pair(certificate, key)
        self.context = self._pair.http
        self.grpc_context = self._pair.grpc
        self.context.sni_callback = self._show_http
        self.grpc_context.sni_callback = self._show_grpc

    def _look(self) -> tuple[Stamp, Stamp]:
        return stamp_of(self._certificate), stamp_of(self._key)

    def _newest(self) -> _Pair:
        """Return the files' pair if they have changed and can be used, else the last one."""
        stamps = self._look()
        # Those of unusable files are kept too: the files are read again when they change, and the error is logged once.
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._pair = _read_pair(self._certificate, self._key)
            except SettingError as error:
                logger.error("%s; the old certificate stays in use", error.message)
            else:
                logger.info("tls_certificate_file %s was read again", self._certificate)
        return self._pair

    def _show_http(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Set the pair of an HTTP handshake, also if it names no server."""
        connection.context = self._newest().http

    def _show_grpc(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Set the pair of a gRPC handshake."""
        connection.context = self._newest().grpc


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Read the certificate (PEM, followed by its chain) and its private key; None if neither is set.

    Raises SettingError if one is missing, cannot be read or is not PEM, or if they do not match.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "tls_certificate_file"
        given = "tls_key_file"
        if certificate is not None:
            missing, given = given, missing
        raise SettingError(f"{given} is set but {missing} is not; TLS needs both", param=missing)
    return Tls(certificate, key)


def _read_pair(certificate: Path, key: Path) -> _Pair:
    read_public_file(certificate, "tls_certificate_file")
    read_private_file(key, "tls_key_file")
    return _Pair(_context(certificate, key, "http/1.1"), _context(certificate, key, "h2"))


def _context(certificate: Path, key: Path, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_SUITES)
    context.set_alpn_protocols([protocol])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise _unusable(certificate, key, error) from error
    except OSError as error:
        raise SettingError(
            f"tls_certificate_file {certificate} cannot be read: {error.strerror or error}",
            param="tls_certificate_file",
        ) from error
    return context


def _no_password() -> str:
    raise SettingError("tls_key_file is encrypted; use a key without a passphrase", param="tls_key_file")


def _unusable(certificate: Path, key: Path, error: ssl.SSLError) -> SettingError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return SettingError(
            f"tls_key_file {key} is not the key of tls_certificate_file {certificate}", param="tls_key_file"
        )
    return SettingError(
        f"tls_certificate_file {certificate} and tls_key_file {key} are not a certificate and key in PEM:"
        f" {error.reason or error}",
        param="tls_certificate_file",
    )
