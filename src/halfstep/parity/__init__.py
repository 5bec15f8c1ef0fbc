"""Find the first op at which two runs round differently, and which rounding one of them does more."""
