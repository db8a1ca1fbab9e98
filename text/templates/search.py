"""Searches many texts in one prompt, in time that a long prompt with many texts does not multiply."""

import re
from collections.abc import Sequence

from text.templates.sandbox import TemplateLimitError

_FREE_CHARACTERS = 2**30
_EXPENSIVE = 8
_PASSES = 16
"""A prompt may be gone through so often, and _FREE_CHARACTERS in any case; words count _EXPENSIVE times."""


class Search:
    """Owns the place behind the last text that was found in its order, and how much may still be gone through."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._position = 0
        self._spelling = 0
        self._num_left = _FREE_CHARACTERS + _PASSES * len(prompt)

    def has(self, spellings: Sequence[str]) -> bool:
        """Return whether the prompt holds a text in one of its spellings: behind the last one, or anywhere.

        Raises TemplateLimitError if too much was gone through.
        """
        last = min(self._spelling, len(spellings) - 1)
        order = sorted(range(len(spellings)), key=lambda index: index != last)
        for begin in (self._position, 0):
            for index in order:
                found = self._find(spellings[index].strip(), begin)
                if found >= 0:
                    self._spelling = index
                    self._position = max(self._position, found) if begin == 0 else found
                    return True
        return False

    def count(self, text: str, prompt: str | None = None) -> int:
        """Return how often a text stands in the prompt, or in another one.

        Raises TemplateLimitError if too much was gone through.
        """
        prompt = self._prompt if prompt is None else prompt
        self._spend(len(prompt))
        return prompt.count(text.strip())

    def count_words(self, text: str, prompt: str | None = None) -> int:
        """Return the same but for places within a word."""
        text = text.strip()
        prompt = self._prompt if prompt is None else prompt
        self._spend(_EXPENSIVE * len(prompt))
        pattern = re.escape(text)
        pattern = (r"(?<!\w)" if re.match(r"\w", text) else "") + pattern
        return len(re.findall(pattern + (r"(?!\w)" if re.search(r"\w\Z", text) else ""), prompt))

    def _find(self, text: str, begin: int) -> int:
        """Return the place behind the text, or -1."""
        found = self._prompt.find(text, begin)
        end = len(self._prompt) if found < 0 else found + len(text)
        self._spend(end - begin)
        return -1 if found < 0 else end

    def _spend(self, num_characters: int) -> None:
        self._num_left -= num_characters
        if self._num_left < 0:
            raise TemplateLimitError(
                "the model's chat template writes these messages in a way that takes too long to check",
                param="messages",
            )
