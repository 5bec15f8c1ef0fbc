"""Names of other libraries: Apex's module tree and ``fp16_utils``, Paddle's programs, and tools to migrate scripts."""
