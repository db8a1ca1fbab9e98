"""SDKs that stand on an ``openai`` package of their own version, each in an environment of its own: `make test-sdk`."""

import subprocess
from pathlib import Path

import pytest

from tests.chaos.settings import process_environment
from tests.sdk.environments import environment_with
from tests.service import Service

pytestmark = [pytest.mark.sdk, pytest.mark.e2e, pytest.mark.timeout(600)]
PATIENCE_SECONDS = 300
ANSWER = "comet: ginger"

LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="kvbaton-demo", base_url=sys.argv[1], api_key="none", temperature=0)
asked = [("user", 'lamp: fox\\ncomet: ginger\\nWhat is "comet"?')]
answer = model.invoke(asked)
print(answer.content)
print("".join(piece.content for piece in model.stream(asked)))
print(answer.usage_metadata["total_tokens"] == sum(answer.usage_metadata[n] for n in ("input_tokens", "output_tokens")))
"""

LITELLM = """
import sys
import litellm
asked = {"model": "openai/kvbaton-demo", "base_url": sys.argv[1], "api_key": "none", "temperature": 0, "messages": [
    {"role": "user", "content": 'lamp: fox\\ncomet: ginger\\nWhat is "comet"?'}]}
print(litellm.completion(**asked).choices[0].message.content)
print("".join(piece.choices[0].delta.content or "" for piece in litellm.completion(**asked, stream=True)))
try:
    litellm.completion(**(asked | {"temperature": 9}))
except litellm.BadRequestError as error:
    print("temperature" in str(error))
"""


def run_with(package: str, program: str, url: str, folder: Path) -> list[str]:
    """The lines that a program prints where ``package`` is installed."""
    python = environment_with(package, folder)
    environment = {name: value for name, value in process_environment().items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", program, f"{url}/v1"],
        env=environment | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_langchain(service: Service, tmp_path: Path) -> None:
    lines = run_with("langchain-openai==1.7.3", LANGCHAIN, f"http://{service.http}", tmp_path)
    assert lines == [ANSWER, ANSWER, "True"]


def test_litellm(service: Service, tmp_path: Path) -> None:
    """It brings openai 2."""
    lines = run_with("litellm==1.106.2", LITELLM, f"http://{service.http}", tmp_path)
    assert [line for line in lines if line.strip()][:2] == [ANSWER, ANSWER]
    assert lines[-1] == "True"
