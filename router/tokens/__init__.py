"""Tokens on their way from the streams of workers to the readers of answers: in order, once, and bounded."""
