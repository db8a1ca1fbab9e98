"""A request in the form that all processes share: token ids, sampling parameters, and the transfer of its KV."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from contract.block_hash import BlockHash, root_hash
from contract.errors import InvalidRequestError, UnsupportedFieldError
from contract.sampling import LISTS, SamplingParams

MAX_CHOICES = 128


PoolingType = Literal["last", "mean", "max"]
POOLING_TYPES = get_args(PoolingType)


class PoolingParams(msgspec.Struct, frozen=True):
    """The parameters of an embedding: the prompt's final hidden states become one vector.

    pooling_type: the last token's state, or the mean or the largest values over all tokens; None: as the model's folder
    asks, which the worker reads. normalize: to length 1.
    """

    pooling_type: PoolingType | None = None
    normalize: bool = True

    @property
    def is_over_all_tokens(self) -> bool:
        """True if the state of every token of the prompt is needed, so that none may come from the prefix cache."""
        return self.pooling_type in ("mean", "max")

    def check(self) -> None:
        """Raise InvalidRequestError about ``pooling_type`` or ``normalize`` for a value that is none."""
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            raise InvalidRequestError(
                f"pooling_type is {self.pooling_type!r:.40}; it must be {', '.join(POOLING_TYPES)}, or left out for the "
                "model's own",
                param="pooling_type",
            )
        if type(self.normalize) is not bool:
            raise InvalidRequestError(
                f"normalize is {self.normalize!r:.40}; it must be true or false", param="normalize"
            )


class SendTransfer(msgspec.Struct, frozen=True, tag="send"):
    """The transfer of a prefill leg, or of a request that is handed off: lend this prompt's KV under ``transfer_id``.

    may_change_receiver: a receiver that fails or dies does not end the lease; another one may fetch the transfer then. True
    only where the engine hands a request off itself: no message sets it.
    """

    transfer_id: str
    may_change_receiver: bool = False


class ReceiveTransfer(msgspec.Struct, frozen=True, tag="receive"):
    """The transfer of a decode leg: fetch this prompt's KV from the worker that computes it.

    peer_control: "host:port" of the prefill worker's control link. peer_boot_id: the process start that the leg is for; a
    restarted worker at the same address has another.
    """

    transfer_id: str
    peer_worker_id: str
    peer_boot_id: str
    peer_control: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an engine for one or several choices of one prompt.

    request_id: made by the router, the same everywhere. attempt: incremented when the router replays the request; the prompt
    then ends with the delivered tokens of the answer, while limits and positions still count the whole answer.

    choice: index of the first choice. num_choices: number of choices, whose prompt is computed and handed over once;
    ``sampling`` is that of choice 0, see ``choice_seed``. first_index: index of the first token that this engine emits,
    which is the number of delivered tokens, plus one on the decode side of a hand-over: the prefill leg emits that
    token.

    priority: higher is served earlier and preempted later. tenant: the client; clients share steps fairly.
    eos_token_ids: the model's own end tokens. transfer: None for an aggregated request. pooling_params: compute the
    prompt's embedding and no tokens. lora_request and multi_modal_inputs are reserved: ``check`` rejects values other
    than their defaults.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    attempt: int = 0
    choice: int = 0
    num_choices: int = 1
    first_index: int = 0
    client_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    deadline_seconds: float = 600.0
    transfer: SendTransfer | ReceiveTransfer | None = None
    lora_request: str | None = None
    pooling_params: PoolingParams | None = None
    multi_modal_inputs: tuple[dict[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """The engine's name for this choice of this attempt; two attempts may be on one worker at once."""
        return choice_key(self.request_id, self.choice, self.attempt)

    @property
    def num_delivered_tokens(self) -> int:
        """The number of answer tokens at the end of the prompt of a replayed request."""
        return self.first_index - isinstance(self.transfer, ReceiveTransfer)

    @property
    def keys(self) -> list[str]:
        """The engine's names for all choices of the request."""
        return [choice_key(self.request_id, choice, self.attempt) for choice in self.choices]

    @property
    def choices(self) -> range:
        """The indices of the requested choices."""
        return range(self.choice, self.choice + self.num_choices)

    def of_choice(self, choice: int) -> "EngineRequest":
        """Return the request for one of its choices."""
        if self.num_choices == 1:
            return self
        sampling = self.sampling.of_choice(choice)
        return msgspec.structs.replace(self, choice=choice, num_choices=1, sampling=sampling)

    def hash_root(self, model_fingerprint: str) -> BlockHash:
        """Return the parent hash of the prompt's first block; it covers all that affects KV except tokens (law 7)."""
        return root_hash(model_fingerprint, self.cache_salt, self.lora_request or "")

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequestError (or UnsupportedFieldError) that names the first invalid field."""
        self.sampling.check()
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
        check_token_ids(self.prompt_token_ids, vocab_size, param="prompt")
        for parameter in LISTS:
            token_ids = getattr(self.sampling, parameter.name)
            if parameter.kind == "biases":
                token_ids = [token for token, _ in token_ids]
            check_token_ids(token_ids, vocab_size, param=parameter.name)
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequestError(f"n is {self.num_choices}; it must lie in 1..{MAX_CHOICES}", param="n")
        num_delivered = self.num_delivered_tokens
        # A replay continues one answer; the choices of a prompt have different ones.
        if self.num_choices > 1 and (self.choice or num_delivered):
            raise InvalidRequestError("a replay must have one choice", param="n")
        if not 0 <= num_delivered < min(self.sampling.max_tokens, len(self.prompt_token_ids)):
            raise InvalidRequestError(
                f"first_index is {self.first_index}: a prompt of {len(self.prompt_token_ids)} tokens cannot end with "
                f"{num_delivered} tokens of the answer when max_tokens is {self.sampling.max_tokens}",
                param="first_index",
            )
        self._check_pooling()
        for name in ("lora_request", "multi_modal_inputs"):
            if getattr(self, name):
                raise UnsupportedFieldError(f"{name} is not supported by this version", param=name)

    def _check_pooling(self) -> None:
        if self.pooling_params is None:
            return
        self.pooling_params.check()
        if self.pooling_params.pooling_type is None:
            raise InvalidRequestError(
                "the engine has no model folder to read the pooling from: name a pooling_type",
                param="pooling_type",
            )
        if self.transfer or self.num_choices > 1 or self.choice or self.first_index or self.sampling.grammar:
            raise InvalidRequestError(
                "an embedding has one choice, no tokens, no grammar, and is not handed over",
                param="pooling_params",
            )


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """An order to lend the KV of a choice that is being decoded, so that another worker continues it.

    attempt: the attempt that runs. next_attempt: the one that continues the answer; the lease belongs to it.
    """

    request_id: str
    attempt: int
    choice: int
    transfer_id: str
    next_attempt: int

    @property
    def key(self) -> str:
        """The engine's name for the choice that runs."""
        return choice_key(self.request_id, self.choice, self.attempt)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raise InvalidRequestError about ``param`` that names the first id outside of the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"token id {bad} is not in the vocabulary; ids are 0..{vocab_size - 1}", param=param
        )


def choice_key(request_id: str, choice: int, attempt: int) -> str:
    """Return the engine's name for one choice of one attempt."""
    return f"{request_id}#{choice}.{attempt}"
