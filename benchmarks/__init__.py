"""Benchmarks: each script writes its figures, with facts about the machine and versions, to ``benchmarks/results``."""
