"""Tokenizing on threads beside the event loop, with a limit on the texts that wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from contract.errors import OverloadedError
from router.intake.request import EmbeddingRequest, GenerationRequest, tokenize
from text.chat import Chat
from text.length_bound import check_text_size
from text.model_card import ModelCard
from text.tokenizer import Tokenizer

_SHORT = 4_000
"""Shorter texts (characters) are tokenized on the event loop, since a thread would take longer."""
_LONG = 2**16
"""Longer texts (characters) are tokenized on their own thread, so that shorter ones do not wait for them."""
MAX_WAITING_CHARACTERS = 64 * 2**20
_T = TypeVar("_T")


class TokenizerThreads:
    """Owns two threads, for long texts and for others; each tokenizes one text at a time, which bounds the memory.

    max_waiting_characters: of all texts that wait or are being tokenized.
    """

    def __init__(self, max_waiting_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self._max_waiting = max_waiting_characters
        self.num_waiting = 0
        """Characters that are being tokenized or wait for it."""
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize long texts")
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def tokenize(
        self, request: GenerationRequest | EmbeddingRequest, card: ModelCard, max_model_len: int
    ) -> list[int]:
        """Return the prompt as token ids. Raises InvalidRequestError, OverloadedError."""
        if isinstance(request.prompt, tuple):
            return tokenize(request, card, max_model_len)
        return await self.run(size_of(request.prompt), partial(tokenize, request, card, max_model_len))

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` on a text of ``size`` characters. Raises OverloadedError if too many wait."""
        if size < _SHORT:
            return work()
        if self.num_waiting and self.num_waiting + size > self._max_waiting:
            raise OverloadedError(
                f"texts of {self.num_waiting} characters wait to be tokenized, and the limit is {self._max_waiting}; "
                "send this one again later"
            )
        self.num_waiting += size
        try:
            thread = self._short if size < _LONG else self._long
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            self.num_waiting -= size

    def close(self) -> None:
        """Drop the texts that wait. Running work is not stopped."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def size_of(prompt: str | Chat) -> int:
    """Return the approximate number of characters of a prompt, without rendering it.

    A chat always counts as too long for the event loop, since another process renders it.
    """
    if isinstance(prompt, str):
        return len(prompt)
    size = _SHORT
    open_values: list[Any] = [prompt.messages, prompt.documents, prompt.template_kwargs, prompt.tools]
    while open_values:
        value = open_values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            open_values += value.values()
        elif isinstance(value, list | tuple):
            open_values += value
        else:
            size += 1
    return size


def encode_text(tokenizer: Tokenizer, text: str, max_tokens: int, has_special_tokens: bool) -> list[int]:
    """Return the token ids of a text that may be longer than the model takes. Raises ContextLengthError far beyond that."""
    check_text_size(text, max_tokens, "prompt")
    return tokenizer.encode(text, add_special_tokens=has_special_tokens)
