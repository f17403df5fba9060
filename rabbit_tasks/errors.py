"""Every exception of the package, drawn as a tree.

RabbitTasksError
├── ConfigurationError      a class, an app or a setting that cannot work
├── ConnectError            no session with the broker
├── TopologyError           the broker lacks what the app needs, or has it differently
│   └── Forbidden           … our user may not do that
├── PublishError            the broker did not take a message
│   ├── Unroutable          … no queue for it
│   ├── Refused             … it said no
│   └── Unconfirmed         … it did not answer
├── ParkingError            a parking lot that cannot be read, or a replay that cannot go on
└── ManagementError         the management API does not answer, or not to us

Park                        raised by a handler: set this message aside
MalformedBody               a body that is not what the consumer takes
"""

from __future__ import annotations


class RabbitTasksError(Exception):
    """Something rabbit_tasks cannot do; the text says what, where, and the next step."""


class ConfigurationError(RabbitTasksError):
    """A consumer class, an app or a setting is wrong: mend it before anything runs."""


class ConnectError(RabbitTasksError):
    """The broker cannot be reached, or does not let us in.

    `permanent` is true where trying again cannot help: credentials, virtual host, certificate.
    """

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


class TopologyError(RabbitTasksError):
    """The broker's queues, exchanges or bindings are not those of the app."""


class Forbidden(TopologyError):
    """Our user lacks a permission; `said` is the broker's own sentence."""

    def __init__(self, text: str, said: str) -> None:
        super().__init__(text)
        self.said = said


class PublishError(RabbitTasksError):
    """The broker did not confirm a message.

    `maybe_stored` is true where the message may be in its queue all the same, so that publishing
    it again may run it twice.
    """

    maybe_stored = False

    def __init__(self, text: str, *, maybe_stored: bool | None = None) -> None:
        super().__init__(text)
        if maybe_stored is not None:
            self.maybe_stored = maybe_stored


class Unroutable(PublishError):
    """No queue takes the message: its queue, its exchange or its binding is missing."""


class Refused(PublishError):
    """The broker said no: a full queue, a message too large, a permission that is missing."""


class Unconfirmed(PublishError):
    """No answer came in time, or the connection was lost before it: the message may be stored."""

    maybe_stored = True


class ParkingError(RabbitTasksError):
    """A parking lot cannot be read, or a parked message cannot go where it should."""


class ManagementError(RabbitTasksError):
    """The management API does not answer, or does not let us see what was asked for."""


class Park(Exception):
    """Raised by a handler: set this message aside at once, with this reason, without a retry."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MalformedBody(Exception):
    """The body does not decode, or does not fit the consumer's type: parked, never retried.

    The text may quote the body and goes into the message's own headers; `codes` goes into logs.
    """

    def __init__(self, text: str, codes: str) -> None:
        super().__init__(text)
        self.codes = codes
