"""Finds the message form of one template by its output for marked conversations, and reports what the template shows.

Every question is a kind of conversation with unguessable texts, tried in one form after the other; the first form whose
output contains all texts is used. The template's source is not interpreted. Here are the questions about messages: roles,
content parts, system and developer messages.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
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
# The output for a list of parts of a template that treats it as text: it contains the texts, but is wrong.
_PART = re.compile(r"""['"]type['"]: ['"]text['"]""")
_NEEDED = ("user", "assistant")
_LEADING = (
    ("system", "system"),
    ("system", "developer"),
    ("developer", "system"),
    ("developer", "developer"),
)


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
            # None is better, and a candidate costs a rendering of each conversation.
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


def ask_about_messages(probe: Probe) -> None:
    """Find the forms of user, assistant, system and developer messages."""
    _ask_contents(probe)
    _ask_parts(probe)
    _ask_developer(probe)
    _ask_leading(probe)
    _ask_later(probe)


def _ask_contents(probe: Probe) -> None:
    form = probe.form
    probe.choose("user", [("text", form), ("parts", with_parts(form, "user"))], [chat(message_of("user"))])
    form = probe.form
    probe.choose(
        "assistant",
        [("text", form), ("parts", with_parts(form, "assistant"))],
        [chat(message_of("user"), message_of("assistant"), message_of("user"))],
    )
    form = probe.form
    candidates = [
        ("text", form),
        ("parts", with_parts(form, "system")),
        ("in the first user message", replace(form, system="user")),
    ]
    probe.choose("system", candidates, [chat(message_of("system"), message_of("user"))])


def _ask_parts(probe: Probe) -> None:
    shown = []
    for role, around in (("user", ()), ("system", ("user",)), ("assistant", ("user",))):
        if role == "system" and probe.form.system == "user":
            continue
        kept = replace(probe.form, keeps_parts=probe.form.keeps_parts | {role})
        if _keeps_parts(probe, role, around, kept):
            probe.keep(kept)
            shown.append(role)
    probe.note("content parts", f"kept for {', '.join(shown)}" if shown else "joined by newlines")


def _keeps_parts(probe: Probe, role: str, around: tuple[str, ...], kept: Form) -> bool:
    """Return whether parts give the same output as their text in a string."""
    first = word()
    second = word()
    beside = [message_of(name) for name in around]

    def of(content: object) -> Chat:
        message = {"role": role, "content": content}
        return chat(*((message, *beside) if role == "system" else (*beside, message)))

    one = probe.written(of([part(first)]), kept)
    two = probe.written(of([part(first), part(second)]), kept)
    return one is not None and two is not None and one == probe.written(of(first), probe.form)


def _ask_developer(probe: Probe) -> None:
    form = probe.form
    conversation = chat(message_of("developer"), message_of("user"))
    native = [
        ("text", replace(form, developer="developer")),
        ("parts", with_parts(replace(form, developer="developer"), "developer")),
    ]
    as_system = [("as system", form)]
    # A template may treat a developer's message like one of an unknown role.
    role = word()
    unknown = chat({**conversation.messages[0], "role": role}, conversation.messages[1])
    written = None if form.system == "user" else probe.written(unknown, native[0][1])
    is_generic = form.system == "user" or (
        written is not None
        and written.replace(role, "developer") == probe.written(conversation, native[0][1])
    )
    probe.choose("developer", as_system + native if is_generic else native + as_system, [conversation])


def _ask_leading(probe: Probe) -> None:
    if probe.form.system == "user":
        probe.note("neighbouring system messages", "merged")
        return
    for roles in _LEADING:
        form = replace(probe.form, apart=probe.form.apart | {roles})
        if "developer" in roles and form.developer == "system":
            continue
        if probe.written(chat(*map(message_of, roles), message_of("user")), form) is not None:
            probe.keep(form)
    first = ("system", probe.form.developer)
    probe.note("neighbouring system messages", "kept" if first in probe.form.apart else "merged")


def _ask_later(probe: Probe) -> None:
    """Find the roles whose later messages are written at their place; some templates move them to the top themselves."""
    roles = () if probe.form.system == "user" else {"system", probe.form.developer}
    for role in sorted(roles):
        form = replace(probe.form, later=probe.form.later | {role})
        inside = [message_of("user"), message_of("assistant"), message_of(role), message_of("user")]
        both = [message_of("system"), *inside]
        # Kept if the prompt has the texts of all messages in their order.
        for messages in (inside, both):
            written = probe.written(chat(*messages), form)
            places = [-1 if written is None else written.find(message["content"]) for message in messages]
            if min(places) < 0 or places != sorted(places):
                break
        else:
            probe.keep(form)
    probe.note("later system messages", "kept" if "system" in probe.form.later else "marked in a user turn")
