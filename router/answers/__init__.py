"""Tokens of one choice become the text, the usage and the timings that its client receives."""
