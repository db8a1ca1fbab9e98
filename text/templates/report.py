"""The probe's report about a model's chat templates, for people and programs."""

from collections.abc import Mapping
from dataclasses import dataclass

from text.templates.probe import REFUSED

_NEEDED = ("user", "assistant")


@dataclass(frozen=True)
class TemplateReport:
    """The abilities of templates: template's name → kind of conversation → the way in which it is shown, or REFUSED."""

    abilities: Mapping[str, Mapping[str, str]]

    def refused(self) -> list[str]:
        """Return the kinds of conversation that no form shows, with the template's name if there are several."""
        return [
            kind if len(self.abilities) == 1 else f"{name}: {kind}"
            for name, found in self.abilities.items()
            for kind, how in found.items()
            if how == REFUSED
        ]

    def problems(self) -> list[str]:
        """Return the problems that make a template useless: it does not show user or assistant messages."""
        return [
            f"the chat template {name!r} does not show {kind} messages: chats with it are rejected"
            for name, found in self.abilities.items()
            for kind in _NEEDED
            if found.get(kind) == REFUSED
        ]

    def line(self) -> str:
        """Return one line for a log."""
        main = next(iter(self.abilities.values()))
        shown = ", ".join(f"{kind}: {how}" for kind, how in main.items() if how != REFUSED)
        refused = self.refused()
        return f"{shown}; refused: {', '.join(refused)}" if refused else shown
