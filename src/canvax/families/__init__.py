"""Families of models: the contents of their checkpoints, and the conditions of their denoisers."""
