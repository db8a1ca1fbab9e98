"""``transformers``: ``generate`` on a static batch, with torch's own attention."""

from typing import Any

import torch
import transformers

from benchmarks.peers.work import Generate, Load, Prompts, run_peer


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    """Load the engine; see ``Start``."""
    torch.set_num_threads(load.num_threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.bfloat16)
    model.eval()
    config_class: Any = transformers.GenerationConfig
    model.generation_config = config_class(eos_token_id=None)

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        ids = torch.tensor(prompts)
        how = config_class(
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        answers: Prompts = out[:, ids.shape[1] :].tolist()
        return answers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return generate, {"versions": versions, "computes_with": model.config._attn_implementation}


if __name__ == "__main__":
    run_peer(start)
