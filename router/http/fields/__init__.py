"""Readers of the fields that several endpoints share: a ``Body`` becomes arguments of a ``GenerationRequest``."""
