"""The decode role: a worker that fetches the KV of prompts, and streams the tokens of answers."""
