"""Fakes and tiny models for tests of an engine and of the code that uses one."""
