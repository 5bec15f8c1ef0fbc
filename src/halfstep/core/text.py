"""Words of messages and reports."""

__all__ = ["counted"]


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number and its noun: ``1 step``, ``1,437 images``, ``0 losses``.

    Args:
        count: how many there are.
        one: the noun for one of them.
        many: the noun for more than one; by default with an s.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
