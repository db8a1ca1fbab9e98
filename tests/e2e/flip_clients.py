"""``python -m tests.e2e.flip_clients URL FILE CLIENTS``: asks questions again and again until its input is closed.

The file has questions with their answers (``write_questions``). The clients run in a process of their own, so that they do
not delay the router whose times are measured. The last line of the output is what they have received, as JSON.
"""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.settings import process_environment

Body = dict[str, Any]


@dataclass
class Answers:
    """The number of answers that have arrived, and those that were not as expected."""

    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, url: str, body: Body) -> Any:
    """Return the tokens of an answer, or the body of an error."""
    async with session.post(url, json=body) as response:
        answer = await response.json()
        return answer["choices"][0]["token_ids"] if response.status == 200 else answer


def write_questions(file: Path, bodies: Sequence[Body], expected: Sequence[Any]) -> None:
    """Write questions and the answers that are expected."""
    file.write_text(json.dumps(list(zip(bodies, expected, strict=True))))


@asynccontextmanager
async def asking(url: str, file: Path, num_clients: int) -> AsyncIterator[Answers]:
    """Ask until the block ends, in another process; what has arrived is known after the block."""
    command = [sys.executable, "-m", "tests.e2e.flip_clients", url, str(file), str(num_clients)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=process_environment()
    )
    answers = Answers()
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield answers
    finally:
        output, _ = await process.communicate(b"")
        if process.returncode == 0:
            found = Answers(**json.loads(output.splitlines()[-1]))
            answers.num_answers = found.num_answers
            answers.wrong = found.wrong
        else:
            answers.wrong.append(f"the clients have ended with {process.returncode}")


async def _ask_until_closed(url: str, file: Path, num_clients: int) -> Answers:
    questions = json.loads(file.read_text())
    answers = Answers()
    until = asyncio.Event()

    async def client() -> None:
        async with aiohttp.ClientSession() as session:
            while not until.is_set():
                number = random.randrange(len(questions))
                body, expected = questions[number]
                answer = await ask(session, url, body)
                answers.num_answers += 1
                if answer != expected:
                    answers.wrong.append(f"question {number}: {answer}, not {expected}")

    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: until.set())
    print("ready", flush=True)  # noqa: T201 read by the process that measures
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return answers


if __name__ == "__main__":
    received = asyncio.run(_ask_until_closed(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(vars(received)))  # noqa: T201 read by the process that measures
