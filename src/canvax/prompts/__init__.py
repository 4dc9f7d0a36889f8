"""Prompt syntax: weights, chunks, schedules. This package handles text only and knows neither models nor JAX."""

from canvax.prompts.chunks import CHUNK, Chunk, chunked
from canvax.prompts.grammar import BREAK, Fragment, PromptSyntax, check_weight, fragments, words_of
from canvax.prompts.schedule import parts_of, schedule_of
from canvax.prompts.weigh import weighed

__all__ = [
    "BREAK", "CHUNK", "Chunk", "Fragment", "PromptSyntax", "check_weight", "chunked", "fragments", "parts_of",
    "schedule_of", "weighed", "words_of",
]  # fmt: skip
