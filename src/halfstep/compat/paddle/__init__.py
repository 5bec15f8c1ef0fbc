"""Programs under Paddle's names: capture or build, run, train, save and load. The public module is ``static``."""
