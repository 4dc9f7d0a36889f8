"""How the models in the package are made."""
