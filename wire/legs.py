"""Converts the orders that start a leg on a worker or cancel a request, and the call that hands a leg off.

A leg's message contains the task and the transfer of its KV; ``EngineRequest`` contains both. ``into`` is the empty message
to fill, if it is a part of another one (``task_to_proto``).
"""

from contract.errors import InvalidRequestError
from contract.requests import EngineRequest, HandOff, PoolingParams, ReceiveTransfer, SendTransfer
from protos import worker_pb2 as pb
from wire.numbers import check_numbers
from wire.tasks import task_from_proto, task_to_proto


def prefill_to_proto(request: EngineRequest, into: pb.PrefillRequest | None = None) -> pb.PrefillRequest:
    """Translate a prefill leg. Raises TypeError for a request that sends no KV."""
    if not isinstance(request.transfer, SendTransfer):
        raise TypeError(f"a prefill leg has a SendTransfer, not {request.transfer!r}")
    message = pb.PrefillRequest() if into is None else into
    task_to_proto(request, message.task)
    message.transfer_id = request.transfer.transfer_id
    return message


def prefill_from_proto(message: pb.PrefillRequest) -> EngineRequest:
    """Translate a prefill leg. Raises InvalidRequestError without a ``transfer_id``, or for a bad task."""
    if not message.transfer_id:
        raise InvalidRequestError("a prefill leg needs a transfer_id")
    return task_from_proto(message.task, SendTransfer(message.transfer_id))


def decode_to_proto(request: EngineRequest, into: pb.DecodeRequest | None = None) -> pb.DecodeRequest:
    """Translate a decode leg. Raises TypeError for a request that sends KV."""
    if isinstance(request.transfer, SendTransfer):
        raise TypeError(f"a decode leg has a ReceiveTransfer or none, not {request.transfer!r}")
    message = pb.DecodeRequest() if into is None else into
    task_to_proto(request, message.task)
    if request.transfer is not None:
        message.source.MergeFrom(source_to_proto(request.transfer))
    return message


def decode_from_proto(message: pb.DecodeRequest) -> EngineRequest:
    """Translate a decode leg. Raises InvalidRequestError for an incomplete source or a bad task."""
    source = source_from_proto(message.source) if message.HasField("source") else None
    return task_from_proto(message.task, source)


def source_to_proto(transfer: ReceiveTransfer) -> pb.TransferSource:
    """Translate the source of a decode leg's KV."""
    return pb.TransferSource(
        transfer_id=transfer.transfer_id,
        worker_id=transfer.peer_worker_id,
        boot_id=transfer.peer_boot_id,
        control_address=transfer.peer_control,
    )


def source_from_proto(message: pb.TransferSource) -> ReceiveTransfer:
    """Translate the source of a decode leg's KV.

    Raises InvalidRequestError without a ``transfer_id`` or a ``control_address``.
    """
    if not message.transfer_id or not message.control_address:
        raise InvalidRequestError("the source of a decode leg needs a transfer_id and a control_address")
    return ReceiveTransfer(
        transfer_id=message.transfer_id,
        peer_worker_id=message.worker_id,
        peer_boot_id=message.boot_id,
        peer_control=message.control_address,
    )


def embed_to_proto(request: EngineRequest, into: pb.EmbedLegRequest | None = None) -> pb.EmbedLegRequest:
    """Translate an embedding. The pooling is not sent: the worker reads it from its model's folder."""
    message = pb.EmbedLegRequest() if into is None else into
    task_to_proto(request, message.task)
    return message


def embed_from_proto(message: pb.EmbedLegRequest, pooling: PoolingParams) -> EngineRequest:
    """Translate an embedding that is pooled by ``pooling``. Raises InvalidRequestError for a task without id or prompt."""
    return task_from_proto(message.task, pooling=pooling)


def hand_off_to_proto(order: HandOff, deadline_seconds: float) -> pb.HandOffRequest:
    """Translate the order to hand a choice off within ``deadline_seconds``."""
    return pb.HandOffRequest(
        request_id=order.request_id,
        attempt=order.attempt,
        choice=order.choice,
        transfer_id=order.transfer_id,
        next_attempt=order.next_attempt,
        deadline_seconds=deadline_seconds,
    )


def hand_off_from_proto(message: pb.HandOffRequest) -> tuple[HandOff, float]:
    """Translate the order to hand a choice off. Return it and its deadline in seconds.

    Raises InvalidRequestError without a ``transfer_id``, or if the next attempt is not newer.
    """
    check_numbers(message)
    if not message.transfer_id or message.next_attempt <= message.attempt:
        raise InvalidRequestError("a hand-off needs a transfer_id and a next_attempt above the attempt")
    order = HandOff(
        request_id=message.request_id,
        attempt=message.attempt,
        choice=message.choice,
        transfer_id=message.transfer_id,
        next_attempt=message.next_attempt,
    )
    return order, message.deadline_seconds


def cancel_to_proto(request_id: str, attempt: int, choice: int | None) -> pb.CancelRequest:
    """Translate a cancel of the attempts up to this one, of one choice or (None) of all."""
    return pb.CancelRequest(request_id=request_id, attempt=attempt, choice=choice)


def cancel_from_proto(message: pb.CancelRequest) -> tuple[str, int, int | None]:
    """Translate a cancel. Return the request id, the last attempt, and the choice or None for all."""
    check_numbers(message)
    return message.request_id, message.attempt, message.choice if message.HasField("choice") else None
