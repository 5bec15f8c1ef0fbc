"""Tools that look at a run.

- ``observe/``: modules, functions, ops and weights, watched as they run.
- ``findings/``: causes of lost precision, each with a code: ``check``, ``watch``, ``memory``.
- ``numerics/``: statistics of tensors over steps, and the place at which two runs diverge.
- ``debugging/``: Paddle's ``amp.debugging``.
- ``pages/``: HTML reports that need no server.
"""
