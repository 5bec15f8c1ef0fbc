"""Torch's private names, its compiler, and subclasses made at run time: the one place that a new torch changes.

- ``torch_compat.py``: names of torch that differ between releases or are private.
- ``compiler_compat.py``: the same for Dynamo, Inductor and ``torch.export``.
- ``subclasses.py``: subclasses of the users' model and optimizer classes, made at run time.
- ``callers.py``: the stack level of the user's code, for warnings.
"""
