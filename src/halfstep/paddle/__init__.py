"""Paddle's programs and ``Model``. The public names are ``halfstep.static`` and ``halfstep.Model``.

- ``capture.py``: captures a model with its loss. ``tape.py``: records what is computed from ``static.data``.
- ``building.py``: static mode, and the programs that are being built. ``executor.py``: runs programs.
- ``archive.py``: reads and writes programs. ``graph_edits.py``: changes their graphs. ``inference.py``: the part
  that an inference needs.
- ``model/``: ``Model.prepare``, ``fit``, ``evaluate`` and ``predict``.
"""
