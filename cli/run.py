"""``kvbaton run PROMPT``: prints one answer."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from cli.ask import Answer, ask_http, served_model
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from cli.terminal import printable
from launch.arguments import parse
from launch.client_settings import RunSettings
from launch.kept_process import Facts
from launch.local_cluster import run_local
from launch.processes import ROUTER
from serving import signals
from serving.logs import configure_logs
from serving.settings import first_listed


def run(arguments: Sequence[str]) -> None:
    """Run ``kvbaton run``."""
    settings = parse(RunSettings, "kvbaton run", arguments)
    settings.refuse_contradictions()
    configure_logs("run", settings.log_level)
    if settings.url is not None:
        _show(signals.run(_ask(settings, endpoint_at(settings.url, settings))))
        return

    async def ask(facts: dict[str, Facts], _: asyncio.Event) -> None:
        _show(await _ask(settings, local_endpoint(settings, facts[ROUTER])))

    run_local(settings, ask)


def _show(answer: Answer) -> None:
    print(printable(answer.text, sys.stdout), flush=True)


async def _ask(settings: RunSettings, endpoint: Endpoint) -> Answer:
    model = first_listed(settings.served_model_name) or await served_model(endpoint)
    body: dict[str, Any] = {"model": model, "temperature": settings.temperature}
    if settings.max_tokens is not None:
        body["max_tokens"] = settings.max_tokens
    if settings.seed is not None:
        body["seed"] = settings.seed
    if settings.raw:
        return await ask_http(endpoint, "completions", {**body, "prompt": settings.prompt})
    messages = [{"role": "user", "content": settings.prompt}]
    return await ask_http(endpoint, "chat/completions", {**body, "messages": messages})
