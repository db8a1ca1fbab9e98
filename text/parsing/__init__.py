"""An answer's text → content, reasoning and tool calls, while it comes, whatever pieces it comes in."""
