"""Names that other systems had: Apex's module tree and ``fp16_utils``, Paddle's programs, and the ways from there."""
