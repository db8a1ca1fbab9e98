"""Converts the model's small files, which a router without the folder fetches in pieces."""

from protos import worker_pb2 as pb


def piece_to_proto(name: str, data: bytes) -> pb.ModelFile:
    """Translate a piece of one file."""
    return pb.ModelFile(name=name, data=data)


def piece_from_proto(message: pb.ModelFile) -> tuple[str, bytes]:
    """Translate a piece of one file. Return the file's name and the bytes."""
    return message.name, message.data
