"""Devices as a mesh, and where arrays lie on it."""
