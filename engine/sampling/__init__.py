"""How tokens are chosen: logits processors, random numbers by position, log probabilities."""
