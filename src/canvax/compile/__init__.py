"""Every jit boundary of the library is here or in ``pipelines/``."""
