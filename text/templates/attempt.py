"""Renders one conversation in one message form, and proves that it is complete.

The conversation is rendered twice, without and with marks around its texts. Every mark must be present, with its text, and
the marked prompt without its marks must be equal to the prompt. If a template's output depends on the content of texts, each
text is searched in the prompt instead, with a limit of the total cost.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contract.errors import InvalidRequestError
from text.chat import Chat, Message
from text.templates.forms import Form, shape, shape_tools
from text.templates.marks import MarkedText, Marks, TypedMarks, Written, mark_documents, mark_messages
from text.templates.sandbox import TemplateLimitError
from text.templates.turns import add_to_system

# A shorter text may occur in the markup as well.
_SHORT = 16
Render = Callable[[Mapping[str, Any]], str]
"""Renders one template. Raises InvalidRequestError with the template's own message."""
# Limits of all searches in one prompt: without them, thousands of short texts would each search a prompt of megabytes.
_FREE_CHARACTERS = 2**30
# A search for words takes so many times as long as one for a text.
_EXPENSIVE = 8
_PASSES = 16


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
        # A template mostly writes all texts in one way: the last spelling is tried first, behind the last text.
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
    search = Search(text)
    for index, tool in enumerate(chat.tools):
        if not search.has([tool["function"]["name"]]):
            raise InvalidRequestError(
                f"the model's chat template does not show tools[{index}]: it does not support tools",
                param=f"tools[{index}]",
            )
    marks = Marks()
    marked = mark_messages(chat.messages, marks)
    written = _written(
        render, marks, _variables(chat, form, marked, mark_documents(list(chat.documents), marks))
    )
    if written is not None and (lost := marks.lost(written)) is not None:
        raise _lost(lost)
    # The template looks at the content of a text, which the marks changed.
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
    # Templates look for reasoning in answers, so marks there change the output of more of them.
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
    content = chat.messages[-1].get("content")
    last = content[-1]["text"] if isinstance(content, list) else content
    if not (last or "").strip() or chat.messages[-1].get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message needs a last message with content, and without tool_calls",
            param="continue_final_message",
        )
    where = f"messages[{len(chat.messages) - 1}].content"
    prompt = attempt(render, chat, form, special)
    # The answer continues the white space at the end too, unless the template trims it.
    for keeps_space in (True, False):
        marks = Marks()
        marked = mark_messages(chat.messages, marks, is_continued=keeps_space)
        written = _written(render, marks, _variables(chat, form, marked, list(chat.documents)))
        if written is None or written.plain != prompt.text:
            continue
        # With ``keeps_space`` that content was marked once more, and last.
        spans = written.spans.get(
            max(number for number, text in enumerate(marks.texts) if text.where.startswith(where))
        )
        if not spans:
            break
        end = max(end for _, end in spans)
        texts = None if prompt.texts is None else tuple(span for span in prompt.texts if span[1] <= end)
        return Prompt(prompt.text[:end], texts)
    raise InvalidRequestError(
        "continue_final_message needs a last message whose content the model's chat template does not change",
        param="continue_final_message",
    )


def _variables(
    chat: Chat, form: Form, messages: list[Message], documents: list[dict[str, Any]]
) -> dict[str, Any]:
    tools = list(chat.tools)
    if tools and form.tools == "system":
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        messages = add_to_system(messages, "\n".join(["Available tools:", *lines]))
    elif tools and form.tools == "key":
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        messages = add_to_system(messages, tools=functions)
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
        raise  # a conversation that takes too long must not be rendered again and again
    except InvalidRequestError:
        return None


def _check_all_within(texts: list[MarkedText], prompt: str, plain: str | None) -> None:
    """Raise InvalidRequestError for a text that is not in the prompt. plain: the prompt of marked texts.

    A text that occurs several times, or is so short that the markup may contain it, must occur as often as in ``plain``,
    not counting occurrences within a word.
    """
    search = Search(prompt)
    required = [
        text if (rest := text.without_reasoning()) is None else replace(text, text=rest)
        for text in texts
        if text.is_required
    ]
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


def _lost(text: MarkedText) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's chat template does not show {text.where}, or not all of it, so the model would answer another "
        "conversation; remove it, or send it in another role",
        param=text.where,
    )
