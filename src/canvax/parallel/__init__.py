"""Devices are a mesh, said once."""
