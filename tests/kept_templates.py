"""Chat templates whose processes outlive a test: to start and probe one takes longer than many a test of a router."""

import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from text.templates.chat_template import ChatTemplate

MAX_KEPT = 4


class KeptTemplate(ChatTemplate):
    """A template that can still be used when a model card has closed it."""

    def close(self) -> None:
        """Do nothing: the next test may use the same template."""

    def end(self) -> None:
        """End the process that renders it, which starts again if the template is used."""
        super().close()


class KeptTemplates:
    """Owns the latest templates."""

    def __init__(self) -> None:
        self._kept = OrderedDict[str, KeptTemplate]()

    def make(self, source: str, **options: Any) -> KeptTemplate:
        """Return the template that ``ChatTemplate`` makes of these arguments."""
        key = repr((source, {name: _shown(value) for name, value in options.items()}))
        if key not in self._kept:
            self._kept[key] = KeptTemplate(source, **options)
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)[1].end()
        return self._kept[key]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the model cards of this process take their templates from here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("text.model_card.ChatTemplate", self.make)
            yield

    def close(self) -> None:
        """End all processes."""
        for template in self._kept.values():
            template.end()


def _shown(value: Any) -> Any:
    return value.pattern if isinstance(value, re.Pattern) else value  # its own text would be cut


@pytest.fixture(scope="session")
def kept_templates() -> Iterator[KeptTemplates]:
    """Templates for all tests that use them."""
    kept = KeptTemplates()
    yield kept
    kept.close()


@pytest.fixture(scope="module", autouse=True)
def use_kept_templates(kept_templates: KeptTemplates) -> Iterator[None]:
    """Let every test of a folder whose conftest.py has this share them."""
    with kept_templates.used():
        yield
