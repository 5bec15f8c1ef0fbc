"""A traced kernel on each backend: ``torch._foreach``, torch's fused steps, C++ by the system's compiler, Triton."""
