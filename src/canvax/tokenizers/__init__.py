"""Tokenizers: text to ids, based on the ``tokenizers`` library."""
