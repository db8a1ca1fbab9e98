"""OpenAI's chats and text completions: /v1/chat/completions and /v1/completions."""
