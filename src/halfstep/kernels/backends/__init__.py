"""A traced update on each backend: ``torch._foreach``, C++ by the system's compiler, and Triton."""
