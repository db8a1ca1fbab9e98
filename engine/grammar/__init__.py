"""Grammars that an answer must match, by the llguidance library: compiled in threads, followed token by token."""
