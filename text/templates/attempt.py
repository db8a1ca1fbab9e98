"""Renders one conversation in one message form, and proves that it is complete.

The conversation is rendered twice, without and with marks around its texts. Every mark must be present, with its text, and
the marked prompt without its marks must be equal to the prompt. If a template's output depends on the content of texts, each
text is searched in the prompt instead.

"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from contract.errors import InvalidRequestError
from text.chat import Chat, Message
from text.templates.forms import Form, shape, shape_tools
from text.templates.marking import mark_documents, mark_messages
from text.templates.marks import MarkedText, Marks, TypedMarks, Written
from text.templates.sandbox import TemplateLimitError
from text.templates.search import Search
from text.templates.systems import add_to_system

_SHORT = 16
"""Length below which a text may occur in the markup as well."""
Render = Callable[[Mapping[str, Any]], str]
"""Renders one template. Raises InvalidRequestError with the template's own message."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. texts: (start, end) in ``text`` of the client's texts; None if unknown."""

    text: str
    texts: tuple[tuple[int, int], ...] | None


def attempt(render: Render, chat: Chat, form: Form, special: re.Pattern[str] | None = None) -> Prompt:
    """Return the prompt of a conversation in this form. special: matches the model's special tokens.

    Raises InvalidRequestError if the template rejects the form; the error names a text that the prompt would not contain.
    """
    text = render(_variables(chat, form, chat.messages, list(chat.documents)))
    _check_tools(chat, text)
    marks = Marks()
    marked = mark_messages(chat.messages, marks)
    written = _written(
        render, marks, _variables(chat, form, marked, mark_documents(list(chat.documents), marks))
    )
    if written is not None and (lost := marks.lost(written)) is not None:
        raise _lost(lost)
    if written is None or written.plain != text:
        _check_all_within(marks.texts, text, None if written is None else written.plain)
        return Prompt(text, _typed(render, chat, form, text, special))
    return Prompt(text, marks.spans(written))


def _typed(
    render: Render, chat: Chat, form: Form, text: str, special: re.Pattern[str] | None
) -> tuple[tuple[int, int], ...] | None:
    """Return the client's special tokens in the prompt, for a template whose output depends on the beginning of texts.

    If it also depends on special tokens in answers, only those of other messages. None if it depends on these too.
    """
    if special is None:
        return None
    for with_answers in (True, False):
        marks = TypedMarks(special, with_answers=with_answers)
        marked = mark_messages(chat.messages, marks)
        documents = mark_documents(list(chat.documents), marks)
        written = _written(render, marks, _variables(chat, form, marked, documents)) if marks.texts else None
        if written is not None and written.plain == text:
            return marks.spans(written)
    return None


def attempt_continued(
    render: Render, chat: Chat, form: Form, special: re.Pattern[str] | None = None
) -> Prompt:
    """Return the prompt up to the end of the last message's content.

    Raises InvalidRequestError as ``attempt`` does, and if the template changes that content.
    """
    _check_continued(chat.messages)
    prompt = attempt(render, chat, form, special)
    for keeps_space in (True, False):
        marks = Marks()
        marked = mark_messages(chat.messages, marks, is_continued=keeps_space)
        written = _written(render, marks, _variables(chat, form, marked, list(chat.documents)))
        if written is None or written.plain != prompt.text:
            continue
        last = len(marks.texts) - 1 if keeps_space else _last_content(marks, len(chat.messages) - 1)
        spans = written.spans.get(last)
        if not spans:
            break
        end = max(end for _, end in spans)
        texts = None if prompt.texts is None else tuple(span for span in prompt.texts if span[1] <= end)
        return Prompt(prompt.text[:end], texts)
    raise InvalidRequestError(
        "continue_final_message needs a last message whose content the model's chat template does not change",
        param="continue_final_message",
    )


def _check_continued(messages: list[Message]) -> None:
    content = messages[-1].get("content")
    text = content[-1]["text"] if isinstance(content, list) else content
    if not (text or "").strip() or messages[-1].get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message needs a last message with content, and without tool_calls",
            param="continue_final_message",
        )


def _last_content(marks: Marks, index: int) -> int:
    where = f"messages[{index}].content"
    return max(number for number, text in enumerate(marks.texts) if text.where.startswith(where))


def _variables(
    chat: Chat, form: Form, messages: list[Message], documents: list[dict[str, Any]]
) -> dict[str, Any]:
    tools = list(chat.tools)
    if tools and form.tools == "system":
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        messages = add_to_system(messages, "\n".join(["Available tools:", *lines]))
    return {
        **chat.template_kwargs,
        "messages": shape(messages, form),
        "tools": shape_tools(tools, form),
        "documents": documents or None,
        "add_generation_prompt": chat.add_generation_prompt,
    }


def _written(render: Render, marks: Marks, variables: Mapping[str, Any]) -> Written | None:
    try:
        return marks.read(render(variables))
    except TemplateLimitError:
        raise
    except InvalidRequestError:
        return None


def _check_tools(chat: Chat, text: str) -> None:
    search = Search(text)
    for index, tool in enumerate(chat.tools):
        if not search.has([tool["function"]["name"]]):
            raise InvalidRequestError(
                f"the model's chat template does not show tools[{index}]: it does not support tools",
                param=f"tools[{index}]",
            )


def _check_all_within(texts: list[MarkedText], prompt: str, plain: str | None) -> None:
    """Raise InvalidRequestError for a text that is not in the prompt. plain: the prompt of marked texts.

    A text that occurs several times, or is so short that the markup may contain it, must occur as often as in ``plain``,
    not counting occurrences within a word.
    """
    search = Search(prompt)
    required = [_without_reasoning(text) for text in texts if text.is_required]
    for text in required:
        if not search.has([text.text, *text.spellings()]):
            raise _lost(text)
    last = {text.text: text for text in required}
    for content, num_sent in Counter(text.text for text in required).items():
        if num_sent > 1 or len(content) < _SHORT:
            _check_number(search, last[content], num_sent, plain)


def _check_number(search: Search, text: MarkedText, num_sent: int, plain: str | None) -> None:
    for spelling in (text.text, *text.spellings()):
        num_wanted = num_sent if plain is None else search.count(spelling, plain)
        if num_wanted < num_sent:
            continue
        if search.count(spelling) >= num_wanted:
            return
        num_words = num_sent if plain is None else search.count_words(spelling, plain)
        if search.count_words(spelling) < max(num_words, num_sent):
            raise _lost(text)
        return


def _without_reasoning(text: MarkedText) -> MarkedText:
    rest = text.without_reasoning()
    return text if rest is None else replace(text, text=rest)


def _lost(text: MarkedText) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's chat template does not show {text.where}, or not all of it, so the model would answer another "
        "conversation; remove it, or send it in another role",
        param=text.where,
    )
