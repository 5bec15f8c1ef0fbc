"""Only old names: Apex's module tree, its multi-tensor functions, ``fp16_utils``, and ways to move scripts."""
