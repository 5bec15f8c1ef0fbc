"""A graph of a model and its loss, with the fewest casts."""
