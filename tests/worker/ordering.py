"""Orders to a worker as a router sends them, and what the worker answers."""

import asyncio

from contract.errors import KvbatonError, error_from_kind
from protos import worker_pb2 as pb
from router.workers.attached_worker import AttachedWorker

Ordered = pb.PrefillRequest | pb.DecodeRequest | pb.EmbedLegRequest | pb.CancelRequest


async def give_order(worker: AttachedWorker, ordered: Ordered) -> None:
    """Order a leg or a cancel, and wait until the worker has carried it out. Raises the error of a rejected leg."""
    rejected: list[pb.TokenEntry] = []
    deliver = worker.deliver
    counts = worker.orders.counts

    def watched(step: pb.StepOutput) -> None:
        rejected.extend(entry for entry in step.entries if entry.is_rejected)
        deliver(step)

    worker.deliver = watched  # type: ignore[method-assign]
    try:
        send_order(worker, ordered)
        async with asyncio.timeout(10):
            while worker.orders._starts or worker.orders._cancels or counts.carried_out < counts.sent:
                await asyncio.sleep(0.002)
    finally:
        worker.deliver = deliver  # type: ignore[method-assign]
    if rejected:
        raise error_from_kind(rejected[0].error_kind, rejected[0].error_message)


def send_order(worker: AttachedWorker, ordered: Ordered) -> None:
    """Order a leg or a cancel, and wait for nothing."""
    match ordered:
        case pb.CancelRequest():
            worker.orders.cancel(ordered)
            return
        case pb.PrefillRequest():
            order = pb.Order(prefill=ordered)
        case pb.DecodeRequest():
            order = pb.Order(decode=ordered)
        case _:
            order = pb.Order(embed=ordered)
    worker.orders.start(lambda sent: sent.CopyFrom(order), _fail, _nothing)


def _fail(error: KvbatonError) -> None:
    raise error


def _nothing() -> None:
    pass
