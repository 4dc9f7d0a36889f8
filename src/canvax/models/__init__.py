"""Networks: a frozen config, a spec and pure functions for each. No jit, no module framework, no weights."""
