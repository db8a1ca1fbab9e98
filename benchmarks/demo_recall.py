"""``python -m benchmarks.demo_recall``: the shipped demo model's held-out recall, to ``results/demo_recall.json``."""

import argparse
import json
from pathlib import Path

from benchmarks.facts import write_result
from examples.demo_model.evaluate import evaluate

SHIPPED = Path(__file__).parents[1] / "kvbaton" / "demo_model"


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--num-prompts", type=int, default=400)
    arguments = parser.parse_args()
    shares = evaluate(arguments.model, arguments.num_prompts)
    path = write_result("demo_recall", {"num_prompts": arguments.num_prompts, **shares})
    print(json.dumps(shares, indent=2), f"written to {path}", sep="\n")


if __name__ == "__main__":
    main()
