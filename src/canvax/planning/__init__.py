"""Estimates memory and time of a model on hardware that is not present."""
