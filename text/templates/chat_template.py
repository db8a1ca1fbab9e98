"""A model's chat template: probed once, then each conversation in the form in which it is proven whole."""

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
from text.templates.probe import REFUSED, Findings, Probe
from text.templates.questions_messages import ask_about_messages
from text.templates.questions_tools import ask_about_documents, ask_about_tools, described_tool, document
from text.templates.report import TemplateReport
from text.templates.sandbox import (
    DEFAULT,
    LocalRenderer,
    Renderer,
    TemplateLimitError,
    TemplateRefusalError,
    refusal,
)
from text.templates.turns import has_neighbours

TOOL_USE = "tool_use"
RAG = "rag"
"""Names of templates for conversations with tools, and with documents, as ``transformers`` saves them."""
_PROBE_SECONDS = 60
"""For all renderings of one template before it serves."""


class ChatTemplate:
    """One model's chat templates, probed when it is made. Owns its renderer.

    Raises SettingError if a template cannot be compiled, or takes too much of anything.
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
        special: matches special tokens of the model, which stay text where a client typed them.
        make_renderer: sources by name → what renders them; by default in this process, without bounds. clock: tells how
        long probing takes.
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
                name: self._probed(name) for name in self._sources if name in (DEFAULT, TOOL_USE, RAG)
            }
        except TemplateLimitError as error:
            self._renderer.close()
            raise SettingError(f"the chat template cannot be used: {error.message}", param="model") from error
        self.report = TemplateReport({name: found.abilities for name, found in self._findings.items()})

    @property
    def source(self) -> str:
        """The text of all templates that are used."""
        return "\n".join(self._sources[name] for name in self._findings)

    def form(self, name: str = DEFAULT) -> Form:
        """Return the form that a template was found to show."""
        return self._findings[name].form

    def render(self, chat: Chat) -> str:
        """Return the prompt's text; see ``prompt``."""
        return self.prompt(chat).text

    def prompt(self, chat: Chat) -> Prompt:
        """Return the prompt, in which every text of the conversation is written.

        Raises InvalidRequestError with the template's own words if it refuses the messages, and naming the message if no
        form shows it whole.
        """
        name = self._name_for(chat)
        render = self._render(name)
        make = attempt_continued if chat.continue_final_message else attempt
        first: InvalidRequestError | None = None
        last: InvalidRequestError | None = None
        for form in _forms_for(chat, self._findings[name].form):
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
        """Give back what rendering holds; the template is not used afterwards."""
        self._renderer.close()

    def _name_for(self, chat: Chat) -> str:
        if chat.tools and TOOL_USE in self._findings:
            return TOOL_USE
        if chat.documents and RAG in self._findings:
            return RAG
        return DEFAULT

    def _render(self, name: str) -> Render:
        return lambda variables: _unicode(self._renderer.render(name, {**variables, **self._tokens}))

    def _probed(self, name: str) -> Findings:
        """Probe a template with what it needs: some show no message without tools, or without documents."""
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
        return probe.findings


def _until(clock: Callable[[], float], deadline: float, render: Render) -> Render:
    """Return what renders until a time, and raises TemplateLimitError then."""

    def render_in_time(variables: Mapping[str, Any]) -> str:
        if clock() > deadline:
            raise TemplateLimitError(
                f"it takes more than {_PROBE_SECONDS} s to try it in every form", param="model"
            )
        return render(variables)

    return render_in_time


def _attempted(render: Render, chat_with: Callable[[Chat], Chat], chat: Chat, form: Form) -> str:
    return attempt(render, chat_with(chat), form).text


def _settings_of(name: str) -> Iterator[tuple[Callable[[Chat], Chat], Form]]:
    """Yield what to try a template with: what its conversations always have, and the form to begin with."""

    def with_tools(chat: Chat) -> Chat:
        return replace(chat, tools=chat.tools or tools)

    def with_documents(chat: Chat) -> Chat:
        return replace(chat, documents=chat.documents or documents)

    tools = (described_tool(),)
    documents = (document(),)
    if name == DEFAULT:
        yield lambda chat: chat, Form()
    if name != RAG:
        yield with_tools, Form()
        yield with_tools, Form(tools="function")
    if name != TOOL_USE:
        yield with_documents, Form()


def _forms_for(chat: Chat, form: Form) -> Iterator[Form]:
    """Yield the forms to try for a conversation, each also with neighbouring messages of one role merged.

    A merged form is for a template that refuses the form before it.
    """
    for plainer in _plainer_forms(chat, form):
        yield plainer
        if has_neighbours(shape(chat.messages, plainer)):
            yield replace(plainer, merges=True)


def _plainer_forms(chat: Chat, form: Form) -> Iterator[Form]:
    """Yield the forms to try for a conversation: the template's own, then those that any template may show."""
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
    """Return the text. Raises InvalidRequestError if it holds half of a surrogate pair: no tokenizer takes that."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refusal("it writes half of a surrogate pair") from error
    return text
