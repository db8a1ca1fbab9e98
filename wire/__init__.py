"""Converts contract objects to messages of the internal protocol (``protos/worker.proto``) and back."""
