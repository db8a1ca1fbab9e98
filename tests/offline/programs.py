"""Programs that use an LLM as users write them; each prints one JSON line when it is ready for what the test does to it."""

NEVER_CLOSES = """
import json, psutil
from kvbaton import LLM, SamplingParams
llm = LLM(num_threads=1)
(output,) = llm.generate("The old moose", SamplingParams(temperature=0, max_tokens=4))
children = [child.pid for child in psutil.Process().children(recursive=True)]
print(json.dumps({"children": children, "tokens": output.outputs[0].token_ids}), flush=True)
"""

INTERRUPTED = """
import json, psutil
from kvbaton import LLM, SamplingParams
with LLM(num_threads=1) as llm:
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    try:
        print(json.dumps({"children": children}), flush=True)
        llm.generate(["go on"] * 64, SamplingParams(max_tokens=2000, ignore_eos=True))
    except KeyboardInterrupt:
        print(json.dumps({"interrupted": True}), flush=True)
    (output,) = llm.generate("The old moose", SamplingParams(temperature=0, max_tokens=4))
    print(json.dumps({"tokens": output.outputs[0].token_ids}), flush=True)
"""

KILLED = """
import json, psutil, threading
from kvbaton import LLM
llm = LLM(num_threads=1)
print(json.dumps({"children": [child.pid for child in psutil.Process().children(recursive=True)]}), flush=True)
threading.Event().wait()
"""
