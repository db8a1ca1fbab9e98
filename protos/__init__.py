"""What processes say to each other: ``*.proto`` and the code that is generated from them."""
