"""The few lines of C of this project, and what compiles and loads them."""
