"""Which queue the parked messages lie in, and how it is called on the command line. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rabbit_tasks.consumer import NOT_IN_A_NAME
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.text import quoted, to_type
from rabbit_tasks.topology import parked_queue


@dataclass(frozen=True)
class ParkingQueue:
    """A queue with parked messages: one of ours, or another's dead letter queue.

    Ours is called by its main queue's name or by its own. A foreign one (of another framework, or
    made by hand) is called by its own name alone, and somebody has to say that it is one.
    """

    name: str
    """The queue that the messages lie in."""
    main: str | None
    """The main queue it belongs to; None of a foreign one."""

    def __post_init__(self) -> None:
        """ConfigurationError where no queue of this name can be asked for."""
        if strange := NOT_IN_A_NAME.search(self.name):
            raise ConfigurationError(
                f"queue {self.name!a}: the client library takes no {strange[0]!a} in a name, "
                "only ASCII letters, digits, spaces and -_.:@#,/+"
            )
        if not (self.name and self.main != ""):
            raise ConfigurationError("which queue? Its name is empty")
        if len(self.name) > 255:
            raise ConfigurationError(
                f"queue {self.name[:40]!r}…: {len(self.name)} bytes, AMQP takes 255"
            )

    @classmethod
    def of(cls, queue: str | Self) -> Self:
        """The parking queue that is meant by this name."""
        if not isinstance(queue, str):
            return queue
        main = queue.removesuffix(parked_queue(""))
        return cls(parked_queue(main), main)

    @classmethod
    def foreign(cls, queue: str) -> Self:
        """This queue itself, whatever its name ends in."""
        return cls(queue, None)

    @property
    def is_foreign(self) -> bool:
        return self.main is None

    def to_type(self, verb: str, *options: str) -> str:
        """The command of `parked` with this verb about it."""
        command = f"parked {verb} --foreign" if self.is_foreign else f"parked {verb}"
        return to_type(command, self.main or self.name, *options)

    def __str__(self) -> str:
        return quoted(self.main or self.name)
