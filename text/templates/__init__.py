"""Renders chats: chat templates, the message forms that they need, and the proof that no message is lost."""
