"""Keys and MACs of the internal channels: one key per purpose, and an unambiguous encoding of the fields of a MAC.

Every key is derived from a secret by HKDF-SHA256 (RFC 5869) with a label, so that a proof for one purpose is invalid for
every other. A MAC covers a label and a list of fields; each is encoded with its type and its length, so that two
different lists never have the same encoding.
"""

import hashlib
import hmac
from collections.abc import Sequence

VERSION = "kvbaton-proofs-2"
"""Part of every encoding: proofs of another version never match."""
_HASH_BYTES = 32

Field = str | bytes | int


def encode_fields(label: str, fields: Sequence[Field]) -> bytes:
    """Encode a label and fields unambiguously."""
    parts = [_encoded(VERSION), _encoded(label), _encoded(len(fields)), *map(_encoded, fields)]
    return b"".join(parts)


def _encoded(field: Field) -> bytes:
    if isinstance(field, bytes):
        tag = b"b"
        data = field
    elif isinstance(field, str):
        tag = b"s"
        data = field.encode("utf-8", "surrogatepass")
    else:
        tag = b"i"
        data = str(int(field)).encode()
    return tag + len(data).to_bytes(8, "big") + data


def derive_key(secret: str | bytes, label: str, *context: Field, num_bytes: int = _HASH_BYTES) -> bytes:
    """Return a key for one purpose by HKDF-SHA256. It reveals neither the secret nor other keys."""
    material = secret.encode() if isinstance(secret, str) else secret
    extracted = hmac.digest(VERSION.encode(), material, "sha256")
    info = encode_fields(label, context)
    block = b""
    found = b""
    counter = 1
    while len(found) < num_bytes:
        block = hmac.digest(extracted, block + info + bytes([counter]), "sha256")
        found += block
        counter += 1
    return found[:num_bytes]


def make_proof(key: bytes, label: str, *fields: Field) -> str:
    """Return the HMAC-SHA256 of a label and fields, as hex."""
    return hmac.new(key, encode_fields(label, fields), hashlib.sha256).hexdigest()


def is_proof(key: bytes, claimed: str, label: str, *fields: Field) -> bool:
    """Compare a claimed proof in constant time."""
    # As bytes: texts are compared only if they are ASCII.
    return hmac.compare_digest(make_proof(key, label, *fields).encode(), claimed.encode("utf-8", "replace"))
