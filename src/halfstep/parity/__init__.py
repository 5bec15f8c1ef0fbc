"""Find the first op at which two runs round differently."""
