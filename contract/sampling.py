"""The sampling parameters of a request, and the grammar that its answer must match."""

from hashlib import blake2b
from typing import Any, Literal

import msgspec

from contract.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_GRAMMAR_BYTES = 2**18


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

    def check(self) -> None:
        """Raise InvalidRequestError that names the first field out of range."""
        _check_ranges(
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("seed", self.seed, -(2**63), 2**64 - 1),
            ("max_tokens", self.max_tokens, 1, 2**31 - 1),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
        )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must lie in (0, 1]", param="top_p")
        _check_ranges(
            ("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_LOGPROBS),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        )
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must lie in (0, {MAX_REPETITION_PENALTY:g}]",
                param="repetition_penalty",
            )
        for _, bias in self.logit_bias:
            _check_ranges(("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS))
        if self.grammar is not None:
            self.grammar.check()


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice: choice 0 has the request's own, the others have seeds derived from it."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed}#{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _check_ranges(*ranges: tuple[str, float, float, float]) -> None:
    """Raise InvalidRequestError for the first value out of its range. ranges: name, value, lowest and highest value."""
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}; it must lie in {low}..{high}", param=name)
