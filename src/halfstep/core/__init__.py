"""Facts and values without state: dtypes, policies, loss-scale rules, op lists, hardware, errors.

- ``policy.py``: what an opt level means.
- ``loss_scale.py``: the rules that move a loss scale, as pure functions of tensors.
- ``oplists/``: a row for each op (``ops.txt``, read by ``tables.py``), the function that gives the dtypes in which an
  op reads and returns (``dtypes.py``), and what the name of an op means.
- ``hardware.py``: which device has units for which dtype. ``scalars.py``: in which dtype a device computes scalars.
- ``inner_optimizers.py``: the optimizer behind a wrapper.
"""
