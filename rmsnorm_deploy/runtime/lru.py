"""A mapping that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """At most ``capacity`` values, made on demand; a value is forgotten before the next is made.

    ``before_forgetting`` is called with each value that makes room, while it is still alive.
    """

    def __init__(self, capacity: int, before_forgetting: Callable[[V], object] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"an LRU cache needs room for at least one value, not {capacity}")
        self._capacity = capacity
        self._before_forgetting = before_forgetting
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made by ``make`` when it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        while len(self._values) >= self._capacity:
            _, value = self._values.popitem(last=False)
            if self._before_forgetting is not None:
                self._before_forgetting(value)
            del value
        self._values[key] = make()
        return self._values[key]
