"""Calls and reasoning as each family of models writes them, by the published templates."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""


def bare(value: Any) -> str:
    """A value between tags: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call]) -> str:
    """A JSON list of calls."""
    return json.dumps(
        [{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False
    )


def tagged(parameter: str, call: str, section: str = "{}") -> Callable[[Sequence[Call]], str]:
    """The format with these templates of a parameter, a call and a section."""

    def render(calls: Sequence[Call]) -> str:
        parts = []
        for name, arguments in calls:
            lines = "".join(
                parameter.format(key=key, value=bare(value), flag=str(isinstance(value, str)).lower())
                for key, value in arguments.items()
            )
            parts.append(call.format(name=name, parameters=lines))
        return section.format("".join(parts))

    return render


def sequence(call: str, section: str = "{}", first: int = 0) -> Callable[[Sequence[Call]], str]:
    """The format with these templates of a call with a JSON object, and of a section."""

    def render(calls: Sequence[Call]) -> str:
        parts = [
            call.replace("NAME", name)
            .replace("INDEX", str(first + index))
            .replace("OBJECT", json.dumps(arguments, ensure_ascii=False))
            for index, (name, arguments) in enumerate(calls)
        ]
        return section.format("".join(parts))

    return render


def literal(value: Any) -> str:
    """A value as a Python literal."""
    return repr(value)


def pythonic(section: str, between: str) -> Callable[[Sequence[Call]], str]:
    """The format with this template of a section, and calls of Python in it."""

    def render(calls: Sequence[Call]) -> str:
        parts = [
            f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return section.format(between.join(parts))

    return render


def gemma_value(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma_value(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma_value, value)) + "]"
        case _:
            return json.dumps(value)


def gemma(calls: Sequence[Call]) -> str:
    """Calls as Gemma 4 writes them."""
    return "".join(
        f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    )


CALLS: dict[str, dict[str, Callable[[Sequence[Call]], str]]] = {
    "deepseek": {
        "V3.1": sequence(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>OBJECT<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        ),
        "V3": sequence(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nOBJECT\n```<｜tool▁call▁end｜>\n",
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        ),
    },
    "dsml": {
        name: tagged(
            '<｜DSML｜parameter name="{key}" string="{flag}">{value}</｜DSML｜parameter>\n',
            '<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n',
            f"<｜DSML｜{section}>\n{{}}</｜DSML｜{section}>",
        )
        for name, section in (("V3.2", "function_calls"), ("V4", "tool_calls"))
    },
    "ernie": {"": sequence('\n<tool_call>\n{"name": "NAME", "arguments": OBJECT}\n</tool_call>\n')},
    "gemma": {"": gemma},
    "glm": {
        "4.5": tagged(
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            "\n<tool_call>{name}\n{parameters}</tool_call>",
        ),
        "4.7": tagged(
            "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
            "<tool_call>{name}{parameters}</tool_call>",
        ),
    },
    "granite": {
        "3.0": lambda calls: f"<|tool_call|>{objects(calls)}",
        "3.1": lambda calls: f"<tool_call>{objects(calls)}",
    },
    "harmony": {
        "": sequence(
            "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>OBJECT<|call|>"
        ),
        "recipient first": sequence(
            "<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>OBJECT<|call|>"
        ),
    },
    "hunyuan": {"": lambda calls: f"<tool_calls>{objects(calls)}</tool_calls>"},
    **{
        name: {
            "": tagged(
                f"<arg_key{suffix}>{{key}}</arg_key{suffix}>\n<arg_value{suffix}>{{value}}</arg_value{suffix}>\n",
                f"<tool_call{suffix}>{{name}}<tool_sep{suffix}>\n{{parameters}}</tool_call{suffix}>\n",
                f"<tool_calls{suffix}>\n{{}}</tool_calls{suffix}>",
            )
        }
        for name, suffix in (("hy3", ":opensource"), ("hy3preview", ""))
    },
    "kimi": {
        "": sequence(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>OBJECT<|tool_call_end|>",
            "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
            first=3,
        )
    },
    "minimax": {
        "": tagged(
            '<parameter name="{key}">{value}</parameter>\n',
            '<invoke name="{name}">\n{parameters}</invoke>\n',
            "\n<minimax:tool_call>\n{}</minimax:tool_call>",
        )
    },
    "nemotron": {"": lambda calls: f"<TOOLCALL>{objects(calls)}</TOOLCALL>"},
    "phi4": {
        "": lambda calls: f"<|tool_call|>{objects(calls)}<|/tool_call|>",
        "in vLLM's examples": lambda calls: f"functools{objects(calls)}",
    },
    "pythonic": {
        "LFM2": pythonic("<|tool_call_start|>[{}]<|tool_call_end|>", ", "),
        "LFM2 in JSON": lambda calls: f"<|tool_call_start|>{objects(calls)}<|tool_call_end|>",
        "OLMo 3": pythonic("<function_calls>\n{}\n</function_calls>", "\n"),
        "Llama 4": pythonic("<|python_start|>[{}]<|python_end|>", ", "),
    },
    "qwen": {
        "": tagged(
            "<parameter={key}>\n{value}\n</parameter>\n",
            "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n",
        )
    },
    "seed_oss": {
        "": tagged(
            "<parameter={key}>{value}</parameter>\n",
            "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>\n",
        )
    },
}
"""Parser → variant → calls as the model writes them."""
FORMATS = [(parser, variant) for parser, variants in CALLS.items() for variant in variants]


def written(parser: str, variant: str, calls: Sequence[Call], before: str = "", behind: str = "") -> str:
    """Return an answer with text before and behind the calls."""
    found = CALLS[parser][variant](calls)
    if parser != "harmony":
        return f"{before}{found}{behind}"
    # The prompt ends with the header of the first message.
    head = f"<|start|>assistant<|channel|>commentary<|message|>{before}<|end|>" if before else ""
    tail = f"<|start|>assistant<|channel|>final<|message|>{behind}<|return|>" if behind else ""
    return f"{head}{found}{tail}".removeprefix("<|start|>assistant")
