"""Searches many texts in one prompt, with a limit of the total cost."""

import re
from collections.abc import Sequence

from text.templates.sandbox import TemplateLimitError

_FREE_CHARACTERS = 2**30
_EXPENSIVE = 8
_PASSES = 16
"""Limit of passes over a prompt, in addition to _FREE_CHARACTERS; a search for words costs _EXPENSIVE times as much."""


class Search:
    """Owns the position after the last text that was found in order, and the remaining budget of characters."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._position = 0
        self._spelling = 0
        self._num_left = _FREE_CHARACTERS + _PASSES * len(prompt)

    def has(self, spellings: Sequence[str]) -> bool:
        """Return whether the prompt contains a text in one of its spellings: after the last one, or anywhere.

        Raises TemplateLimitError if the budget is exceeded.
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
        """Return the number of occurrences of a text in the prompt, or in another one.

        Raises TemplateLimitError if the budget is exceeded.
        """
        prompt = self._prompt if prompt is None else prompt
        self._spend(len(prompt))
        return prompt.count(text.strip())

    def count_words(self, text: str, prompt: str | None = None) -> int:
        """Return the number of occurrences that are not within a word."""
        text = text.strip()
        prompt = self._prompt if prompt is None else prompt
        self._spend(_EXPENSIVE * len(prompt))
        pattern = re.escape(text)
        pattern = (r"(?<!\w)" if re.match(r"\w", text) else "") + pattern
        return len(re.findall(pattern + (r"(?!\w)" if re.search(r"\w\Z", text) else ""), prompt))

    def _find(self, text: str, begin: int) -> int:
        """Return the position after the text, or -1."""
        found = self._prompt.find(text, begin)
        end = len(self._prompt) if found < 0 else found + len(text)
        self._spend(end - begin)
        return -1 if found < 0 else end

    def _spend(self, num_characters: int) -> None:
        self._num_left -= num_characters
        if self._num_left < 0:
            raise TemplateLimitError(
                "the output of the model's chat template for these messages takes too long to check",
                param="messages",
            )
