"""The protocol between two workers as plain data and pure functions: states, messages, orders, and the rules over them."""
