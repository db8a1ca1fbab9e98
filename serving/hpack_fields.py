"""Counts the fields of a compressed header block (HPACK, RFC 7541), without decoding a name or a value."""


class FieldCount:
    """Walks over the representations of one block, whose bytes may be cut anywhere. Keeps at most six bytes."""

    def __init__(self) -> None:
        self.num_fields = 0
        self._num_strings = 0
        """Strings of the current field that have not begun."""
        self._num_to_skip = 0
        self._begun = b""

    def skip(self, num_bytes: int) -> None:
        """Leave out the next bytes, which belong to no field."""
        self._num_to_skip += num_bytes

    def feed(self, data: bytes, most: int) -> None:
        """Count fields until there are more than ``most``. Raises ValueError for a number that no client sends."""
        data = self._begun + data
        at = self._num_to_skip
        end = len(data)
        while at < end and self.num_fields <= most:
            first = data[at]
            found = _number(data, at, 7 if self._num_strings else _num_bits(first))
            if found is None:
                break
            value, at = found
            if self._num_strings:
                self._num_strings -= 1
                at += value
                continue
            self.num_fields += 1
            if first < 0x80 and first >> 5 != 1:  # not a reference to a table, and not a new size of it
                self._num_strings = 1 if value else 2
        self._num_to_skip = max(0, at - end)
        self._begun = data[at:]


def _num_bits(first: int) -> int:
    """Return the bits of the number in the first byte of a representation (RFC 7541, section 6)."""
    if first & 0x80:
        return 7
    if first & 0x40:
        return 6
    return 5 if first & 0x20 else 4


def _number(data: bytes, at: int, num_bits: int) -> tuple[int, int] | None:
    """Return a number and the place after it; None if it is not complete (RFC 7541, section 5.1)."""
    largest = (1 << num_bits) - 1
    value = data[at] & largest
    if value < largest:
        return value, at + 1
    for index, byte in enumerate(data[at + 1 : at + 5]):
        value += (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + 2 + index
    if len(data) >= at + 5:
        raise ValueError("a number of a header block has more than four further bytes")
    return None
