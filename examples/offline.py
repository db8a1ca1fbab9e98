"""Answers prompts without a separate service: ``python examples/offline.py [MODEL]``."""

import sys

from kvbaton import LLM, SamplingParams

PROMPTS = ["The old moose", "lamp: fox\ncomet: ginger\n", "The lake is", "Once"]

if __name__ == "__main__":
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=12)
        for output in llm.generate(PROMPTS, sampling):
            print(f"{output.prompt!r} → {output.outputs[0].text!r}")
        (answer,) = llm.chat(
            [{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=32)
        )
        print(answer.outputs[0].text)
