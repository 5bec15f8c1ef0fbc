"""The dtype in which each op and each module computes. Knows nothing of optimizers.

- ``modules.py``: casts the weights of models and adds their hooks. ``buffers.py``: which buffers stay or become fp32.
  ``inputs.py``: casts inputs of a model. ``sharded.py``: parameters of FSDP2 and tensor parallelism.
- ``scope.py``: what casts in a thread: a block, a model, or an O1 session. ``config.py``: a casting as a value.
  ``current.py``: makes one current.
- ``dispatch.py``: the function mode that torch calls for each op. ``rule_table.py`` finds the op's rule, ``rules.py``
  applies it.
- ``meeting.py``: calls an op again, with dtypes that agree, where torch refused it. ``first_passes.py``: turns the mode
  off where the first passes of a model needed it for nothing. ``finite.py``: numbers that 16 bits do not have.
- ``weight_cache.py``: reuses the cast of a weight within one call of a model.
- ``emulation.py``: 16-bit products in fp32 kernels. ``operands.py``: their 16-bit operands, kept for the backward pass.
- ``graph/``: the fewest casts in a captured graph, and the back end "halfstep" of ``torch.compile``.
"""
