"""Which parked messages: a filter, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rabbit_tasks.parking.parked import ParkedMessage


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which messages are meant; it remembers which ids it met. Without any filter: all of them."""

    ids: tuple[str, ...] = ()
    error: str | None = None
    limit: int | None = None
    """At most so many, the oldest first; kept by whoever asks."""
    _met: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __call__(self, message: ParkedMessage) -> bool:
        called = [name for name in self.ids if message.is_called(name)]
        self._met.update(called)
        return (not self.ids or bool(called)) and (
            self.error is None or message.has_error(self.error)
        )

    def absent(self, chosen: int) -> list[str]:
        """The ids that were not met; not asked of those behind the limit."""
        if self.limit is not None and chosen >= self.limit:
            return []
        return [name for name in self.ids if name not in self._met]
