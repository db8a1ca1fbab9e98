"""The public gRPC API, ``kvbaton.v1.Inference``."""
