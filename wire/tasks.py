"""Converts ``EngineRequest``, the task of a worker for one or several choices of one prompt."""

from contract.errors import InvalidRequestError
from contract.requests import EngineRequest, PoolingParams, ReceiveTransfer, SendTransfer
from contract.sampling import SamplingParams
from protos import worker_pb2 as pb
from wire.numbers import check_numbers
from wire.sampling import sampling_from_proto, sampling_to_proto


def task_to_proto(request: EngineRequest, into: pb.Task | None = None) -> pb.Task:
    """Translate a request.

    into: the empty message to fill, if it is a part of another one: to assign a message copies it, with a whole prompt.

    The leg's own message contains the transfer. An embedding's task has no sampling, and its pooling is not sent either,
    since the worker reads it from its model's folder. ``client_index``, ``arrival_time``, ``lora_request`` and
    ``multi_modal_inputs`` are not part of the protocol.
    """
    task = pb.Task() if into is None else into
    task.request_id = request.request_id
    task.attempt = request.attempt
    task.choice = request.choice
    task.num_choices = request.num_choices
    task.first_index = request.first_index
    task.prompt_token_ids.extend(request.prompt_token_ids)
    if not request.pooling_params:
        task.sampling.MergeFrom(sampling_to_proto(request.sampling))
    task.eos_token_ids.extend(request.eos_token_ids)
    task.priority = request.priority
    task.cache_salt = request.cache_salt
    task.tenant = request.tenant
    task.deadline_seconds = request.deadline_seconds
    return task


def task_from_proto(
    task: pb.Task,
    transfer: SendTransfer | ReceiveTransfer | None = None,
    pooling: PoolingParams | None = None,
) -> EngineRequest:
    """Translate a task into the engine's request for one leg; with ``pooling`` into that for an embedding.

    Raises InvalidRequestError for a task without id or prompt, or with an unknown kind of grammar.
    """
    check_numbers(task)
    if not task.request_id or not task.prompt_token_ids:
        raise InvalidRequestError("a task needs a request id and a prompt")
    return EngineRequest(
        request_id=task.request_id,
        prompt_token_ids=list(task.prompt_token_ids),
        sampling=SamplingParams() if pooling else sampling_from_proto(task.sampling),
        eos_token_ids=tuple(task.eos_token_ids),
        attempt=task.attempt,
        choice=task.choice,
        num_choices=max(1, task.num_choices),
        first_index=task.first_index,
        priority=task.priority,
        cache_salt=task.cache_salt,
        tenant=task.tenant,
        deadline_seconds=task.deadline_seconds,
        transfer=transfer,
        pooling_params=pooling,
    )
