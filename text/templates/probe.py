"""Finds the message form of one template by its output for marked conversations.

Every question is a kind of conversation with unguessable texts, tried in one form after the other; the first form whose
output contains all texts is used. The template's source is not interpreted.

"""

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from contract.errors import InvalidRequestError
from text.chat import Chat, Message
from text.templates.forms import Form
from text.templates.sandbox import TemplateLimitError

Attempt = Callable[[Chat, Form], str]
"""Renders a conversation in a form and proves it complete. Raises InvalidRequestError otherwise."""
Candidate = tuple[str, Form]
REFUSED = "refused"
_PART = re.compile(r"""['"]type['"]: ['"]text['"]""")
"""The output for a list of parts of a template that treats it as text."""


@dataclass
class Findings:
    """The results of a probe. abilities: kind of conversation → the way in which it is shown, or REFUSED."""

    form: Form = field(default_factory=Form)
    abilities: dict[str, str] = field(default_factory=dict)


class Probe:
    """Owns the findings about one template while it is probed."""

    def __init__(self, attempt: Attempt, form: Form | None = None) -> None:
        """Start with a form; by default the plain one."""
        self._attempt = attempt
        self.findings = Findings(form or Form())

    @property
    def form(self) -> Form:
        """The form found so far."""
        return self.findings.form

    def written(self, chat: Chat, form: Form) -> str | None:
        """Return the prompt, or None if the template does not show the conversation in this form.

        Raises TemplateLimitError.
        """
        try:
            return self._attempt(chat, form)
        except TemplateLimitError:
            raise
        except InvalidRequestError:
            return None

    def choose(
        self,
        kind: str,
        candidates: Iterable[Candidate],
        chats: Iterable[Chat],
        num_blemishes: Callable[[str], int] = lambda _: 0,
    ) -> bool:
        """Choose the first candidate that shows all chats, with the fewest blemishes; return whether there is one."""
        best: tuple[int, str, Form] | None = None
        tried = list(chats)
        for label, form in candidates:
            prompts = [self.written(chat, form) for chat in tried]
            if any(prompt is None or (form.parts and _PART.search(prompt)) for prompt in prompts):
                continue
            found = sum(num_blemishes(prompt or "") for prompt in prompts)
            if best is None or found < best[0]:
                best = (found, label, form)
            if not found:
                break
        self.findings.abilities[kind] = REFUSED if best is None else best[1]
        if best is not None:
            self.findings.form = best[2]
        return best is not None

    def keep(self, form: Form) -> None:
        """Set a form that was tried by other means."""
        self.findings.form = form

    def note(self, kind: str, how: str) -> None:
        """Record the way in which a kind of conversation is shown."""
        self.findings.abilities[kind] = how


def word() -> str:
    """Return a text that no template contains."""
    return f"w{secrets.token_hex(6)}"


def message_of(role: str, content: Any = "", **others: Any) -> Message:
    """Make a message; its content is an unguessable word if none is given."""
    return {"role": role, "content": word() if content == "" else content, **others}


def part(text: str) -> Message:
    """Make a text part of a content."""
    return {"type": "text", "text": text}


def chat(*messages: Message, **others: Any) -> Chat:
    """Make a conversation."""
    return Chat(messages=list(messages), **others)


def with_parts(form: Form, role: str) -> Form:
    """Return the form that passes the texts of a role as lists of parts."""
    return replace(form, parts=form.parts | {role})
