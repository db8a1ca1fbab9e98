"""The sampling parameters of a request, and the grammar that its answer must match.

Every reader, range, limit and description of a sampling parameter is derived from the table ``PARAMETERS``. A new one is a
row there, a field of the two structs above it, of each .proto file and of ``kvbaton.SamplingParams``, and its effect.
"""

import math
import random
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import structs

from contract.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_GRAMMAR_BYTES = 2**18
_INT32_MAX = 2**31 - 1
_INT64 = 2**63


class Grammar(msgspec.Struct, frozen=True):
    """The grammar that an answer must match. ``check`` rejects invalid ones; workers find out whether it compiles.

    text: a JSON schema; empty (``json_object``: any JSON object); a regular expression for the whole answer; a JSON list of
    the possible answers; a context-free grammar in GBNF (``root ::= ...``) or Lark (``start: ...``), or in either of them
    (``ebnf``), which the worker distinguishes.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "gbnf", "lark"]
    text: str = ""

    def check(self) -> None:
        """Raise InvalidRequestError about ``grammar`` if it is too long or not valid."""
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise _wrong_grammar(f"the grammar has {num_bytes} bytes; the limit is {MAX_GRAMMAR_BYTES}")
        match self.kind:
            case "json_schema":
                if not isinstance(self._decoded(), dict | bool):
                    raise _wrong_grammar("a JSON schema must be an object, true or false")
            case "choice":
                choices = self._decoded()
                if not isinstance(choices, list) or not choices:
                    raise _wrong_grammar("a choice must be a list of at least one answer")
                if not all(isinstance(choice, str) and choice for choice in choices):
                    raise _wrong_grammar("the answers of a choice must be strings that are not empty")
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
    """The parameters with which tokens are sampled. The defaults are OpenAI's; ``check`` rejects values out of range.

    temperature: 0 is greedy. top_k: 0 keeps the whole vocabulary. top_p: (0, 1]. min_p: tokens less probable than this
    share of the best one are not sampled.

    seed: together with the position and the logits it determines a token (law 6); the router chooses one if the client
    gave none.

    max_tokens, min_tokens: limits of the number of new tokens; no stop id is sampled before ``min_tokens``.
    stop_token_ids: end the answer and are not part of its text. ignore_eos: the model's own end tokens do not end it.

    logprobs: None, or the number of alternatives. prompt_logprobs: the same for the prompt, from its second token on.

    logit_bias: (token id, value added to its logit). allowed_token_ids: if not empty, no other token is sampled.
    presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens, once or per occurrence.
    repetition_penalty: divides the logits of all tokens of prompt and answer (multiplies them if negative); 1: off.

    grammar: the grammar that the answer must match, if any.
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
        """True if sampling depends on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def end_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that end the answer. eos_token_ids: the model's own end tokens."""
        own = () if self.ignore_eos else eos_token_ids
        return (*own, *self.stop_token_ids)

    def of_choice(self, choice: int) -> "SamplingParams":
        """Return the parameters of one choice; called on those of choice 0. Only the seed differs."""
        return structs.replace(self, seed=choice_seed(self.seed, choice))

    def check(self) -> None:
        """Raise InvalidRequestError that names the first field out of range."""
        for (parameter, low, high), value in zip(_RANGES, _ranged_values(self), strict=True):
            if value is not None and not low <= value <= high:
                raise parameter.out_of_range(value, self.max_tokens if parameter is _MINIMUM else high)
        if self.min_tokens > self.max_tokens:
            raise _MINIMUM.out_of_range(self.min_tokens, self.max_tokens)
        for _, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise _BIASES.out_of_range(bias, MAX_LOGIT_BIAS)
        if self.grammar is not None:
            self.grammar.check()


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters as a client sent them. None means: not given, take the model's or the documented default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def check_limit(self) -> None:
        """Raise InvalidRequestError if the client's limit of new tokens allows none."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens}; it must be 1 or more", param="max_tokens"
            )

    def completed(self, defaults: SamplingParams, max_tokens: int, *, rates_tokens: bool) -> SamplingParams:
        """Return the parameters with every default filled in; their ranges are not checked, except that of the seed.

        defaults: the model's. max_tokens: the limit after the room behind the prompt is known. rates_tokens: each token's
        log probability is needed, even if the client receives none.
        """
        given = {name: value for name, value in zip(_NAMES, _values(self), strict=True) if value is not None}
        if rates_tokens:
            given.setdefault("logprobs", 0)
        seed = self.seed
        if seed is None:
            seed = random.getrandbits(63)  # it is no secret, and the system's generator takes longer
        elif not -_INT64 <= seed < _INT64:
            raise InvalidRequestError(f"seed is {seed}; it must lie in {-_INT64}..{_INT64 - 1}", param="seed")
        return structs.replace(defaults, **(given | {"max_tokens": max_tokens, "seed": seed}))


@dataclass(frozen=True)
class Parameter:
    """One sampling parameter.

    kind: the form of its value. meaning: its description in the HTTP schema; "" if each endpoint reads and describes it
    itself. low, high: its range, for a list of biases that of each bias; None: its type has no other limit. excludes_low:
    ``low`` itself is outside. written_for_default: a number that other servers' clients and models write for the default.
    max_items: most entries of a list. is_models: a model's generation_config.json may give the default.
    """

    name: str
    kind: Literal["number", "integer", "flag", "token_ids", "biases"]
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    written_for_default: int | None = None
    max_items: int | None = None
    is_models: bool = False

    @property
    def default(self) -> Any:
        """The value where neither the client nor the model gives one."""
        return getattr(DEFAULTS, self.name)

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value; both belong to the range. Of a number only."""
        low = self.low or 0
        high = self.high or 0
        return math.nextafter(low, high) if self.excludes_low else low, high

    def out_of_range(self, value: float, high: float) -> InvalidRequestError:
        """Return the error for a value outside of the range, whose upper end is ``high``."""
        wanted = f"({self.low:g}, {high:g}]" if self.excludes_low else f"{self.low}..{high}"
        return InvalidRequestError(f"{self.name} is {value}; it must lie in {wanted}", param=self.name)


DEFAULTS = SamplingParams()
PARAMETERS = (
    Parameter(
        "temperature",
        "number",
        "0 always selects the most likely token. Default: 1.",
        low=0.0,
        high=2.0,
        is_models=True,
    ),
    Parameter(
        "top_k",
        "integer",
        "Sample from the k most likely tokens; 0 and -1: from all.",
        low=0,
        high=_INT32_MAX,
        written_for_default=-1,  # vLLM's clients
        is_models=True,
    ),
    Parameter(
        "seed",
        "integer",
        "Equal requests with equal seeds get equal answers.",
        low=-_INT64,
        high=2 * _INT64 - 1,
    ),
    Parameter("max_tokens", "integer", low=1, high=_INT32_MAX),
    Parameter("min_tokens", "integer", "Minimum number of new tokens.", low=0, high=_INT32_MAX),
    Parameter(
        "top_p",
        "number",
        "Sample from the smallest set of tokens with this total probability.",
        low=0.0,
        high=1.0,
        excludes_low=True,
        is_models=True,
    ),
    Parameter("logprobs", "integer", low=0, high=MAX_LOGPROBS),
    Parameter("prompt_logprobs", "integer", low=0, high=MAX_LOGPROBS),
    Parameter(
        "min_p",
        "number",
        "Minimum probability, relative to the most likely token.",
        low=0.0,
        high=1.0,
        is_models=True,
    ),
    Parameter(
        "presence_penalty",
        "number",
        "Subtracted from the logits of tokens that the answer contains.",
        low=-2.0,
        high=2.0,
    ),
    Parameter(
        "frequency_penalty",
        "number",
        "Subtracted once for each time that the answer contains the token.",
        low=-2.0,
        high=2.0,
    ),
    Parameter(
        "repetition_penalty",
        "number",
        "Divides positive logits of tokens in prompt and answer, multiplies negative ones.",
        low=0.0,
        high=MAX_REPETITION_PENALTY,
        excludes_low=True,
        is_models=True,
    ),
    Parameter("stop_token_ids", "token_ids", "Token ids that end the answer.", max_items=1024),
    Parameter("ignore_eos", "flag", "Do not end the answer at the model's end tokens."),
    Parameter(
        "allowed_token_ids", "token_ids", "If not empty, only these tokens are sampled.", max_items=16_384
    ),
    Parameter(
        "logit_bias",
        "biases",
        "Token id → number that is added to its logit.",
        low=-MAX_LOGIT_BIAS,
        high=MAX_LOGIT_BIAS,
        max_items=1024,
    ),
)
"""Every field of ``SamplingParams`` except the grammar, which has a form of its own; in the order of the checks."""
MODEL_DEFAULTS = tuple(parameter for parameter in PARAMETERS if parameter.is_models)
LISTS = tuple(parameter for parameter in PARAMETERS if parameter.max_items)
(_BIASES,) = (parameter for parameter in PARAMETERS if parameter.kind == "biases")
(_MINIMUM,) = (parameter for parameter in PARAMETERS if parameter.name == "min_tokens")
NUMBERS = tuple(parameter for parameter in PARAMETERS if parameter.kind in ("number", "integer"))
_RANGES = tuple((parameter, *parameter.bounds) for parameter in NUMBERS)
_ranged_values = attrgetter(*(parameter.name for parameter in NUMBERS))
_NAMES = tuple(field.name for field in structs.fields(SamplingParams))
_values = attrgetter(*_NAMES)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice: choice 0 has the request's own, the others have seeds derived from it."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed}#{choice}".encode(), digest_size=8).digest()
    # A seed is signed and has 64 bits.
    return int.from_bytes(digest, "big") >> 1
