"""Proposals of tokens that the model may sample next, so that one forward pass can verify several of them."""
