"""The orders of a router that concern the worker itself, and no request."""

import logging

from contract.errors import KvbatonError
from protos import worker_pb2 as pb
from wire.membership import drain_from_proto, role_change_from_proto
from worker.draining import Drain
from worker.flipping import Flip

logger = logging.getLogger(__name__)


def carry_out(message: pb.RouterMessage, drain: Drain, flip: Flip) -> None:
    """Carry out a message of the router; ignore one of a later version, and one that comes too late."""
    try:
        match message.WhichOneof("message"):
            case "drain":
                drain.begin(drain_from_proto(message.drain).deadline_seconds)
            case "undrain":
                drain.undo()
            case "role_change":
                flip.begin(role_change_from_proto(message.role_change))
    except KvbatonError as error:
        logger.info("ignored an order of the router: %s", error.message)
