"""Converts the orders that start a leg on a worker or cancel a request, and the call that hands a leg off.

A leg's message contains the task, with its sampling parameters, and the transfer of its KV; ``EngineRequest`` contains both.
``into`` is the empty message to fill, if it is a part of another one (``task_to_proto``).
"""

from operator import attrgetter
from typing import Any, cast

import msgspec

from contract.decoding import converter
from contract.errors import InvalidRequestError
from contract.requests import (
    EngineRequest,
    HandOff,
    PoolingParams,
    PoolingType,
    ReceiveTransfer,
    SendTransfer,
)
from contract.sampling import PARAMETERS, Grammar, SamplingParams
from protos import inference_pb2 as inference
from protos import worker_pb2 as pb
from wire.messages import check_numbers

_grammar = converter(Grammar)
# The parameters that are one field of the message, with the same name.
_FIELDS = [
    pb.EngineSampling.DESCRIPTOR.fields_by_name[parameter.name]
    for parameter in PARAMETERS
    if parameter.kind != "biases"
]
_REPEATED = [field.name for field in _FIELDS if field.is_repeated]
_SINGLE = [field.name for field in _FIELDS if not field.is_repeated]
_single_values = attrgetter(*_SINGLE)
# Unset, they have the default of ``SamplingParams``. An unset field of the others reads as 0, which is its value.
_OPTIONAL: list[Any] = [field.name for field in _FIELDS if field.has_presence]
_ALWAYS_SENT = [field.name for field in _FIELDS if not field.is_repeated and not field.has_presence]
_sent_values = attrgetter(*_ALWAYS_SENT)


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
    """Translate an embedding. Raises TypeError for a request without pooling."""
    if request.pooling_params is None:
        raise TypeError("an embedding has pooling parameters")
    message = pb.EmbedLegRequest() if into is None else into
    task_to_proto(request, message.task)
    message.pooling_type = request.pooling_params.pooling_type or ""
    message.normalize = request.pooling_params.normalize
    return message


def embed_from_proto(message: pb.EmbedLegRequest) -> EngineRequest:
    """Translate an embedding. Raises InvalidRequestError for a task without id or prompt, or an unknown type of pooling."""
    pooling = pooling_from_proto(message)
    return task_from_proto(message.task, pooling=pooling)


def pooling_from_proto(message: pb.EmbedLegRequest | inference.EmbedRequest) -> PoolingParams:
    """Translate pooling parameters. Raises InvalidRequestError for an unknown type."""
    pooling = PoolingParams(
        cast(PoolingType | None, message.pooling_type or None),
        message.normalize if message.HasField("normalize") else True,
    )
    pooling.check()
    return pooling


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


def task_to_proto(request: EngineRequest, into: pb.Task | None = None) -> pb.Task:
    """Translate a request.

    The leg's own message contains the transfer, or the pooling of an embedding, whose task has no sampling.
    ``client_index``, ``lora_request`` and ``multi_modal_inputs`` are not part of the protocol.
    """
    # To assign a message to a field copies it, with a whole prompt.
    task = pb.Task() if into is None else into
    task.request_id = request.request_id
    task.attempt = request.attempt
    task.choice = request.choice
    task.num_choices = request.num_choices
    task.first_index = request.first_index
    task.prompt_token_ids.extend(request.prompt_token_ids)
    if not request.pooling_params:
        sampling_to_proto(request.sampling, task.sampling)
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
        # An unset field reads as 0.
        num_choices=max(1, task.num_choices),
        first_index=task.first_index,
        priority=task.priority,
        cache_salt=task.cache_salt,
        tenant=task.tenant,
        deadline_seconds=task.deadline_seconds,
        transfer=transfer,
        pooling_params=pooling,
    )


def sampling_to_proto(sampling: SamplingParams, into: pb.EngineSampling | None = None) -> pb.EngineSampling:
    """Translate sampling parameters."""
    message = pb.EngineSampling() if into is None else into
    for name, value in zip(_SINGLE, _single_values(sampling), strict=True):
        # Most parameters of a request have the value that an unset field reads as, and to set a field takes time.
        if value or (value is not None and name in _OPTIONAL):
            setattr(message, name, value)
    for name in _REPEATED:
        if values := getattr(sampling, name):
            getattr(message, name).extend(values)
    if sampling.logit_bias:
        message.biased_token_ids.extend([token for token, _ in sampling.logit_bias])
        message.biases.extend([bias for _, bias in sampling.logit_bias])
    if sampling.grammar is not None:
        message.grammar.CopyFrom(grammar_to_proto(sampling.grammar))
    return message


def sampling_from_proto(message: pb.EngineSampling) -> SamplingParams:
    """Translate sampling parameters. ``SamplingParams.check`` compares them with each other.

    Raises BadNumberError, and InvalidRequestError for biases without tokens or an unknown kind of grammar.
    """
    check_numbers(message)
    if len(message.biased_token_ids) != len(message.biases):
        raise InvalidRequestError(
            f"{len(message.biases)} biases are for {len(message.biased_token_ids)} tokens", param="logit_bias"
        )
    values = dict(zip(_ALWAYS_SENT, _sent_values(message), strict=True))
    values |= {name: tuple(getattr(message, name)) for name in _REPEATED}
    values |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        **values,
        logit_bias=tuple(zip(message.biased_token_ids, message.biases, strict=True)),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    """Translate a grammar."""
    return pb.Grammar(kind=grammar.kind, text=grammar.text)


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """Translate a grammar. Raises InvalidRequestError for an unknown kind."""
    try:
        return _grammar({"kind": message.kind, "text": message.text})
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"unknown kind of grammar {message.kind!r}", param="grammar") from error
