"""The reader of all who observe: what is asked for comes back, in its place and shape."""

from __future__ import annotations

import torch

from halfstep.diagnostics.observe.reading import Reading


def test_tensors_of_several_shapes_and_dtypes_come_back() -> None:
    asked = [torch.arange(6.0).view(2, 3), torch.tensor(5, dtype=torch.int16), torch.zeros(0), torch.tensor(2.5)]
    reading = Reading(*asked[:3])
    assert reading.ask(asked[3]) == 3
    found = reading.send().get()
    assert reading.ready
    assert all(torch.equal(a, b) for a, b in zip(found, asked, strict=True))


def test_numbers_are_plain_floats_in_the_place_where_they_were_asked_for() -> None:
    reading = Reading(torch.tensor([True, False]))
    place = reading.ask(torch.tensor([[0.5], [2.0]], requires_grad=True))
    reading.send()
    assert (reading[0], reading[place]) == ([1.0, 0.0], [0.5, 2.0])


def test_nothing_asked_is_nothing_read() -> None:
    reading = Reading().send()
    assert reading.ready
    assert reading.get() == []
