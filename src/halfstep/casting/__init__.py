"""Which dtype each op and each module computes in."""
