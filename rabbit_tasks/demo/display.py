"""What the demo shows: where each message is. A table on a terminal, a line per move elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rabbit_tasks.text import one_line

Place = Literal["main", "retry", "done", "parked"]
STYLES: Final[dict[Place, str]] = {
    "main": "cyan", "retry": "yellow", "done": "green", "parked": "red",
}  # fmt: skip


@dataclass
class Journey:
    """One message on its way: main → retry → … → done or parked."""

    name: str
    place: Place = "main"
    note: str = ""
    moved: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.place in ("done", "parked")


class Display:
    """Shows the journeys of messages, by their ids, while its block runs."""

    def __init__(self, console: Console, journeys: dict[str, Journey]) -> None:
        self.on_broker = ""
        self._console = console
        self._journeys = journeys
        self._started = time.monotonic()
        self._live = Live(console=console, get_renderable=self._page, refresh_per_second=8)

    @property
    def is_live(self) -> bool:
        return self._console.is_terminal

    def __enter__(self) -> Self:
        if self.is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def move(self, message_id: str, place: Place, note: str = "") -> None:
        """The message is somewhere else now. Ids that are not ours are those of earlier runs."""
        journey = self._journeys.get(message_id)
        if journey is None:
            return
        journey.place, journey.note, journey.moved = place, one_line(note), time.monotonic()
        if not self.is_live:
            seconds = journey.moved - self._started
            line = f"{seconds:7.2f} s  {one_line(journey.name):<20} → {place:<6}  {journey.note}"
            self._console.print(Text(line.rstrip()), soft_wrap=True)

    def _page(self) -> Group:
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(no_wrap=True, overflow="ellipsis")
        # A folder may hold more than a screen does: then those that moved last.
        room = max(5, self._console.height - 6)
        shown = {id(one) for one in sorted(self._journeys.values(), key=lambda j: -j.moved)[:room]}
        for one in (one for one in self._journeys.values() if id(one) in shown):
            table.add_row(
                one_line(one.name), Text(one.place, STYLES[one.place]), Text(one.note, "dim")
            )
        places = Counter(one.place for one in self._journeys.values())
        counts = (Text(f"{places[place]} {place}", style) for place, style in STYLES.items())
        return Group("", table, "", Text("  ").join(counts), Text(self.on_broker, "dim"))
