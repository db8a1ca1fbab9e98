"""Translates between contract objects and the messages of the internal protocol (``protos/worker.proto``)."""
