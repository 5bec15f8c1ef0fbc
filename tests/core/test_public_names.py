"""What ``dir`` shows, and what a name says that is looked for in the wrong place."""

from __future__ import annotations

import pytest

import halfstep
from halfstep import amp


def test_dir_shows_public_names_only() -> None:
    assert set(dir(amp)) == {*amp.__all__, "debugging"}
    assert set(halfstep.__all__) <= set(dir(halfstep))
    assert [name for name in dir(halfstep) if name.startswith("_")] == ["__version__"]
    assert all(hasattr(amp, name) for name in dir(amp))


@pytest.mark.parametrize("name", halfstep._OF_AMP)
def test_a_name_of_amp_that_is_looked_for_one_level_up(name: str) -> None:
    assert name in amp.__all__
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Did you mean halfstep\.amp\.{name}\?"):
        getattr(halfstep, name)
    assert not hasattr(halfstep, "nothing_like_it")
