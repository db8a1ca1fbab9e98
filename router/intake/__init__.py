"""A client's request until it can be admitted: checked, limited and tokenized."""
