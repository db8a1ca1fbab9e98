"""Sampling: logits processors, random numbers by position, log probabilities."""
