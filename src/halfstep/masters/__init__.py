"""Full-precision truth behind 16-bit weights."""
