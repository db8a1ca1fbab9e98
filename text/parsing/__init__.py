"""Parses the text of an answer incrementally into content, reasoning and tool calls."""
