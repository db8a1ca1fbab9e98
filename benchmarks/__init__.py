"""Measurements: each script writes its figures, with the machine and the versions, to ``benchmarks/results``."""
