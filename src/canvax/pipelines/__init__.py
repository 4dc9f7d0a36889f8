"""Tasks: each is a function anyone can read from top to bottom."""
