"""TLS of the public ports: one certificate and its key, read once at the start."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from contract.errors import SettingError


@dataclass(frozen=True)
class Tls:
    """What HTTP and gRPC servers need to show the same certificate."""

    context: ssl.SSLContext
    credentials: grpc.ServerCredentials = field(repr=False)


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """The certificate (PEM, with its chain behind it) and its private key; None where neither is set.

    Raises SettingError where one is missing, cannot be read or is no PEM, or where they do not belong together.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing, given = "tls_certificate_file", "tls_key_file"
        if certificate is not None:
            missing, given = given, missing
        raise SettingError(f"{given} is set but {missing} is not; TLS needs both", param=missing)
    chain_bytes = _read(certificate, "tls_certificate_file")
    key_bytes = _read(key, "tls_key_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise _unusable(certificate, key, error) from error
    return Tls(context, grpc.ssl_server_credentials([(key_bytes, chain_bytes)]))


def _no_password() -> str:
    raise SettingError("tls_key_file is encrypted; give a key without a passphrase", param="tls_key_file")


def _read(path: Path, param: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(
            f"{param} {path} cannot be read: {error.strerror or error}", param=param
        ) from error


def _unusable(certificate: Path, key: Path, error: ssl.SSLError) -> SettingError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return SettingError(
            f"tls_key_file {key} is not the key of tls_certificate_file {certificate}", param="tls_key_file"
        )
    return SettingError(
        f"tls_certificate_file {certificate} and tls_key_file {key} are no certificate and key in PEM:"
        f" {error.reason or error}",
        param="tls_certificate_file",
    )
