"""Observation of a run: the part that all diagnostic tools share.

``watch.py`` reports modules, torch functions and ops as they run, ``ops.py`` has the modes that see them, and
``names.py`` their names. ``counted.py`` counts ops, and ``notes.py`` keeps notes on tensors. ``samples.py`` samples
tensors, and ``updates.py`` samples the values behind weights before and after a step. ``reading.py`` copies numbers to
the host without waiting, and ``row.py`` has the numbers of one tensor in one step. ``findings`` and ``numerics`` draw
conclusions from them.
"""
