"""Tasks with an owner, and signals between them."""
