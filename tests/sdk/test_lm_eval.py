"""EleutherAI's lm-evaluation-harness: its results with a service equal those with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.sdk.environments import environment_with, lines_of
from tests.service import Service

pytestmark = [pytest.mark.sdk, pytest.mark.e2e, pytest.mark.timeout(600)]

LIBRARIES = ("aiohttp", "datasets", "dill", "jinja2", "more_itertools", "requests", "sacrebleu", "tenacity")
DOCUMENTS: list[dict[str, Any]] = [
    {"question": "The old", "choices": [" moose", " arrow", " lamp lay"], "answer": 0},
    {"question": "Hello", "choices": [" world", "Hello", "!"], "answer": 1},
    {
        "question": 'lamp: fox\ncomet: ginger\nWhat is "comet"?',
        "choices": ["comet: ginger", "é"],
        "answer": 0,
    },
    {"question": "é", "choices": [" ü", "x"], "answer": 0},
]
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
}
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
CHAT = {
    "task": "chat",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}

PROGRAM = """
import json
import sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, tasks, tokenizer = sys.argv[1:]
usual = {"task_manager": TaskManager(include_path=tasks, include_defaults=False), "bootstrap_iters": 0}
of_all = {"model": "kvbaton-demo", "max_retries": 1}
texts = of_all | {"base_url": url + "/completions", "tokenizer": tokenizer, "num_concurrent": 3}
chats = of_all | {"base_url": url + "/chat/completions"}
found = simple_evaluate("local-completions", model_args=texts, tasks=["choices"], batch_size=2, **usual)
said = simple_evaluate("local-chat-completions", model_args=chats, tasks=["chat"], apply_chat_template=True, **usual)
print(json.dumps([found["results"]["choices"]["acc,none"], [one["filtered_resps"] for one in found["samples"]["choices"]]]))
print(json.dumps([said["results"]["chat"]["exact_match,none"], said["samples"]["chat"][2]["filtered_resps"]]))
"""


def write_tasks(folder: Path) -> None:
    """Two tasks over the same documents; YAML reads JSON."""
    (folder / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    data = {"dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    for task in (CHOICES, CHAT):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(TASK | data | task))


def said_by_transformers(model: Path) -> list[list[tuple[float, bool]]]:
    """Return (log probability after the question, is the most likely text) of each choice of each document."""
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def score(question: str, choice: str) -> tuple[float, bool]:
        num_before = len(tokenizer.encode(question, add_special_tokens=False))
        ids = torch.tensor([tokenizer.encode(question + choice, add_special_tokens=False)])
        with torch.inference_mode():
            rows = reference(ids).logits[0].log_softmax(dim=-1)[num_before - 1 : -1]
        chosen = ids[0, num_before:]
        is_likeliest = bool((rows.argmax(dim=-1) == chosen).all())
        return float(rows.gather(1, chosen[:, None]).sum()), is_likeliest

    return [[score(one["question"], choice) for choice in one["choices"]] for one in DOCUMENTS]


def test_lm_eval(service: Service, demo_model: Path, tmp_path: Path) -> None:
    """``local-completions`` (log probabilities by ``echo``) and ``local-chat-completions``; no hub can be reached.

    Installed without the libraries of metrics that are not asked for, which are two fifths of its size.
    """
    python = environment_with(tmp_path / "environment", *LIBRARIES, "transformers", alone=["lm_eval==0.4.13"])
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    arguments = (f"http://{service.http}/v1", str(tmp_path / "tasks"), str(demo_model))
    lines = lines_of(python, PROGRAM, *arguments, **offline)
    (accuracy, found), (exact_match, said) = (json.loads(line) for line in lines[-2:])

    expected = said_by_transformers(demo_model)
    for ours, theirs in zip(found, expected, strict=True):
        assert [is_likeliest for _, is_likeliest in ours] == [is_likeliest for _, is_likeliest in theirs]
        assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-3)
    assert {is_likeliest for scores in expected for _, is_likeliest in scores} == {True, False}
    best = [max(range(len(scores)), key=lambda i: scores[i][0]) for scores in expected]
    right = [choice == one["answer"] for choice, one in zip(best, DOCUMENTS, strict=True)]
    assert accuracy == pytest.approx(sum(right) / len(right))
    assert 0 < accuracy < 1
    assert (exact_match, said) == (0.25, ["comet: ginger"])
