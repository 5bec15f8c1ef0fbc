"""What exists for old names only: Apex's module tree, its multi-tensor functions, ``fp16_utils``, and the ways here."""
