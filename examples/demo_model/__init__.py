"""How the demo model was made: its data, its tokenizer, its training and its measured recall."""
