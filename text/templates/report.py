"""What the probe found about a model's chat templates, in a form that people and programs read."""

from collections.abc import Mapping
from dataclasses import dataclass

from text.templates.probe import REFUSED

_NEEDED = ("user", "assistant")


@dataclass(frozen=True)
class TemplateReport:
    """abilities: template's name → kind of conversation → how it is shown, or REFUSED."""

    abilities: Mapping[str, Mapping[str, str]]

    def refused(self) -> list[str]:
        """Return the kinds of conversation that no form shows, with the template's name where there are several."""
        return [
            kind if len(self.abilities) == 1 else f"{name}: {kind}"
            for name, found in self.abilities.items()
            for kind, how in found.items()
            if how == REFUSED
        ]

    def problems(self) -> list[str]:
        """Return what makes a template useless: it does not show the words of users or of the model."""
        return [
            f"the chat template {name!r} does not show {kind} messages: chats with it are refused"
            for name, found in self.abilities.items()
            for kind in _NEEDED
            if found.get(kind) == REFUSED
        ]

    def line(self) -> str:
        """Return one line for a log."""
        main = next(iter(self.abilities.values()))
        told = ", ".join(f"{kind}: {how}" for kind, how in main.items() if how != REFUSED)
        refused = self.refused()
        return f"{told}; refused: {', '.join(refused)}" if refused else told
