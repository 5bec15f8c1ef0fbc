"""The parameters of one optimizer: the state of their gradients, unscaling, and the fp32 masters behind them.

- ``table.py``: one row (``Slot``) for each parameter. Only ``refresh`` checks if the parameters changed; values derived
  from them are valid as long as ``generation`` stays the same.
- ``ledger.py``: the states of gradients around a backward pass. ``unscale.py``: unscaling and clipping in place.
  ``uses.py``: the parameters that a pass reaches.
- ``loss_scaler.py``: the loss scale, updated without reading the device. ``async_reader.py``: reads it later.
- ``masters.py``: the masters of an optimizer, kept outside it (``plain.py``) or split into weight and remainder
  (``split.py``). ``outside_writes.py``: writes to weights between steps. ``snapshot.py``: finds writes by value.
- ``master_registry.py``: finds the master of a parameter. ``held_masters.py``: masters that user code reads and writes.
- ``state_dict.py``: saved states with masters.
"""
