"""The ``openai`` package with kvbaton: an answer, a stream, concurrent requests: ``python examples/openai_sdk.py [URL]``."""

import asyncio
import sys

from openai import AsyncOpenAI, OpenAI

MODEL = "kvbaton-demo"


def ask(url: str) -> str:
    """Return a complete answer."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=MODEL, temperature=0, messages=[{"role": "user", "content": "Who are you?"}]
        )
    return answer.choices[0].message.content or ""


def stream(url: str) -> None:
    """Print an answer as it arrives."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        pieces = client.chat.completions.create(
            model=MODEL,
            temperature=0,
            stream=True,
            messages=[{"role": "user", "content": 'lamp: fox\ncomet: ginger\nWhat is "comet"?'}],
        )
        for piece in pieces:
            print(piece.choices[0].delta.content or "", end="", flush=True)
    print()


async def ask_several(url: str, prompts: list[str]) -> list[str]:
    """Request several completions concurrently."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(client.completions.create(model=MODEL, prompt=one, temperature=0) for one in prompts)
        )
    return [answer.choices[0].text for answer in answers]


if __name__ == "__main__":
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    print(ask(base))
    stream(base)
    print(asyncio.run(ask_several(base, ["The old moose", "The lamp"])))
