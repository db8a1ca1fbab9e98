"""``kvbaton demo``: shows one hand-over on the demo model (``make demo``).

1. A router, one prefill and one decode worker start on the demo model.
2. One chat is sent over the OpenAI API and one Generate over gRPC; the KV of both is handed over.
3. Both answers are printed with their latency breakdown; the service runs until Ctrl-C.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cli.ask import TIMING_NAMES, Answer, ask_grpc, ask_http, served_model
from cli.endpoint import local_endpoint
from cli.terminal import printable
from contract.addresses import local_address, split_address
from launch.arguments import parse
from launch.kept_process import Facts, ProcessSpec, ProcessState
from launch.local_cluster import run_local
from launch.machine_settings import DemoSettings
from launch.processes import ROUTER
from launch.settings import DEMO
from protos import inference_pb2 as pb
from serving.logs import configure_logs

QUESTION = """lamp: fox
bread: violin
The old moose sat near the lake.
comet: ginger
acorn: lantern
What is "comet"?"""
GREETING = "<|bos|><|user|>\nWho are you?<|end|>\n<|assistant|>\n"
_PLAIN = "Who are you?"
_MAX_TOKENS = 32
_READY = """
kvbaton is ready. Try:
  curl {url}/v1/chat/completions{options} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
Ctrl-C stops everything."""


def demo(arguments: Sequence[str]) -> None:
    """Run ``kvbaton demo``."""
    settings = parse(DemoSettings, "kvbaton demo", arguments)
    configure_logs("demo", settings.log_level)
    console = Console(highlight=False, soft_wrap=True)
    # Addresses that the user gave are not checked: the service refuses them itself.
    defaults = [name for name in ("http", "grpc") if name not in settings.model_fields_set]
    busy = [name for name in defaults if _is_busy(getattr(settings, name))]
    for name in busy:
        console.print(
            f"kvbaton: {getattr(settings, name)} is in use by another program; {name} uses a free port"
        )
    Demo(settings.model_copy(update=dict.fromkeys(busy, "127.0.0.1:0")), console).run()


class Demo:
    """One run of the demo. Owns the console and its spinner."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._status = console.status("starting")

    def run(self) -> None:
        """Start the service, show the answers, serve until a signal; stop every process before returning."""
        self._console.print("kvbaton: starting a router, its workers and the model on this machine")
        with self._status:
            run_local(self._settings, self._show, self._progress)
        self._console.print("kvbaton: stopped")

    def _progress(self, spec: ProcessSpec, state: ProcessState, facts: Facts) -> None:
        match state:
            case ProcessState.STARTED:
                doing = "starting" if spec.name == "router" else "loading the model"
                self._console.print(f"  {spec.name:<10} {doing} (pid {facts['pid']})")
                self._status.update(f"{spec.name}: {doing}")
            case ProcessState.READY:
                self._console.print(
                    f"  {spec.name:<10} ready, debug page at http://{local_address(facts['admin'])}/debug/state"
                )
            case ProcessState.ENDED:
                self._console.print(f"  {spec.name:<10} ended")

    async def _show(self, facts: dict[str, Facts], stopped: asyncio.Event) -> None:
        endpoint = local_endpoint(self._settings, facts[ROUTER])
        grpc_address = local_address(facts[ROUTER]["grpc"])
        url = endpoint.url
        self._console.print(f"\nOpenAI API  {url}/v1\ngRPC        {grpc_address}  (kvbaton.v1.Inference)")
        self._status.update("waiting for the answers")
        model = await served_model(endpoint)
        question, greeting = (QUESTION, GREETING) if self._settings.model == DEMO else (_PLAIN, _PLAIN)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "timings": True,
        }
        by_http = await ask_http(endpoint, "chat/completions", body)
        sampling = pb.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0)
        order = pb.GenerateRequest(text=greeting, sampling=sampling)
        by_grpc = await ask_grpc(endpoint, grpc_address, order)
        self._status.stop()
        self._print("OpenAI HTTP", question, by_http)
        self._print("gRPC Generate", greeting, by_grpc)
        self._console.print(latency_table({"OpenAI HTTP": by_http, "gRPC Generate": by_grpc}))
        options = (" -k" if endpoint.tls else "") + (
            " -H 'Authorization: Bearer KEY'" if endpoint.api_key else ""
        )
        self._console.print(_READY.format(url=url, model=model, options=options), markup=False)
        await stopped.wait()

    def _print(self, way: str, question: str, answer: Answer) -> None:
        self._console.print(f"\n{way} question:", style="bold")
        self._console.print(question.strip(), markup=False)
        self._console.print("answer:", style="bold")
        self._console.print(printable(answer.text.strip(), sys.stdout), markup=False)


def latency_table(answers: dict[str, Answer]) -> Table:
    """Make a table of the latency breakdown in milliseconds, one row per answer; the parts add up to the last column."""
    table = Table(title="\nLatency in ms", title_justify="left")
    table.add_column("")
    for name in TIMING_NAMES:
        table.add_column(name.replace("_", " "), justify="right")
    for way, answer in answers.items():
        table.add_row(way, *(f"{answer.timings[name] * 1000:.1f}" for name in TIMING_NAMES))
    return table


def _is_busy(address: str) -> bool:
    host, port = split_address(address)
    with socket.socket() as probe:
        # As servers do: connections of a service that has ended would count as its port being in use for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
