"""Messages on the explored links: the frames of production's codec, which are hashable."""

import msgspec

from kv_transfer.protocol.messages import Message, decode_message


def frame_of(message: Message) -> bytes:
    """Encode a message for a link."""
    return msgspec.msgpack.encode(message)


def message_of(frame: bytes) -> Message:
    """Decode a frame of a link."""
    return decode_message(frame)
