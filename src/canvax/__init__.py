"""canvax: text-to-image in JAX."""
