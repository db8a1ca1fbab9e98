"""One request as every process sees it: token ids, sampling parameters, and where its KV comes from or goes to."""

from collections.abc import Iterable
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from contract.block_hash import BlockHash, root_hash
from contract.errors import InvalidRequestError, UnsupportedFieldError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_GRAMMAR_BYTES = 2**18


class FinishReason(StrEnum):
    """Why a choice ended. ``ERROR`` comes with an error kind and message; the others are successes."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Grammar(msgspec.Struct, frozen=True):
    """What the answer's text must match. ``check`` refuses what cannot be one; whether it compiles is known to workers.

    text: a JSON schema; nothing (``json_object``: any JSON object); a regular expression for the whole answer; a JSON
    list of the possible answers; a context-free grammar in GBNF (``root ::= ...``) or Lark (``start: ...``), or in either
    (``ebnf``), of which the worker finds out which it is.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "gbnf", "lark"]
    text: str = ""

    def check(self) -> None:
        """Raise InvalidRequestError about ``grammar``."""
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise _wrong_grammar(
                f"the grammar has {num_bytes} bytes; it may have {MAX_GRAMMAR_BYTES} at most"
            )
        match self.kind:
            case "json_schema":
                if not isinstance(self._decoded(), dict | bool):
                    raise _wrong_grammar("a JSON schema must be an object, true or false")
            case "choice":
                choices = self._decoded()
                if not isinstance(choices, list) or not choices:
                    raise _wrong_grammar("a choice must be a list of one answer or more")
                if not all(isinstance(choice, str) and choice for choice in choices):
                    raise _wrong_grammar("a choice must be among strings that are not empty")
            case "regex" | "ebnf" | "gbnf" | "lark" if not self.text:
                raise _wrong_grammar(f"a grammar of kind {self.kind} must not be empty")

    def _decoded(self) -> Any:
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _wrong_grammar(f"the {self.kind} is not valid JSON: {error}") from error


def _wrong_grammar(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="grammar")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. The defaults are OpenAI's; ``check`` refuses what is out of range.

    temperature: 0 is greedy. top_k: 0 keeps the whole vocabulary. top_p: (0, 1]. seed: with (seed, position) and the
    logits a token is determined (law 6); the router draws one where the client gave none. max_tokens: at most this
    many new tokens. min_tokens: no stop id may be drawn before. stop_token_ids: end the answer and are not shown as
    text. ignore_eos: the model's own end tokens do not end the answer. logprobs: None, or how many alternatives.
    prompt_logprobs: the same for the prompt's tokens from the second on.
    min_p: tokens less probable than this share of the best one are not drawn. logit_bias: (token id, what is added to its
    logit). allowed_token_ids: if any, no other token is drawn. presence_penalty, frequency_penalty: taken from the logits of
    the answer's tokens, once or as often as they stand there. repetition_penalty: divides (or multiplies, below 0) the
    logits of all tokens of prompt and answer; 1 changes nothing. grammar: what the answer must match, if anything.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    @property
    def counts_tokens(self) -> bool:
        """What is drawn depends on which tokens there are already."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def end_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What may end the answer, where these are the model's own end tokens."""
        own = () if self.ignore_eos else eos_token_ids
        return (*own, *self.stop_token_ids)

    def check(self) -> None:
        """Raise InvalidRequestError that names the first field out of range."""
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must lie in (0, 1]", param="top_p")
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must lie in (0, {MAX_REPETITION_PENALTY:g}]",
                param="repetition_penalty",
            )
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.grammar is not None:
            self.grammar.check()


class PoolingParams(msgspec.Struct, frozen=True):
    """An embedding instead of an answer: the prompt's final hidden states as one vector.

    kind: the last token's state, or the mean over all tokens. normalize: to length 1.
    """

    kind: Literal["last", "mean"] = "last"
    normalize: bool = True

    def check(self) -> None:
        """Raise InvalidRequestError about ``pooling_params``."""
        if self.kind not in ("last", "mean"):
            raise InvalidRequestError(
                f"the kind of pooling is {self.kind!r}; it must be last or mean", param="pooling_params"
            )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; it must lie in {low}..{high}", param=name)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raise InvalidRequestError about ``param`` that names the first one outside of the vocabulary."""
    if (bad := next((token for token in token_ids if not 0 <= token < vocab_size), None)) is not None:
        raise InvalidRequestError(
            f"token id {bad} is not in the vocabulary; ids are 0..{vocab_size - 1}", param=param
        )


def choice_key(request_id: str, choice: int, attempt: int) -> str:
    """The name of one choice of one attempt inside an engine."""
    return f"{request_id}#{choice}.{attempt}"


def choice_seed(seed: int, choice: int) -> int:
    """With what a choice draws: choice 0 with the request's own seed, the others with numbers that follow from it."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed}#{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class SendTransfer(msgspec.Struct, frozen=True, tag="send"):
    """The prefill leg: lend this prompt's KV under ``transfer_id``."""

    transfer_id: str


class ReceiveTransfer(msgspec.Struct, frozen=True, tag="receive"):
    """The decode leg: fetch this prompt's KV from the worker that computes it.

    peer_control: "host:port" of the prefill worker's control link. peer_boot_id: the incarnation that was asked; a
    restarted worker on the same address is a stranger.
    """

    transfer_id: str
    peer_worker_id: str
    peer_boot_id: str
    peer_control: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is asked to do, for one choice or for several of one prompt.

    request_id: made by the router, the same everywhere. attempt: grows when the router replays the request: then the
    prompt ends with the tokens of the answer that were delivered, while limits and positions go on counting the whole
    answer. choice: index of the answer. num_choices: so many answers from ``choice`` on, whose prompt is computed and handed
    over once; ``sampling`` is that of choice 0, see ``choice_seed``. first_index: index of the first token that this engine
    emits: the number of delivered tokens, and one more on the decode side of a hand-over, where the prefill leg emits that
    one. priority: higher is served earlier and preempted later. tenant: the client; clients share steps fairly.
    eos_token_ids: the model's own end tokens. transfer: None for an aggregated request. pooling_params: no token is drawn,
    the prompt's embedding is all that is asked for. lora_request and multimodal fields are places for later versions:
    ``check`` refuses anything but their defaults.
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
    arrival_time: float = 0.0
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
        """The engine's own name for this choice of this attempt: two attempts may meet on one worker."""
        return choice_key(self.request_id, self.choice, self.attempt)

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens of the answer that stand at the end of the prompt: a replayed request's."""
        return self.first_index - isinstance(self.transfer, ReceiveTransfer)

    @property
    def keys(self) -> list[str]:
        """The engine's names for all of its choices."""
        return [choice_key(self.request_id, choice, self.attempt) for choice in self.choices]

    @property
    def choices(self) -> range:
        """The choices that it asks for."""
        return range(self.choice, self.choice + self.num_choices)

    def of_choice(self, choice: int) -> "EngineRequest":
        """The same for one of its choices."""
        if self.num_choices == 1:
            return self
        sampling = msgspec.structs.replace(self.sampling, seed=choice_seed(self.sampling.seed, choice))
        return msgspec.structs.replace(self, choice=choice, num_choices=1, sampling=sampling)

    def hash_root(self, model_fingerprint: str) -> BlockHash:
        """The parent of the prompt's first block: everything but tokens that makes this request's KV differ (law 7)."""
        return root_hash(model_fingerprint, self.cache_salt, self.lora_request or "")

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequestError (or UnsupportedFieldError) that names what cannot be served."""
        self.sampling.check()
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
        check_token_ids(self.prompt_token_ids, vocab_size, param="prompt")
        check_token_ids(self.sampling.stop_token_ids, vocab_size, param="stop_token_ids")
        check_token_ids(self.sampling.allowed_token_ids, vocab_size, param="allowed_token_ids")
        check_token_ids([token for token, _ in self.sampling.logit_bias], vocab_size, param="logit_bias")
        self._check_choices()
        self._check_place_in_answer()
        self._check_pooling()
        for name in ("lora_request", "multi_modal_inputs"):
            if getattr(self, name):
                raise UnsupportedFieldError(f"{name} is not served by this version", param=name)

    def _check_choices(self) -> None:
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequestError(f"n is {self.num_choices}; it must lie in 1..{MAX_CHOICES}", param="n")
        if self.num_choices > 1 and (self.choice or self.num_delivered_tokens):
            raise InvalidRequestError("a replay goes on with one choice", param="n")

    def _check_pooling(self) -> None:
        if self.pooling_params is None:
            return
        self.pooling_params.check()
        if self.transfer or self.num_choices > 1 or self.choice or self.first_index or self.sampling.grammar:
            raise InvalidRequestError(
                "an embedding has one choice, no tokens, no grammar, and is not handed over",
                param="pooling_params",
            )

    def _check_place_in_answer(self) -> None:
        num_delivered = self.num_delivered_tokens
        if not 0 <= num_delivered < min(self.sampling.max_tokens, len(self.prompt_token_ids)):
            raise InvalidRequestError(
                f"first_index is {self.first_index}: {num_delivered} tokens of the answer cannot stand at the end of a "
                f"prompt of {len(self.prompt_token_ids)} when max_tokens is {self.sampling.max_tokens}",
                param="first_index",
            )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the sampled token's own, its rank (1 = best), and the best alternatives.

    Natural logarithms of the model's distribution before temperature, top-k and top-p.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def candidates(self) -> list[tuple[int, float, int]]:
        """(token id, log probability, rank): its own first, then the best ones that are not it."""
        best = enumerate(zip(self.top_token_ids, self.top_logprobs, strict=True), 1)
        others = [(one, logprob, rank) for rank, (one, logprob) in best if one != self.token_id]
        return [(self.token_id, self.logprob, self.rank), *others]


class TransferReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What it took to get a prompt's KV from another worker.

    exposed_seconds: last range published → verified. hidden_seconds: of copying before that. num_bytes: what crossed.
    num_pieces: copies that were made, one after the other or beside each other. copying_seconds: that these took.
    """

    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    num_bytes: int = 0
    num_pieces: int = 0
    copying_seconds: float = 0.0


class RequestTimings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds that one worker spent on a request, on its own monotonic clock.

    queue: arrival → first scheduled. prefill: first scheduled → last prompt token computed.
    """

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer: TransferReport = TransferReport()


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one choice in one step. The last one of a request carries ``finish_reason``.

    is_leg_finished: this engine will say no more about the request. A prefill leg whose answer goes on elsewhere ends
    so without a ``finish_reason``.
    first_index: index of ``token_ids[0]`` in the answer. stop_reason: the stop token id that ended it (None for the
    model's own end token). num_cached_tokens: prompt tokens whose KV this engine did not compute (set on the first
    output). pooled: the embedding, float32 numbers, with ``finish_reason`` STOP. An error is ``finish_reason`` ERROR with
    ``error_kind`` and ``error_message``; error_param: the field at fault.
    """

    request_id: str
    attempt: int = 0
    choice: int = 0
    first_index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    is_leg_finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    timings: RequestTimings | None = None
    pooled: list[float] | None = None
    error_kind: str | None = None
    error_message: str | None = None
    error_param: str | None = None

    @classmethod
    def of_error(
        cls, request: EngineRequest, kind: str, message: str, param: str | None = None
    ) -> "EngineOutput":
        """The one output of a request that emits nothing and ends with this error."""
        return cls(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=request.choice,
            first_index=request.first_index,
            is_leg_finished=True,
            finish_reason=FinishReason.ERROR,
            error_kind=kind,
            error_message=message,
            error_param=param,
        )

    @property
    def key(self) -> str:
        """``EngineRequest.key`` of the request that this belongs to."""
        return choice_key(self.request_id, self.choice, self.attempt)
