"""The probe's questions about messages: roles, content parts, system and developer messages."""

from dataclasses import replace

from text.chat import Chat, Message
from text.templates.forms import Form
from text.templates.probe import Probe, chat, message_of, part, with_parts, word

_LEADING = (
    ("system", "system"),
    ("system", "developer"),
    ("developer", "system"),
    ("developer", "developer"),
)


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
    is_generic = form.system == "user" or _is_generic(probe, conversation, native[0][1])
    probe.choose("developer", as_system + native if is_generic else native + as_system, [conversation])


def _is_generic(probe: Probe, conversation: Chat, form: Form) -> bool:
    """Return whether the template treats a developer's message like one of an unknown role."""
    role = word()
    unknown = chat({**conversation.messages[0], "role": role}, conversation.messages[1])
    written = probe.written(unknown, form)
    return written is not None and written.replace(role, "developer") == probe.written(conversation, form)


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
        if all(_is_in_order(probe.written(chat(*messages), form), messages) for messages in (inside, both)):
            probe.keep(form)
    probe.note("later system messages", "kept" if "system" in probe.form.later else "marked in a user turn")


def _is_in_order(written: str | None, messages: list[Message]) -> bool:
    """Return whether the prompt has the texts of all messages in their order."""
    places = [-1 if written is None else written.find(message["content"]) for message in messages]
    return min(places) >= 0 and places == sorted(places)
