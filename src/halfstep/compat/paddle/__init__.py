"""Programs by Paddle's names: captured or built line by line, run, trained, written and read. Public in ``static``."""
