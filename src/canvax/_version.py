"""The version, kept where both the package and its build can read it."""

__version__ = "0.1.0"
