"""In which order contenders take their turns."""

from __future__ import annotations


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` contenders in which each comes in each place, and right after each other one, equally often.

    With mere rotation A would always come right after B, and find the caches as B leaves them. A Williams design:
    the first row goes 0, 1, n-1, 2, n-2, ..., so that its steps are all different; the others are it plus 1, plus 2,
    ...; an odd number needs their mirror images as well.
    """
    first = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    rows = [[(place + shift) % count for place in first] for shift in range(count)]
    return rows + [row[::-1] for row in rows] if count % 2 else rows
