"""One streamed chat over OpenAI HTTP with the standard library only: ``python examples/openai_chat.py [URL]``."""

import json
import sys
import urllib.request
from collections.abc import Iterator

QUESTION = 'lamp: fox\ncomet: ginger\nacorn: lantern\nWhat is "comet"?'


def chat(url: str, question: str) -> Iterator[str]:
    """Yield the pieces of the answer as they arrive."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    yield choice["delta"].get("content") or ""


if __name__ == "__main__":
    for piece in chat(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000", QUESTION):
        print(piece, end="", flush=True)
    print()
