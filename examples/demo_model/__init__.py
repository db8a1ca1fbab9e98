"""The demo model's data, tokenizer, training and evaluation."""
