"""Checks of single settings."""

import math


def check_number(name: str, value, low: float, whole: bool = False):
    """
    Return a setting that is a number.

    Args:
        name (`str`): Of the setting, for the message.
        value: What was set.
        low (`float`): Smallest that is allowed.
        whole (`bool`, *optional*, defaults to `False`): Whether it has to be an `int`.

    Raises:
        `ValueError`: it is no finite number of at least `low`.
    """
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value < low:
        raise ValueError(f"`{name}` must be a {'whole ' if whole else ''}number of at least {low}, got {value!r}.")
    return value
