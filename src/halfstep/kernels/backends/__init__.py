"""A traced kernel on each backend: ``torch._foreach``, C++ by the system's compiler, and Triton."""
