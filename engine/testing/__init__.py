"""Fakes and tiny models for the tests of an engine, and of what uses one."""
