"""Measuring canvax, beside its peers and by itself. Nothing here is in the package that users install."""
