"""Tokenizers: text to ids, on the ``tokenizers`` library."""
