"""Number formats of eight bits and fewer (fp8, MX, NVFP4), and products whose operands are rounded to them."""
