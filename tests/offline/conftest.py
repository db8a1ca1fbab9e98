"""Fixtures for these tests."""

from tests.kept_templates import kept_templates, use_kept_templates

__all__ = ["kept_templates", "use_kept_templates"]
