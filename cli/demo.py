"""``kvbaton demo``: what ``make demo`` shows.

1. A router, one prefill and one decode worker start on the demo model.
2. One chat goes through the OpenAI API and one Generate through gRPC; both cross the relay.
3. Both answers are printed with their latency split; the service runs on until Ctrl-C.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cli.arguments import parse
from cli.ask import TIMING_NAMES, Answer, ask_grpc, ask_http, served_model
from cli.local import run_local
from cli.settings import DEMO, DemoSettings
from protos import inference_pb2 as pb
from serving.logs import configure_logs
from serving.settings import split_address
from worker.launch import Facts, ProcessSpec
from worker.supervisor import ProcessState

logger = logging.getLogger(__name__)

QUESTION = """lamp: fox
bread: violin
The old moose sat near the lake.
comet: ginger
acorn: lantern
What is "comet"?"""
GREETING = "<|bos|><|user|>\nWho are you?<|end|>\n<|assistant|>\n"
_PLAIN = "Who are you?"
_MAX_TOKENS = 32


def demo(arguments: Sequence[str]) -> None:
    """``kvbaton demo``."""
    settings = parse(DemoSettings, "kvbaton demo", arguments)
    configure_logs("demo", settings.log_level)
    Demo(_with_free_ports(settings), Console(highlight=False, soft_wrap=True)).run()


class Demo:
    """One showing: owns the console and the spinner on it."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._status = console.status("starting")

    def run(self) -> None:
        """Start, show, serve until a signal; nothing runs afterwards."""
        self._console.print("kvbaton: starting a router, its workers and the model on this machine")
        with self._status:
            asyncio.run(run_local(self._settings, self._show, self._progress))
        self._console.print("kvbaton: stopped")

    def _progress(self, spec: ProcessSpec, state: ProcessState, facts: Facts) -> None:
        match state:
            case ProcessState.STARTED:
                doing = "starting" if spec.name == "router" else "loading the model"
                self._console.print(f"  {spec.name:<10} {doing} (pid {facts['pid']})")
                self._status.update(f"{spec.name}: {doing}")
            case ProcessState.READY:
                self._console.print(
                    f"  {spec.name:<10} ready, its own pages at http://{facts['admin']}/debug/state"
                )
            case ProcessState.ENDED:
                self._console.print(f"  {spec.name:<10} ended")

    async def _show(self, facts: dict[str, Facts], stopped: asyncio.Event) -> None:
        url, grpc_address = f"http://{facts['router']['http']}", facts["router"]["grpc"]
        self._console.print(f"\nOpenAI API  {url}/v1\ngRPC        {grpc_address}  (kvbaton.v1.Inference)")
        self._status.update("asking")
        model = await served_model(url)
        question, greeting = (QUESTION, GREETING) if self._settings.model == DEMO else (_PLAIN, _PLAIN)
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
        }
        by_http = await ask_http(url, "chat/completions", {"model": model, **body})
        sampling = pb.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0)
        by_grpc = await ask_grpc(grpc_address, pb.GenerateRequest(text=greeting, sampling=sampling))
        self._status.stop()
        self._tell("OpenAI HTTP", question, by_http)
        self._tell("gRPC Generate", greeting, by_grpc)
        self._console.print(latency_table({"OpenAI HTTP": by_http, "gRPC Generate": by_grpc}))
        self._console.print("\nkvbaton is ready. Try:")
        self._console.print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
        self._console.print(
            f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
        )
        self._console.print("Ctrl-C stops everything.")
        await stopped.wait()

    def _tell(self, way: str, question: str, answer: Answer) -> None:
        self._console.print(f"\n{way} asked:", style="bold")
        self._console.print(question.strip(), markup=False)
        self._console.print("answered:", style="bold")
        self._console.print(answer.text.strip(), markup=False)


def latency_table(answers: dict[str, Answer]) -> Table:
    """Where the time went, one row an answer, in milliseconds; the parts sum to the last column."""
    table = Table(title="\nLatency in ms", title_justify="left")
    table.add_column("")
    for name in TIMING_NAMES:
        table.add_column(name.replace("_", " "), justify="right")
    for way, answer in answers.items():
        table.add_row(way, *(f"{answer.timings[name] * 1000:.1f}" for name in TIMING_NAMES))
    return table


def _with_free_ports(settings: DemoSettings) -> DemoSettings:
    """Swap default ports that others hold for free ones, and say so; ports that were asked for are left alone."""
    busy = [
        name
        for name in ("http", "grpc")
        if name not in settings.model_fields_set and _is_busy(getattr(settings, name))
    ]
    for name in busy:
        logger.warning(
            "%s is taken by another program; %s listens on a free port", getattr(settings, name), name
        )
    return settings.model_copy(update=dict.fromkeys(busy, "127.0.0.1:0"))


def _is_busy(address: str) -> bool:
    host, port = split_address(address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
