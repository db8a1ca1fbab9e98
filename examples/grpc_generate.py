"""One streamed Generate over gRPC, with the latency split: ``python examples/grpc_generate.py [HOST:PORT]``."""

import sys

import grpc

from protos import inference_pb2, inference_pb2_grpc


def generate(address: str, text: str) -> None:
    """Print the answer as it arrives, then where the time went."""
    request = inference_pb2.GenerateRequest(
        text=text, sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=16)
    )
    with grpc.insecure_channel(address) as channel:
        for message in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            print("".join(choice.text for choice in message.choices), end="", flush=True)
            if message.HasField("timings"):
                timings = message.timings
                names = (field.name for field in timings.DESCRIPTOR.fields)
                parts = ", ".join(f"{name} {getattr(timings, name) * 1000:.1f} ms" for name in names)
                print(f"\n{parts}")


if __name__ == "__main__":
    generate(
        sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9000",
        "<|bos|><|user|>\nRepeat: fox lake moon<|end|>\n<|assistant|>\n",
    )
