"""Generated code of kvbaton.v1.Inference; written by ``make protos``."""
