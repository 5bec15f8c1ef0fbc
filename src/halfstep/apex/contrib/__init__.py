"""``apex.contrib``."""
