"""One choice's tokens become the text that its client reads.

Tokens are detokenized (``TokenTexts``), end tokens hidden, stop strings cut, reasoning and tool calls separated from
content, and tokens counted. With ``best_of``, the best of several whole answers are chosen (``choose_best``). The streams
of several answers become one (``merge_streams``).
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from statistics import fmean
from typing import Protocol

import msgspec
from msgspec import structs

from contract.outputs import FinishReason, TokenLogprobs
from router.answers.timings import Timings
from router.concurrency import rest_after
from router.intake.prepared_request import PreparedRequest
from router.tokens.delivery import Token, TokenBatch
from text.detokenizer import Detokenizer
from text.model_card import ModelCard
from text.parsing.answer_format import AnswerParser
from text.parsing.parser import CallPiece, Content, Piece, Reasoning, append
from text.stop import StopStrings
from text.tokenizer import Tokenizer

_PROMPT_END = 32
"""Last tokens of a prompt, by which a parser finds out if the prompt has opened the reasoning."""
_Items = asyncio.Queue["Delta | Exception | None"]
"""Deltas of all streams; None at the end of a stream."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. num_cached_tokens: prompt tokens whose KV was found in a cache.

    num_reasoning_tokens: tokens of the completion that belong to the reasoning, its tags included.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Return the sum for several answers."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens + other.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_reasoning_tokens=self.num_reasoning_tokens + other.num_reasoning_tokens,
        )


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of an answer. logprobs: of its tokens from the second one on, if the client asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]

    @property
    def tokens(self) -> list[Token]:
        """The tokens in the form of an answer's. The first one has no log probabilities."""
        logprobs: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        if self.logprobs:
            logprobs[1:] = self.logprobs
        return [Token(index, *both) for index, both in enumerate(zip(self.token_ids, logprobs, strict=True))]


class Delta(msgspec.Struct, kw_only=True):
    """The part of a choice that one batch of tokens adds.

    text: empty while a character or a stop string is unfinished. reasoning, calls: in chats, the parts that are not text
    for the reader. parsed: text, reasoning and calls in their order; empty for an answer that is not parsed.
    num_reasoning_tokens: how many of the tokens end with the last one of the reasoning. prompt: in the first delta.
    embedding: the whole result of a request for one. finish_reason, usage, timings: in the last delta. stop_reason: the
    stop string or stop token id; "grammar" with LENGTH: see ``EngineOutput.end``.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = []
    parsed: list[Piece] = []
    tokens: list[Token] = []
    num_reasoning_tokens: int = 0
    prompt: Prompt | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    embedding: Sequence[float] = ()

    @property
    def pieces(self) -> Sequence[Piece]:
        """Text, reasoning and calls in their order."""
        return self.parsed or ([Content(self.text)] if self.text else [])

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add pieces of the answer's text."""
        for piece in pieces:
            append(self.parsed, piece)
            match piece:
                case Content():
                    self.text += piece.text
                case Reasoning():
                    self.reasoning += piece.text
                case _:
                    append(self.calls, piece)


class DeltaSink(Protocol):
    """Takes deltas in the turn of the event loop in which their tokens arrive, so that no task has to be woken for them."""

    @property
    def has_room(self) -> bool:
        """True if a delta can be put now: nothing that was put before waits for the client."""

    def put(self, delta: Delta) -> None:
        """Send a delta on. Not the last one of an answer, and none of many tokens."""


class Answer:
    """One choice as its client receives it.

    End tokens have no text if special tokens are skipped, stop tokens none unless stop strings are kept. A stop string can
    end the answer from token ``min_tokens`` on; the text of earlier tokens is not searched.
    """

    def __init__(self, request: PreparedRequest, card: ModelCard) -> None:
        tokenizer = card.tokenizer
        self._min_tokens = request.sampling.min_tokens
        self._stops = StopStrings(request.stop, is_kept=request.include_stop_str_in_output)
        self._parser = AnswerParser()
        if request.chat:
            # a template may end with the opening tag, so that the answer begins inside the reasoning
            end = tokenizer.decode(request.prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
            self._parser = card.answer_format.parser(
                request.chat, end, has_grammar=request.sampling.grammar is not None
            )
        hidden = {
            *(request.eos_token_ids if request.skip_special_tokens else ()),
            *(() if request.include_stop_str_in_output else request.sampling.stop_token_ids),
        }
        self._texts = TokenTexts(
            tokenizer,
            request.prompt_token_ids,
            hidden,
            self._parser.tags,
            skip_special_tokens=request.skip_special_tokens,
        )
        # most answers: their text goes to the client as it is, for which no parser and no search is called
        self._is_plain = self._parser.is_plain and self._stops.is_empty
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_finished = False

    @property
    def ends_with_tokens(self) -> bool:
        """True if only its workers end it: there are no stop strings."""
        return self._stops.is_empty

    def push(self, batch: TokenBatch) -> Delta:
        """Return the delta of a batch. Tokens after a stop string are not part of it."""
        delta = Delta()
        for token in batch.tokens:
            text = self._texts.push(token)
            delta.tokens.append(token)
            self.num_tokens += 1
            if self._is_plain:
                delta.text += text
                continue
            was_reasoning = self._parser.is_reasoning
            # no stop string can end the answer before token ``min_tokens``, so that earlier text is certain at once
            certain = text if self.num_tokens < self._min_tokens else self._stops.push(text)
            if certain:
                delta.add(self._parser.push(certain))
            if was_reasoning or self._parser.is_reasoning:
                self.num_reasoning_tokens += 1
                delta.num_reasoning_tokens = len(delta.tokens)
            if self._stops.matched is not None:
                return self._end(delta, FinishReason.STOP, self._stops.matched)
        if batch.finish_reason is None:
            return delta
        if self._is_plain:
            delta.text += self._texts.flush()
            return self._end(delta, batch.finish_reason, batch.stop_reason)
        delta.add(self._parser.push(self._stops.push(self._texts.flush())))
        if self._stops.matched is not None:
            return self._end(delta, FinishReason.STOP, self._stops.matched)
        delta.add(self._parser.push(self._stops.flush()))
        return self._end(delta, batch.finish_reason, batch.stop_reason)

    def _end(self, delta: Delta, reason: FinishReason, stop_reason: str | int | None) -> Delta:
        self.is_finished = True
        if not self._is_plain:
            delta.add(self._parser.flush())
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        return delta


class TokenTexts:
    """Detokenizes the tokens of one answer, in order, and counts the characters.

    hidden: token ids without text. tags: token ids that separate the parts of an answer; each has its own text, whether or
    not special tokens are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        hidden: Iterable[int],
        tags: Iterable[str],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._token_bytes = tokenizer.token_bytes
        self._hidden = frozenset(hidden)
        self._tags = {tokenizer.token_id(tag): tag for tag in tags}
        self._num_characters = 0
        self._holds_text = False

    def push(self, token: Token) -> str:
        """Return the text that became certain with a token, and set the offset at which the token itself begins."""
        token_id = token.token_id
        if token_id in self._hidden:
            text = ""
        elif (tag := self._tags.get(token_id)) is None:
            text = self._detokenizer.push(token_id)
        else:
            text = self._detokenizer.flush() + tag
        token.text_offset = self._num_characters
        # the text may begin with characters that earlier tokens had left unfinished
        if self._holds_text and len(text) > 1:
            token.text_offset += self._num_before(token_id, text)
        self._num_characters += len(text)
        self._holds_text = self._detokenizer.has_unread
        return text

    def flush(self) -> str:
        """Return the text of an unfinished character at the end of the answer."""
        return self._detokenizer.flush()

    def _num_before(self, token_id: int, text: str) -> int:
        """Return how many characters of ``text`` belong to earlier tokens."""
        raw = self._token_bytes(token_id)
        own = raw.decode("utf-8", "ignore")
        begins = bool(raw) and raw[0] & 0xC0 != 0x80
        return len(text) - len(own) if begins and text.endswith(own) else 0


def choose_best(deltas: Sequence[Delta], num_chosen: int, num_choices: int) -> list[Delta]:
    """Choose ``num_chosen`` of every ``num_choices`` answers in a row: highest log probability per token, best first.

    All tokens have log probabilities. The usage of the other answers is added to that of the best one.
    """
    answers: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        answers[delta.index].append(delta)
    logprobs = {
        index: [token.logprobs.logprob for delta in found for token in delta.tokens if token.logprobs]
        for index, found in answers.items()
    }
    chosen = []
    for start in range(0, len(answers), num_choices):
        ranked = sorted(range(start, start + num_choices), key=lambda index: -fmean(logprobs[index]))
        usages = [delta.usage for index in ranked for delta in answers[index] if delta.usage]
        for rank, index in enumerate(ranked[:num_chosen]):
            place = start // num_choices * num_chosen + rank
            *earlier, last = answers[index]
            # the tokens of answers that are not returned were computed as well, and are shown with the best one
            usage = last.usage if rank or not usages else sum(usages[num_chosen:], start=usages[0])
            chosen += [structs.replace(delta, index=place) for delta in earlier]
            chosen.append(structs.replace(last, index=place, usage=usage))
    return chosen


def merge_streams(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of all streams as they arrive, each with the place of its stream as ``index``.

    Raises the error of the first stream that fails. A reader that does not read delays all streams; closing or cancelling
    the merged stream ends them all.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    # one delta: a client that does not read holds up all streams, and their tokens are bounded where they wait
    items: _Items = asyncio.Queue(maxsize=1)
    tasks: list[asyncio.Task[None]] = []
    # in a task of its own: the first deltas are passed on while hundreds of others begin
    starting = asyncio.create_task(_start(streams, items, tasks))
    num_open = len(streams)
    try:
        while num_open:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _cancel([*tasks, starting])


async def _start(
    streams: Sequence[AsyncGenerator[Delta, None]], items: _Items, tasks: list[asyncio.Task[None]]
) -> None:
    for index, stream in enumerate(streams):
        tasks.append(asyncio.create_task(_forward(index, stream, items)))
        await rest_after(index + 1)


async def _forward(index: int, stream: AsyncGenerator[Delta, None], items: _Items) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                delta.index = index
                await items.put(delta)
    except Exception as error:  # noqa: BLE001 - _merge raises it
        await items.put(error)
    else:
        await items.put(None)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks, last one first: those that hold a worker would let those that wait for it begin.

    A second cancellation of the caller must not spare any of them.
    """
    left = iter(reversed(tasks))
    try:
        for number, task in enumerate(left, 1):
            task.cancel()
            await rest_after(number)
    finally:
        for task in left:
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)
