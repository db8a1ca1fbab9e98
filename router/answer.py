"""Tokens → text of one choice: end tokens hidden, stop strings cut, counts kept."""

from dataclasses import dataclass, field

from contract.requests import FinishReason
from router.attempt import Arrival
from router.delivery import Token
from router.request import PreparedRequest
from router.timings import Timings
from text.detokenizer import Detokenizer
from text.stop import StopStrings
from text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts. num_cached_tokens: prompt tokens whose KV nobody computed for this request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int

    def __add__(self, other: "Usage") -> "Usage":
        """Of several answers."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens + other.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
        )


@dataclass(kw_only=True)
class Delta:
    """What one arrival adds to a choice; ``text`` may be empty while a character or a stop string is unfinished.

    The last one carries ``finish_reason``, ``usage`` and ``timings``. stop_reason: the stop string or stop token id.
    """

    index: int = 0
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


class Answer:
    """One choice as the client sees it.

    End tokens and stop tokens have no text. A stop string can end the answer from token ``min_tokens`` on; text of
    earlier tokens is not searched.
    """

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._hidden = {*request.eos_token_ids, *request.sampling.stop_token_ids}
        self._min_tokens = request.sampling.min_tokens
        self._text = Detokenizer(tokenizer, request.prompt_token_ids)
        self._stops = StopStrings(request.stop)
        self.num_tokens = 0
        self.is_finished = False

    def push(self, arrival: Arrival) -> Delta:
        """The delta of an arrival; tokens behind a stop string are not part of it."""
        delta = Delta()
        for token in arrival.tokens:
            delta.tokens.append(token)
            delta.text += self._push_token(token)
            if self._stops.matched is not None:
                return self._end(delta, FinishReason.STOP, self._stops.matched)
        if arrival.finish_reason is None:
            return delta
        delta.text += self._stops.push(self._text.flush())
        if self._stops.matched is not None:
            return self._end(delta, FinishReason.STOP, self._stops.matched)
        delta.text += self._stops.flush()
        return self._end(delta, arrival.finish_reason, arrival.stop_reason)

    def _push_token(self, token: Token) -> str:
        self.num_tokens += 1
        if token.token_id in self._hidden:
            return ""
        text = self._text.push(token.token_id)
        return text if self.num_tokens < self._min_tokens else self._stops.push(text)

    def _end(self, delta: Delta, reason: FinishReason, stop_reason: str | int | None) -> Delta:
        self.is_finished = True
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        return delta
