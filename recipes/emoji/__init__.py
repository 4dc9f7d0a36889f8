"""How the model in the package is made: ``drawings`` gathers the data, ``recipe`` trains, ``quality`` measures."""
