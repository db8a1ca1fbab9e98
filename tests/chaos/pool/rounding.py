"""Mixed answers that do not depend on rounding; where a grammar constrains an answer, among the tokens that it allows."""

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams, choice_seed
from engine.grammar.building import load_vocabulary
from engine.grammar.llguidance_matcher import build_matcher
from engine.grammar.machine import Machine
from engine.grammar.matcher import GrammarMatcher
from engine.sampling.logits_processors import SamplingRow
from tests.chaos.pool.answers import MixedAnswer
from tests.chaos.pool.questions import Kind, MixedQuestion
from tests.chaos.steady import Model, agree
from text.parsing.forced import forced_calls_schema
from text.tools import parse_tool_choice, parse_tools


def depends_on_rounding(answer: MixedAnswer, prompt: Sequence[int], models: Sequence[Model]) -> bool:
    """Return whether slightly different models give a choice other tokens.

    Raises AssertionError if all models agree on another token than the service.
    """
    question = answer.question
    for number, choice in enumerate(answer.choices):
        rows = _rows(question, number, prompt, choice.token_ids, models[0].config.vocab_size)
        name = f"question {question.number} ({question.kind})"
        if not agree(models, rows, prompt, choice.token_ids, name=name):
            return True
    return False


def _rows(
    question: MixedQuestion, number: int, prompt: Sequence[int], token_ids: Sequence[int], vocab_size: int
) -> list[SamplingRow]:
    body = question.body
    sampling = SamplingParams(
        temperature=body["temperature"],
        seed=choice_seed(body.get("seed", 0), number),
        max_tokens=body["max_tokens"],
        ignore_eos=True,
    )
    rows = [SamplingRow(sampling, (), len(prompt) + i, i) for i in range(len(token_ids))]
    if grammar := _grammar_of(question):
        for row, bitmask in zip(rows, _bitmasks(grammar, token_ids, vocab_size), strict=True):
            row.bitmask = bitmask
    return rows


def _grammar_of(question: MixedQuestion) -> Grammar | None:
    body = question.body
    if question.kind is Kind.GRAMMAR:
        return Grammar("regex", body["guided_regex"])
    if question.kind is Kind.TOOLS:
        tools = parse_tools(body["tools"])
        schema = forced_calls_schema(tools, parse_tool_choice(body["tool_choice"], tools), parallel=True)
        return Grammar("json_schema", json.dumps(schema))
    return None


def _bitmasks(grammar: Grammar, token_ids: Sequence[int], vocab_size: int) -> list[NDArray[np.int32]]:
    """Return the tokens that the grammar allows at each place of an answer that matches it."""
    machine = Machine(build_matcher(grammar, _vocabulary()), num_bytes=0)
    ends = tuple(_vocabulary().eos_tokens)
    asked = EngineRequest(
        request_id="reference",
        prompt_token_ids=[],
        sampling=SamplingParams(grammar=grammar),
        eos_token_ids=ends,
    )
    matcher = GrammarMatcher(machine, ends, asked, vocab_size)
    bitmasks = []
    for count in range(len(token_ids)):
        matcher.advance(token_ids[max(0, count - 1) : count])
        bitmasks.append(matcher.bitmask)
    return bitmasks


@cache
def _vocabulary() -> LLTokenizer:
    folder = Path(str(resources.files("kvbaton"))) / "demo_model"
    return load_vocabulary(folder, [json.loads((folder / "config.json").read_text())["eos_token_id"]])
