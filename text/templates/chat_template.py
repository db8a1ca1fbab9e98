"""A model's chat template, which is probed once; each conversation is rendered in a form that is proven complete."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from contract.errors import InvalidRequestError, SettingError
from text.chat import Chat
from text.templates.attempt import Prompt, Render, attempt, attempt_continued
from text.templates.forms import Form, shape
from text.templates.probe import REFUSED, Findings, Probe, TemplateReport, ask_about_messages
from text.templates.questions_tools import (
    ask_about_documents,
    ask_about_tools,
    ask_about_turns,
    document,
    make_full_tool,
)
from text.templates.sandbox import (
    DEFAULT,
    LocalRenderer,
    Renderer,
    TemplateLimitError,
    TemplateRefusalError,
    refusal,
)
from text.templates.turns import merge_neighbours

TOOL_USE = "tool_use"
RAG = "rag"
"""``transformers``' names of templates for conversations with tools, and with documents."""
_PROBE_SECONDS = 60
"""Time limit of all renderings while a template is probed."""


class ChatTemplate:
    """One model's chat templates, probed by the constructor. Owns its renderer.

    Raises SettingError if a template cannot be compiled, or exceeds a limit.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        tool_source: str | None = None,
        named: Mapping[str, str] | None = None,
        tokens: Mapping[str, str] | None = None,
        special: re.Pattern[str] | None = None,
        make_renderer: Callable[[Mapping[str, str]], Renderer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compile and probe the templates.

        tool_source: the template for conversations with tools. named: others by name. tokens: more special tokens.
        special: matches special tokens of the model, which stay text if a client typed them. make_renderer: makes a renderer
        of sources by name; by default one in this process, without limits. clock: measures the time of probing.
        """
        self._sources = {**(named or {}), DEFAULT: source}
        if tool_source is not None:
            self._sources[TOOL_USE] = tool_source
        self._special = special
        self._clock = clock
        self._tokens = {**(tokens or {}), "bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._renderer = (make_renderer or LocalRenderer)(self._sources)
        try:
            self._findings = {
                name: self._probe(name) for name in self._sources if name in (DEFAULT, TOOL_USE, RAG)
            }
        except TemplateLimitError as error:
            self._renderer.close()
            raise SettingError(f"the chat template cannot be used: {error.message}", param="model") from error
        self.report = TemplateReport({name: found.abilities for name, found in self._findings.items()})

    @property
    def source(self) -> str:
        """The source text of all templates that are used."""
        return "\n".join(self._sources[name] for name in self._findings)

    def form(self, name: str = DEFAULT) -> Form:
        """Return the form that was found for a template."""
        return self._findings[name].form

    def render(self, chat: Chat) -> str:
        """Return the prompt's text; see ``prompt``."""
        return self.prompt(chat).text

    def prompt(self, chat: Chat) -> Prompt:
        """Return the prompt, which contains every text of the conversation.

        Raises InvalidRequestError with the template's own message if it rejects the conversation, and with the name of a
        message that no form shows completely.
        """
        name = DEFAULT
        if chat.tools and TOOL_USE in self._findings:
            name = TOOL_USE
        elif chat.documents and RAG in self._findings:
            name = RAG
        render = self._render(name)
        make = attempt_continued if chat.continue_final_message else attempt
        first: InvalidRequestError | None = None
        last: InvalidRequestError | None = None
        for form in _forms_for(chat, self._findings[name].form):
            # Merging cannot help with a template that loses a text.
            if form.merges and not isinstance(last, TemplateRefusalError):
                continue
            try:
                return make(render, chat, form, self._special)
            except TemplateLimitError:
                raise
            except InvalidRequestError as error:
                first = first or error
                last = error
        assert first is not None
        raise first

    def close(self) -> None:
        """Close the renderer; the template must not be used afterwards."""
        self._renderer.close()

    def _render(self, name: str) -> Render:
        return lambda variables: _unicode(self._renderer.render(name, {**variables, **self._tokens}))

    def _probe(self, name: str) -> Findings:
        """Probe a template with the inputs that it needs: some show no message without tools, or without documents."""
        render = _until(self._clock, self._clock() + _PROBE_SECONDS, self._render(name))
        first: Probe | None = None
        for chat_with, form in _settings_of(name):
            probe = Probe(partial(_attempted, render, chat_with), form)
            ask_about_messages(probe)
            first = first or probe
            if probe.findings.abilities["user"] != REFUSED:
                break
        else:
            assert first is not None
            probe = first
        if name != RAG:
            ask_about_tools(probe)
        if name != TOOL_USE:
            ask_about_documents(probe)
        ask_about_turns(probe)
        return probe.findings


def _until(clock: Callable[[], float], deadline: float, render: Render) -> Render:
    """Wrap a renderer to raise TemplateLimitError after a deadline."""

    def render_in_time(variables: Mapping[str, Any]) -> str:
        if clock() > deadline:
            raise TemplateLimitError(f"probing it takes more than {_PROBE_SECONDS} s", param="model")
        return render(variables)

    return render_in_time


def _attempted(render: Render, chat_with: Callable[[Chat], Chat], chat: Chat, form: Form) -> str:
    return attempt(render, chat_with(chat), form).text


def _settings_of(name: str) -> Iterator[tuple[Callable[[Chat], Chat], Form]]:
    """Yield the settings of a probe: a function that adds inputs to every conversation, and the initial form."""

    def with_tools(chat: Chat) -> Chat:
        return replace(chat, tools=chat.tools or tools)

    def with_documents(chat: Chat) -> Chat:
        return replace(chat, documents=chat.documents or documents)

    tools = (make_full_tool(),)
    documents = (document(),)
    if name == DEFAULT:
        yield lambda chat: chat, Form()
    if name != RAG:
        yield with_tools, Form()
        yield with_tools, Form(tools="function")
    if name != TOOL_USE:
        yield with_documents, Form()


def _forms_for(chat: Chat, form: Form) -> Iterator[Form]:
    """Yield the forms to try for a conversation, each also with adjacent messages of one role merged.

    A merged form is for a template that rejects the form before it.
    """
    for plainer in _plainer_forms(chat, form):
        yield plainer
        shaped = shape(chat.messages, plainer)
        if len(merge_neighbours(shaped)) < len(shaped):
            yield replace(plainer, merges=True)


def _plainer_forms(chat: Chat, form: Form) -> Iterator[Form]:
    """Yield the forms to try for a conversation: the template's own, then simpler ones."""
    yield form
    messages = chat.messages
    plainer = form
    if any(tool["function"].get(key) is None for tool in chat.tools for key in ("description", "parameters")):
        plainer = replace(plainer, fills=frozenset({"description", "parameters"}))
        yield plainer
    if any("reasoning_content" in message for message in messages):
        plainer = replace(plainer, reasoning=None)
        yield plainer
    if sum(message["role"] in ("system", "developer") for message in messages) > 1:
        plainer = replace(plainer, apart=frozenset(), later=frozenset())
        yield plainer
    if any(len(message.get("tool_calls") or ()) > 1 for message in messages):
        plainer = replace(plainer, one_call=True)
        yield plainer
    if any(message.get("tool_calls") for message in messages):
        plainer = replace(plainer, splits_calls=True)
        yield plainer
        plainer = replace(plainer, calls="text")
        yield plainer
    if any(message["role"] == "tool" for message in messages):
        plainer = replace(plainer, results="user")
        yield plainer
    if chat.tools:
        yield replace(plainer, tools="system")


def _unicode(text: str) -> str:
    """Return the text. Raises InvalidRequestError for half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refusal("its output contains half of a surrogate pair") from error
    return text
