"""Tokens → text of one choice: end tokens hidden, stop strings cut, reasoning and tool calls told apart, counts kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from contract.requests import FinishReason, TokenLogprobs
from router.delivery import Token, TokenBatch
from router.request import PreparedRequest
from router.timings import Timings
from text.detokenizer import Detokenizer
from text.model_card import ModelCard
from text.parsing.answer import AnswerParser
from text.parsing.pieces import CallPiece, Content, Piece, Reasoning, append
from text.stop import StopStrings

_PROMPT_END = 32
"""Tokens of the prompt that say whether it has opened the reasoning."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts. num_cached_tokens: prompt tokens whose KV nobody computed for this request.

    num_reasoning_tokens: those of the completion that belong to the reasoning, its tags included.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Of several answers."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens + other.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_reasoning_tokens=self.num_reasoning_tokens + other.num_reasoning_tokens,
        )


@dataclass(frozen=True)
class Prompt:
    """What the answer goes on with. logprobs: of its tokens from the second on, where they were asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]

    @property
    def tokens(self) -> list[Token]:
        """As those of an answer; nothing is known of how likely the first one was."""
        logprobs: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        if self.logprobs:
            logprobs[1:] = self.logprobs
        return [Token(index, *both) for index, both in enumerate(zip(self.token_ids, logprobs, strict=True))]


@dataclass(kw_only=True)
class Delta:
    """What one arrival adds to a choice; ``text`` may be empty while a character or a stop string is unfinished.

    reasoning, calls: what is no text for the reader; in chats only. pieces: all of it in its order. num_reasoning_tokens:
    so many of the tokens end with the reasoning's last one. prompt: with the first one. embedding: all that there is
    where that was asked for. The last one carries ``finish_reason``, ``usage`` and ``timings``. stop_reason: the stop string
    or stop token id.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    prompt: "Prompt | None" = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    embedding: Sequence[float] = ()

    def add(self, pieces: Iterable[Piece]) -> None:
        """What has been read of the answer's text."""
        for piece in pieces:
            append(self.pieces, piece)
            match piece:
                case Content():
                    self.text += piece.text
                case Reasoning():
                    self.reasoning += piece.text
                case _:
                    append(self.calls, piece)


class Answer:
    """One choice as the client sees it.

    End tokens have no text where special tokens are skipped, stop tokens none where stop strings are not kept. A stop
    string can end the answer from token ``min_tokens`` on; text of earlier tokens is not searched.
    """

    def __init__(self, request: PreparedRequest, card: ModelCard) -> None:
        tokenizer = card.tokenizer
        self._hidden = {
            *(request.eos_token_ids if request.skip_special_tokens else ()),
            *(() if request.include_stop_str_in_output else request.sampling.stop_token_ids),
        }
        self._min_tokens = request.sampling.min_tokens
        self._text = Detokenizer(
            tokenizer, request.prompt_token_ids, skip_special_tokens=request.skip_special_tokens
        )
        self._stops = StopStrings(request.stop, is_kept=request.include_stop_str_in_output)
        self._parser = AnswerParser()
        if request.chat:
            end = tokenizer.decode(request.prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
            self._parser = card.answer_format.parser(
                request.chat, end, has_grammar=request.sampling.grammar is not None
            )
        self._tags = {tokenizer.token_id(tag): tag for tag in self._parser.tags}
        self._token_bytes = tokenizer.token_bytes
        self._num_characters = 0
        self._holds_text = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_finished = False

    def push(self, arrival: TokenBatch) -> Delta:
        """The delta of an arrival; tokens behind a stop string are not part of it."""
        delta = Delta()
        for token in arrival.tokens:
            text = self._text_of(token)
            offset = self._offset_of(token, text)
            self._num_characters += len(text)
            self._holds_text = self._text.has_unread
            delta.tokens.append(replace(token, text_offset=offset))
            was_reasoning = self._parser.is_reasoning
            delta.add(self._parser.push(self._certain(text)))
            if was_reasoning or self._parser.is_reasoning:
                self.num_reasoning_tokens += 1
                delta.num_reasoning_tokens = len(delta.tokens)
            if self._stops.matched is not None:
                return self._end(delta, FinishReason.STOP, self._stops.matched)
        if arrival.finish_reason is None:
            return delta
        delta.add(self._parser.push(self._stops.push(self._text.flush())))
        if self._stops.matched is not None:
            return self._end(delta, FinishReason.STOP, self._stops.matched)
        delta.add(self._parser.push(self._stops.flush()))
        return self._end(delta, arrival.finish_reason, arrival.stop_reason)

    def _text_of(self, token: Token) -> str:
        self.num_tokens += 1
        if token.token_id in self._hidden:
            return ""
        tag = self._tags.get(token.token_id)
        return self._text.push(token.token_id) if tag is None else self._text.flush() + tag

    def _offset_of(self, token: Token, text: str) -> int:
        """Where a token begins: behind what was made certain before it, and behind what it makes certain of others."""
        if not self._holds_text or len(text) < 2:
            return self._num_characters
        raw = self._token_bytes(token.token_id)
        own = raw.decode("utf-8", "ignore")
        begins = bool(raw) and raw[0] & 0xC0 != 0x80
        others = len(text) - len(own) if begins and text.endswith(own) else 0
        return self._num_characters + others

    def _certain(self, text: str) -> str:
        """The text that no stop string can begin with any more."""
        return text if self.num_tokens < self._min_tokens else self._stops.push(text)

    def _end(self, delta: Delta, reason: FinishReason, stop_reason: str | int | None) -> Delta:
        self.is_finished = True
        delta.add(self._parser.flush())
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        return delta
