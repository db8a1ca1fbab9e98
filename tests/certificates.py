"""Certificates of a private authority, written to files."""

from pathlib import Path

import trustme

from tests.private_files import write_private


def write_certificate(authority: trustme.CA, folder: Path, *names: str) -> tuple[Path, Path]:
    """Write a certificate chain for these names, and its key; return both paths."""
    issued = authority.issue_cert(*names)
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    write_private(key, issued.private_key_pem.bytes().decode())
    return certificate, key
