"""Which steps of a picture to show on its way."""

from __future__ import annotations


def preview_steps(steps: int, previews: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which a picture of `steps` steps is shown `previews` times.

    They are spread evenly. The last step is not among them, so there may be fewer than asked for.
    """
    places = (round(number * steps / (previews + 1)) for number in range(1, previews + 1))
    return frozenset(place for place in places if 0 < place < steps)
