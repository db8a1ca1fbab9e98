"""Grammars that constrain answers, by the llguidance library: compiled in threads, advanced token by token."""
