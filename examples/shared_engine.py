"""Several processes share one engine, so that its weights are loaded once: ``python examples/shared_engine.py [MODEL]``."""

import asyncio
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from kvbaton import AsyncLLM, SamplingParams

PARTS = [["The old moose", "The lake is"], ["lamp: fox\ncomet: ginger\n", "Once"]]
SAMPLING = SamplingParams(temperature=0, max_tokens=12)


async def answer(llm: AsyncLLM, prompt: str) -> str:
    """Return the complete answer to one prompt."""
    async for output in llm.generate(prompt, SAMPLING):
        text = output.outputs[0].text  # all of it until now
    return text


async def answer_part(address: str, prompts: list[str]) -> list[str]:
    """Answer some of the prompts at once, as a client of the engine."""
    async with await AsyncLLM.attach(address) as llm:
        return await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))


def work(address: str, prompts: list[str]) -> list[str]:
    """Do the work of one process."""
    return asyncio.run(answer_part(address, prompts))


async def main(model: str) -> None:
    """Start the engine, and let two processes use it."""
    async with await AsyncLLM.start(model) as llm:
        address = await llm.share()
        with ProcessPoolExecutor(len(PARTS), get_context("spawn")) as pool:
            loop = asyncio.get_running_loop()
            parts = [loop.run_in_executor(pool, work, address, prompts) for prompts in PARTS]
            for prompts, texts in zip(PARTS, await asyncio.gather(*parts), strict=True):
                for prompt, text in zip(prompts, texts, strict=True):
                    print(f"{prompt!r} → {text!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))
