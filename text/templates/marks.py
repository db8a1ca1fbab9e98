"""Marks around the texts of a conversation, which show the places of these texts in a template's output.

A mark begins with a random word that no text contains by chance. Marks are placed within the white space at a text's ends,
so that a template that trims a text trims the marked one in the same way.
"""

import html
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from text.chat import Message
from text.templates.forms import as_object

_CLOSED_REASONING = re.compile(r"</[\w:|-]*think\w*>|\[/THINK\]|<\|?/?channel\|>")
# Commands to a template, which it may remove from a text.
_SWITCH = re.compile(r"(?<!\S)/(?:(?:no_?)?think|system_override)(?!\S)")
# A string, and for a key whose value is null what follows it.
_JSON_STRING = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*+:\s*+null\b)?')
_DOCUMENT_TEXTS = ("text", "content", "contents", "document", "body", "passage")


@dataclass(frozen=True)
class MarkedText:
    """A text of the conversation. where: its place in the request. is_required: a prompt without it is rejected.

    is_answer: it is an answer of the model, from which templates may drop reasoning.
    """

    where: str
    text: str
    is_required: bool
    is_answer: bool

    def without_reasoning(self) -> str | None:
        """Return the text after the reasoning in an answer, or None if there is no reasoning."""
        closed = list(_CLOSED_REASONING.finditer(self.text)) if self.is_answer else []
        return self.text[closed[-1].end() :].strip() if closed else None

    def spellings(self) -> list[str]:
        """Return the forms in which templates may write the text."""
        text = self.text
        found = [text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1], repr(text)[1:-1]]
        escaped = html.escape(text)
        found += [escaped, escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")]
        found.append(json.dumps(found[1], ensure_ascii=False)[1:-1])
        if _SWITCH.search(text):
            found.append(_SWITCH.sub("", text))
        if "\\" in text and (literal := _unquoted(text)) is not None:
            found += [literal, json.dumps(literal, ensure_ascii=False)[1:-1], repr(literal)[1:-1]]
        return found


@dataclass
class Written:
    """A template's output for marked texts. plain: the output without marks.

    spans: text's number → (start, end) of each occurrence in ``plain``. ends: text's number → ends without a start.
    """

    plain: str = ""
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)


class Marks:
    """Owns the marked texts of one conversation."""

    def __init__(self) -> None:
        self._word = f"q{secrets.token_hex(6)}"
        self._pattern = re.compile(rf"{self._word}([se])(\d+)x")
        self.texts: list[MarkedText] = []

    def wrap(
        self,
        text: str,
        where: str,
        *,
        is_required: bool = True,
        is_answer: bool = False,
        ends_with_space: bool = False,
    ) -> str:
        """Return ``text`` with marks inside the white space at its ends. ends_with_space: the end mark is after it."""
        bare = text.strip()
        if not bare:
            return text
        start = len(text) - len(text.lstrip())
        end = len(text) if ends_with_space else start + len(bare)
        number = len(self.texts)
        self.texts.append(MarkedText(where, text[start:end], is_required, is_answer))
        return f"{text[:start]}{self._word}s{number}x{text[start:end]}{self._word}e{number}x{text[end:]}"

    def wrap_json(self, text: str, where: str) -> str:
        """Return the text of a JSON object with marks in each of its strings, including keys.

        A key whose value is null is not required: templates leave out an argument that was not given.
        """

        def marked(match: re.Match[str]) -> str:
            return f'"{self.wrap(match[1], where, is_required=match[2] is None)}"{match[2] or ""}'

        return _JSON_STRING.sub(marked, text)

    def read(self, rendered: str) -> Written:
        """Find the marks in a template's output."""
        written = Written()
        pieces = []
        position = begin = 0
        opened: dict[int, int] = {}
        for match in self._pattern.finditer(rendered):
            piece = rendered[begin : match.start()]
            pieces.append(piece)
            begin = match.end()
            position = position + len(piece)
            number = int(match[2])
            if match[1] == "s":
                opened[number] = position
            elif number in opened:
                written.spans.setdefault(number, []).append((opened.pop(number), position))
            else:
                # The template dropped the beginning, as it does with the reasoning of earlier answers.
                written.ends.setdefault(number, []).append(position)
        pieces.append(rendered[begin:])
        written.plain = "".join(pieces)
        return written

    def spans(self, written: Written) -> tuple[tuple[int, int], ...]:
        """Return the spans of the texts, in order; of an answer whose reasoning was dropped, the span of the rest."""
        found = [span for spans in written.spans.values() for span in spans]
        for number, ends in written.ends.items():
            if rest := self.texts[number].without_reasoning():
                found += [(end - len(rest), end) for end in ends if written.plain.endswith(rest, 0, end)]
        return tuple(sorted(found))

    def lost(self, written: Written) -> MarkedText | None:
        """Return the first required text that was not written completely."""
        for number, text in enumerate(self.texts):
            if text.is_required and not self._is_whole(number, text, written):
                return text
        return None

    @staticmethod
    def _is_whole(number: int, text: MarkedText, written: Written) -> bool:
        plain = written.plain
        # Unchanged or escaped, ignoring white space and commands.
        spellings = {"".join(one.split()) for one in text.spellings()}
        pieces = [plain[start:end] for start, end in written.spans.get(number, ())]
        if any(piece == text.text or "".join(piece.split()) in spellings for piece in pieces):
            return True
        rest = text.without_reasoning()
        ends = [*written.ends.get(number, ()), *(end for _, end in written.spans.get(number, ()))]
        return rest is not None and any(plain.endswith(rest, 0, end) for end in ends)


class TypedMarks(Marks):
    """Marks around special tokens in texts only, for templates whose output depends on the ends of a text."""

    def __init__(self, special: re.Pattern[str], *, with_answers: bool) -> None:
        super().__init__()
        self._special = special
        self._with_answers = with_answers

    def wrap(
        self,
        text: str,
        where: str,
        *,
        is_required: bool = True,
        is_answer: bool = False,
        ends_with_space: bool = False,
    ) -> str:
        """Return ``text`` with marks around its special tokens."""
        if is_answer and not self._with_answers:
            return text
        mark = super().wrap
        # A text without the token may be missing: only the places of typed tokens are looked for.
        return self._special.sub(lambda match: mark(match[0], where, is_required=False), text)

    def wrap_json(self, text: str, where: str) -> str:
        """Return the text of a JSON object with marks around its special tokens."""
        return self.wrap(text, where)


def _unquoted(text: str) -> str | None:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return None


def mark_messages(messages: list[Message], marks: Marks, *, is_continued: bool = False) -> list[Message]:
    """Return the messages with marks. is_continued: the last mark includes white space at the end."""
    marked = [_marked(message, f"messages[{index}]", marks) for index, message in enumerate(messages)]
    if is_continued:
        last = len(messages) - 1
        content = _marked_content(messages[last], f"messages[{last}].content", marks, ends_with_space=True)
        marked[last]["content"] = content
    return marked


def mark_documents(documents: list[dict[str, Any]], marks: Marks) -> list[dict[str, Any]]:
    """Return the documents with marks around their direct strings, of which their text is required."""
    return [
        {
            key: marks.wrap(value, f"documents[{index}].{key}", is_required=key in _DOCUMENT_TEXTS)
            if isinstance(value, str)
            else value
            for key, value in document.items()
        }
        for index, document in enumerate(documents)
    ]


def _marked(message: Message, where: str, marks: Marks) -> Message:
    marked = dict(message)
    if message.get("content"):
        marked["content"] = _marked_content(message, f"{where}.content", marks)
    if message.get("reasoning_content"):
        marked["reasoning_content"] = marks.wrap(
            message["reasoning_content"], f"{where}.reasoning_content", is_required=False
        )
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            _marked_call(call, f"{where}.tool_calls[{index}].function", marks)
            for index, call in enumerate(message["tool_calls"])
        ]
    return marked


def _marked_content(message: Message, where: str, marks: Marks, *, ends_with_space: bool = False) -> Any:
    content = message["content"]
    is_answer = message["role"] == "assistant"
    if isinstance(content, str):
        return marks.wrap(content, where, is_answer=is_answer, ends_with_space=ends_with_space)
    last = len(content) - 1
    return [
        {
            **part,
            "text": marks.wrap(
                part["text"],
                f"{where}[{index}]",
                is_answer=is_answer,
                ends_with_space=ends_with_space and index == last,
            ),
        }
        for index, part in enumerate(content)
    ]


def _marked_call(call: dict[str, Any], where: str, marks: Marks) -> dict[str, Any]:
    function = call["function"]
    name = marks.wrap(function["name"], f"{where}.name")
    # Marks outside its strings would make an object invalid; of other text the template gets a string.
    wrap = marks.wrap if as_object(function["arguments"]) is None else marks.wrap_json
    return {
        **call,
        "function": {
            **function,
            "name": name,
            "arguments": wrap(function["arguments"], f"{where}.arguments"),
        },
    }
