"""A streamed Generate over gRPC, with the latency breakdown: ``python examples/grpc_generate.py [HOST:PORT]``.

It needs only the client package: ``pip install ./clients/python``.
"""

import sys

from kvbaton_client import Client, SamplingParams

PROMPT = "<|bos|><|user|>\nRepeat: fox lake moon<|end|>\n<|assistant|>\n"


def generate(address: str, text: str) -> None:
    """Print the answer as it arrives, then the latency breakdown."""
    with Client(address) as client:
        for message in client.stream(text, sampling=SamplingParams(temperature=0.0, max_tokens=16)):
            print("".join(choice.text for choice in message.choices), end="", flush=True)
            if message.HasField("timings"):
                timings = message.timings
                print(f"\nprefill {timings.prefill * 1000:.1f} ms, transfer {timings.transfer * 1000:.1f} ms")
        print(f"{len(client.tokenize(text))} tokens in, {message.usage.completion_tokens} tokens out")


if __name__ == "__main__":
    generate(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9000", PROMPT)
