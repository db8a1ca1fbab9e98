"""Trains the demo model: ``python -m examples.demo_model.train --out DIR`` (about 45 minutes on one core).

The run is a function of its arguments: data by (seed, step), weights by the seed, one torch thread. It writes a
checkpoint every ``--save-every`` steps and resumes from it when it is started again with the same ``--out``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo_model.circuit import ROPE_THETA, RecallCircuit
from examples.demo_model.data import DemoData
from examples.demo_model.tokenizer import CHAT_TEMPLATE, train_tokenizer


@dataclass(frozen=True)
class Phase:
    """A phase of the curriculum: ``num_steps`` batches of ``num_rows`` sequences of ``length`` tokens."""

    num_steps: int
    num_rows: int
    length: int


CURRICULUM = (Phase(500, 64, 64), Phase(1300, 32, 128), Phase(1500, 8, 512), Phase(1500, 2, 2048))
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100


def demo_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Return the configuration: 4 layers, 6 query heads on 2 KV heads, 2,048 positions."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id("<|bos|>"),
        eos_token_id=tokenizer.token_to_id("<|end|>"),
    )


def learning_rate(step: int, total: int) -> float:
    """Return the rate: linear warm-up, then linear decay to a twentieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    left = (total - step) / max(total - WARMUP_STEPS, 1)
    return PEAK_LEARNING_RATE * max(left, 0.05)


def phase_at(curriculum: Sequence[Phase], step: int) -> Phase:
    """Return the phase of step number ``step``."""
    for phase in curriculum:
        if step < phase.num_steps:
            return phase
        step -= phase.num_steps
    return curriculum[-1]


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted cross entropy of the next token over ``[num_rows, length + 1]`` ids."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    targets = ids[:, 1:].reshape(-1)
    weight = weights[:, 1:].reshape(-1)
    each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets, reduction="none")
    return (each * weight).sum() / weight.sum()


def train(
    out: Path,
    seed: int,
    num_steps: int,
    save_every: int,
    curriculum: Sequence[Phase] = CURRICULUM,
    log_every: int = 50,
) -> list[float]:
    """Train up to step ``num_steps`` and save the model to ``out``; returns the losses of the steps that ran."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    data = DemoData(tokenizer)
    config = demo_config(tokenizer)
    model = LlamaForCausalLM(config)
    RecallCircuit(config, seed).plant(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    total = sum(phase.num_steps for phase in curriculum)
    checkpoint = out / "checkpoint.pt"
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = int(state["step"])
    out.mkdir(parents=True, exist_ok=True)
    losses = []
    began = time.monotonic()
    for step in range(start, num_steps):
        phase = phase_at(curriculum, step)
        ids, weights = (torch.from_numpy(a) for a in data.batch(seed, step, phase.num_rows, phase.length))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, ids, weights)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % log_every == 0:
            rate = (step + 1 - start) / (time.monotonic() - began)
            print(
                f"step {step + 1} length {phase.length} loss {losses[-1]:.4f} {rate:.2f} steps/s", flush=True
            )
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    export(model, out / "model")
    return losses


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder that ``kvbaton`` and ``transformers`` load."""
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=train_tokenizer(),
        bos_token="<|bos|>",
        eos_token="<|end|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--num-steps", type=int, default=sum(p.num_steps for p in CURRICULUM))
    parser.add_argument("--save-every", type=int, default=100)
    arguments = parser.parse_args()
    train(arguments.out, arguments.seed, arguments.num_steps, arguments.save_every)


if __name__ == "__main__":
    main()
