"""Mutual TLS between the processes of a cluster, with certificate authorities derived from the cluster secret.

There are two authorities, one for routers and one for workers. Their keys are derived from the secret, so they need no files
and no exchange; each process makes a key and a certificate for its own lifetime when it starts. A listener presents its
certificate and requires one of the other authority. So the secret is never sent, another program that listens on a port
receives nothing. A worker's certificate is for its worker id and boot id. The roles hold for processes that follow the
protocol: with the secret alone, a worker could derive the other authority's key and issue itself a router's certificate.
"""

import datetime
from collections.abc import Callable, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, cast

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from contract.proofs import derive_key, encode_fields
from serving.grpc_options import Options

ROUTER_NAME = "router.kvbaton.internal"
_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# More than the order's 32, so that the remainder is nearly uniform (FIPS 186-5, A.2.1).
_SCALAR_BYTES = 48
# Certificates are valid for as long as their process runs, even if the clocks of machines differ.
_SINCE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class Party(StrEnum):
    """The processes whose certificates an authority signs."""

    ROUTERS = "routers"
    WORKERS = "workers"


class ClusterTls:
    """A process's own certificate, and the authority of its peers' certificates. The key is in memory only."""

    def __init__(self, secret: str, own: Party, peers: Party, name: str) -> None:
        key = ec.generate_private_key(_CURVE)
        chain = _certificate(secret, own, name, key).public_bytes(Encoding.PEM)
        key_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        trusted = authority_pem(secret, peers)
        self.server_credentials = grpc.ssl_server_credentials(
            [(key_bytes, chain)], root_certificates=trusted, require_client_auth=True
        )
        self._pair = grpc.ssl_server_certificate_configuration([(key_bytes, chain)], trusted)
        self._channel_credentials = grpc.ssl_channel_credentials(trusted, key_bytes, chain)

    def announcing_credentials(self, on_handshake: Callable[[], None]) -> grpc.ServerCredentials:
        """Return ``server_credentials`` that call ``on_handshake``, in a thread of gRPC, for each new connection."""
        # gRPC asks before each handshake whether the certificate has changed; None means that it has not.
        return grpc.dynamic_ssl_server_credentials(
            self._pair, cast(Any, on_handshake), require_client_authentication=True
        )

    def channel(self, address: str, name: str, options: Options) -> grpc.aio.Channel:
        """Return a channel to the address that accepts only a certificate for ``name``."""
        named = [*options, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, self._channel_credentials, options=named)


def router_tls(secret: str) -> ClusterTls:
    """Return the TLS credentials of a router."""
    return ClusterTls(secret, Party.ROUTERS, Party.WORKERS, ROUTER_NAME)


def worker_tls(secret: str, worker_id: str, boot_id: str) -> ClusterTls:
    """Return the TLS credentials of one process start of a worker."""
    return ClusterTls(secret, Party.WORKERS, Party.ROUTERS, worker_name(worker_id, boot_id))


def worker_name(worker_id: str, boot_id: str) -> str:
    """Return the name in a worker's certificate: a digest, since ids may contain characters that host names may not."""
    return f"{sha256(encode_fields('worker', (worker_id, boot_id))).hexdigest()[:32]}.worker.kvbaton.internal"


def peer_names(context: Any) -> Sequence[str]:
    """Return the names in the certificate of a call's peer; none without TLS."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode("utf-8", "replace") for name in found]


def _authority_key(secret: str, party: Party) -> ec.EllipticCurvePrivateKey:
    drawn = derive_key(secret, "internal tls authority", party, num_bytes=_SCALAR_BYTES)
    return ec.derive_private_key(int.from_bytes(drawn, "big") % (_ORDER - 1) + 1, _CURVE)


def _authority_name(party: Party) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvbaton {party}")])


def authority_pem(secret: str, party: Party) -> bytes:
    """Return an authority's own certificate. In two processes it differs in its signature only."""
    key = _authority_key(secret, party)
    name = _authority_name(party)
    builder = _builder(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def _certificate(secret: str, party: Party, name: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(_authority_name(party), subject, key.public_key())
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    return builder.sign(_authority_key(secret, party), SHA256())


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
    )
