"""Graph mode: a model and its loss captured as one graph, cast once."""
