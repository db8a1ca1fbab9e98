"""Keys of clients or of operators, from a setting and from a file that may change at run time, and the log of wrong ones."""

import hmac
import logging
import re
from hashlib import sha256
from pathlib import Path

from contract.errors import SettingError, UnauthenticatedError
from serving.private_files import Stamp, read_private_text, stamp_of

logger = logging.getLogger(__name__)

API_KEYS = "api_keys"
ADMIN_KEYS = "admin_keys"

_COMMENT = re.compile(r"(^|\s)#.*")
_TENANT_CHARACTERS = 32
_STRONG_CHARACTERS = 32
_KEY = re.compile(r"[!-~]+")

_MAX_ADDRESSES = 1024


class ApiKeys:
    """Owns the digests of the keys; the keys themselves are not stored. Without keys every client is accepted.

    keys: separated by commas. file: one key per line, comments after ``#``; read again when it has changed. If it can no
    longer be read or has no key, no client with a key of the file is accepted. Raises SettingError for such a file at start.
    setting: name of the setting of the keys; that of the file ends in ``_file``.
    """

    def __init__(self, keys: str | None = None, file: Path | None = None, setting: str = API_KEYS) -> None:
        self._file = file
        self._setting = setting
        self._given = _digests(_split(keys, setting), setting)
        if keys is not None and not self._given:
            raise SettingError(
                f"{setting} is set but contains no key, so everyone would be accepted; add a key or leave it unset",
                param=setting,
            )
        self._stamp: Stamp = None
        self._read: tuple[bytes, ...] = ()
        if file is not None:
            # The stamp is taken before the file is read: a change in between is found at the next check.
            self._stamp = stamp_of(file)
            self._read = _digests(_read(file, setting), setting)

    @property
    def are_required(self) -> bool:
        """True if a client needs a key."""
        return bool(self._given) or self._file is not None

    def check(self, authorization: str | None) -> None:
        """Accept ``Bearer KEY``, or raise UnauthenticatedError. Takes equally long for every wrong key."""
        if not self.are_required:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError(
                f"no {_name(self._setting)} was given; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        claimed = _digest(key.strip())
        # ``any`` would end at the first match, and show by its time how far the list was compared.
        if not sum(hmac.compare_digest(claimed, known) for known in self._known()):
            raise UnauthenticatedError(f"the {_name(self._setting)} is not valid", code="invalid_api_key")

    def tenant(self, authorization: str | None) -> str:
        """Return a name for the owner of a valid key: a digest of the key; "" if no key is needed."""
        if not self.are_required:
            return ""
        _, _, key = (authorization or "").partition(" ")
        return _digest(key.strip()).hex()[:_TENANT_CHARACTERS]

    def _known(self) -> tuple[bytes, ...]:
        if self._file is None:
            return self._given
        stamp = stamp_of(self._file)
        if stamp != self._stamp:
            self._stamp = stamp
            # A key that was revoked must not stay valid because the new file cannot be read.
            self._read = ()
            try:
                self._read = _digests(_read(self._file, self._setting), self._setting)
            except SettingError as error:
                logger.error("%s; until this is corrected, keys of the file are not accepted", error.message)
            else:
                logger.info("%s_file %s has changed: %d keys", self._setting, self._file, len(self._read))
        return self._given + self._read


def first_key(keys: str | None, file: Path | None, setting: str = API_KEYS) -> str | None:
    """Return a key that ``ApiKeys`` of the same arguments accepts; None if none is needed. Raises SettingError."""
    found = _split(keys, setting) or (_read(file, setting) if file is not None else [])
    return found[0] if found else None


def _name(setting: str) -> str:
    """Return what one key of a setting is called."""
    return "admin key" if setting == ADMIN_KEYS else "API key"


def _split(keys: str | None, setting: str) -> list[str]:
    return _keys((keys or "").split(","), setting)


def _read(file: Path, setting: str) -> list[str]:
    param = f"{setting}_file"
    lines = read_private_text(file, param).splitlines()
    found = _keys([_COMMENT.sub("", line) for line in lines], param)
    if not found:
        raise SettingError(f"{param} {file} contains no key", param=param)
    return found


def _keys(entries: list[str], param: str) -> list[str]:
    """Return the entries that are not blank. Raises SettingError with the number of an invalid one, not its text."""
    found = []
    for number, entry in enumerate(entries, 1):
        if not (key := entry.strip()):
            continue
        if not _KEY.fullmatch(key):
            raise SettingError(
                f"{param}: entry {number} is not a valid key; a key is printable ASCII without spaces",
                param=param,
            )
        found.append(key)
    return found


def _digests(keys: list[str], setting: str) -> tuple[bytes, ...]:
    """Return the keys' digests; log how many keys are short enough to be guessed."""
    num_short = sum(len(key) < _STRONG_CHARACTERS for key in keys)
    if num_short:
        logger.warning(
            "%d of %d %ss have fewer than %d characters and could be guessed; make them with `openssl rand -hex 32`",
            *(num_short, len(keys), _name(setting), _STRONG_CHARACTERS),
        )
    return tuple(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class WrongKeys:
    """Owns a count by address; the 1st, 10th, 100th, ... wrong key of each is logged."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, address: str) -> None:
        """Count another wrong, or missing, key of this address."""
        count = self._counts.pop(address, 0) + 1
        # An address that is counted moves to the end, so the first one has been silent for longest.
        if len(self._counts) >= _MAX_ADDRESSES:
            del self._counts[next(iter(self._counts))]
        self._counts[address] = count
        if count == 10 ** (len(str(count)) - 1):
            logger.warning("%s was refused for a wrong or missing key (%d times so far)", address, count)
