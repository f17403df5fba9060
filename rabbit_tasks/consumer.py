"""The class that users write: a queue, a retry policy, a handler."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Awaitable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ErrorDetails, PydanticSerializationError

from rabbit_tasks.errors import ConfigurationError, MalformedBody
from rabbit_tasks.message import Message
from rabbit_tasks.retry import RetryPolicy

B = TypeVar("B")

MAX_CONCURRENCY: Final = 1000
"""Slots of one consumer: each may need a channel, and RabbitMQ's default channel_max is 2047."""

MAX_PREFETCH: Final = 1000
"""Messages held for one slot."""
MAX_HELD: Final = 65_535
"""Messages held in one channel: its prefetch count has 16 bits."""

MIN_ACK_TIMEOUT: Final = timedelta(minutes=1)
MAX_ACK_TIMEOUT: Final = timedelta(days=49)
"""Erlang's timers take 2^32 - 1 milliseconds."""

NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9 \-_.:@#,/+]")
"""What the client library (pamqp 4) takes in no queue's name; the broker itself takes any UTF-8."""
MAX_FAULTS: Final = 1000
"""Faults of one body that are looked at."""


class Consumer(Generic[B]):
    """Handles the messages of one queue.

    Subclass it with the type of its bodies, `Consumer[ImageUploaded]`: a pydantic model, a
    dataclass, a dict or anything else pydantic can validate from JSON; `bytes` takes the body as it
    is, `str` as UTF-8 text. The content type of a message is not consulted: its body decides.

    queue           the name of its main queue
    retry           when to try again, when to park
    concurrency     slots: how many messages it handles at once
    prefetch        messages held for each slot, the one that it handles among them. More than 1 spares
                    quick handlers the way to the broker and back. It is paid for when a worker dies,
                    or the broker gives it up over a handler that takes too long: each message that
                    was held comes again, and counts a death that was not its own
    timeout         how long the handler may take; outlasting it is a failed attempt
    ack_timeout     how long the broker waits for the ack before it delivers the message again, though
                    the handler still runs; None: as the broker is configured, 30 minutes if nobody
                    has changed it. Before RabbitMQ 3.12 its configuration alone decides.
                    A redelivery to the same worker joins the run that goes on. Another worker starts
                    a run of its own, and where every run takes too long the message goes from worker
                    to worker and is parked in the end as if they had died: a `timeout` shorter than
                    this makes it a failed attempt
    isolation       "process": every slot's handler runs in a child process of its own, which can be
                    killed when its time is up and may crash without harm to the others
    recycle_after   with isolation: a child process ends after so many messages, and a new one is
                    there for the next
    recycle_above   with isolation: a child process that has more MiB of memory than this after a
                    message is replaced as soon as a new one has loaded
    delivery_limit  how many workers may die with one message in their hands: it costs one more, and is
                    parked. As the queue's own limit it lets the broker park what is never settled
    """

    queue: ClassVar[str]
    retry: ClassVar[RetryPolicy] = RetryPolicy()
    concurrency: ClassVar[int] = 1
    prefetch: ClassVar[int] = 1
    timeout: ClassVar[timedelta | None] = None
    ack_timeout: ClassVar[timedelta | None] = None
    isolation: ClassVar[Literal["process"] | None] = None
    recycle_after: ClassVar[int | None] = None
    recycle_above: ClassVar[int | None] = None
    delivery_limit: ClassVar[int] = 5

    def handle(self, body: B, message: Message, /) -> Awaitable[None] | None:
        """Do the work: `async def`, or `def`, which runs in a thread. Returning means done."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "queue" in cls.__dict__:
            with suppress(_NotYet):  # the app asks again when it is built
                check(cls)


class _NotYet(ConfigurationError):
    """A body type names what is not defined: maybe it stands further down in the module."""


Body = TypeAdapter[Any] | Literal["bytes", "text"]
"""How a consumer's bodies are read and written."""


def check(cls: type[Consumer[Any]]) -> None:
    """Refuse a consumer class that cannot work: ConfigurationError with the way out."""
    queue = getattr(cls, "queue", None)
    if queue is None:
        raise ConfigurationError(f'{cls.__name__} has no queue; write queue = "images.resize"')
    if not isinstance(queue, str) or not queue:
        raise ConfigurationError(f"{cls.__name__}.queue is {queue!r}; it takes a queue's name")
    if strange := NOT_IN_A_NAME.search(queue):
        raise ConfigurationError(
            f"{cls.__name__}.queue {queue!r} has {strange[0]!r}; take ASCII letters, digits, spaces "
            "and -_.:@#,/+"
        )
    if queue.startswith("amq."):
        raise ConfigurationError(
            f"{cls.__name__}.queue {queue!r}: names in amq. are the broker's own"
        )
    _check_handler(cls)
    if not isinstance(cls.retry, RetryPolicy):
        raise ConfigurationError(
            f"{cls.__name__}.retry is {cls.retry!r}; write RetryPolicy(attempts=5)"
        )
    for name, low, high in (
        ("concurrency", 1, MAX_CONCURRENCY),
        ("prefetch", 1, MAX_PREFETCH),
        ("delivery_limit", 1, 1_000_000),
    ):
        value = getattr(cls, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigurationError(
                f"{cls.__name__}.{name} is {value!r}; it takes a whole number from {low} to {high}"
            )
    if cls.concurrency * cls.prefetch > MAX_HELD:
        raise ConfigurationError(
            f"{cls.__name__} would hold {cls.concurrency * cls.prefetch} messages (concurrency times "
            f"prefetch); a channel takes {MAX_HELD}"
        )
    _check_isolation(cls)
    _check_times(cls)
    body_of(cls)


def _check_isolation(cls: type[Consumer[Any]]) -> None:
    if cls.isolation not in (None, "process"):
        raise ConfigurationError(
            f'{cls.__name__}.isolation is {cls.isolation!r}; it takes "process" or None'
        )
    for name, unit in (("recycle_after", "messages"), ("recycle_above", "MiB")):
        value = getattr(cls, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(
                f"{cls.__name__}.{name} is {value!r}; it takes a whole number of {unit} from 1"
            )
        if cls.isolation is None:
            raise ConfigurationError(
                f"{cls.__name__} has {name}, but no child process to recycle; write "
                'isolation = "process"'
            )


def _check_times(cls: type[Consumer[Any]]) -> None:
    if cls.timeout is not None:
        if not isinstance(cls.timeout, timedelta) or cls.timeout <= timedelta():
            raise ConfigurationError(
                f"{cls.__name__}.timeout is {cls.timeout!r}; write timedelta(seconds=30)"
            )
        if cls.isolation is None and not is_async(cls):
            raise ConfigurationError(
                f"{cls.__name__} has a timeout, but its handler runs in a thread, which cannot be "
                'stopped; write isolation = "process", or make handle async'
            )
    if cls.ack_timeout is None:
        return
    if not isinstance(cls.ack_timeout, timedelta):
        raise ConfigurationError(
            f"{cls.__name__}.ack_timeout is {cls.ack_timeout!r}; write timedelta(hours=1)"
        )
    if not MIN_ACK_TIMEOUT <= cls.ack_timeout <= MAX_ACK_TIMEOUT:
        raise ConfigurationError(
            f"{cls.__name__}.ack_timeout is {cls.ack_timeout}; it takes {MIN_ACK_TIMEOUT} (the broker "
            f"may look once a minute only) to {MAX_ACK_TIMEOUT.days} days"
        )
    wait = longest_wait(cls)
    if wait is not None and cls.ack_timeout <= wait:
        times = f" {cls.prefetch} times (prefetch)" if cls.prefetch > 1 else ""
        raise ConfigurationError(
            f"{cls.__name__}.ack_timeout, {cls.ack_timeout}, must be longer than its timeout, "
            f"{cls.timeout},{times} or the broker delivers a message again while its handler may still "
            "run"
        )


def _check_handler(cls: type[Consumer[Any]]) -> None:
    handle = cls.handle
    if handle is Consumer.handle:
        raise ConfigurationError(
            f"{cls.__name__} has no handler; write async def handle(self, body, message)"
        )
    if inspect.isgeneratorfunction(handle) or inspect.isasyncgenfunction(handle):
        raise ConfigurationError(
            f"{cls.__name__}.handle is a generator, which would never run; take its yield out"
        )
    try:
        inspect.signature(handle).bind(None, None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"{cls.__name__}.handle does not take (self, body, message): {error}"
        ) from None


def longest_wait(cls: type[Consumer[Any]]) -> timedelta | None:
    """How long the broker may wait for an ack: the handler's time limit, once for each that a slot
    holds. None without a limit."""
    return None if cls.timeout is None else cls.timeout * cls.prefetch


def is_async(cls: type[Consumer[Any]]) -> bool:
    """Whether the handler is a coroutine function; any other runs in a thread."""
    return inspect.iscoroutinefunction(cls.handle)


def body_of(cls: type[Consumer[Any]]) -> Body:
    """How this consumer's bodies are decoded; made once per class.

    Raises ConfigurationError for a type that has no JSON form, or that names what is not defined.
    """
    known: Body | None = cls.__dict__.get("_body")
    if known is not None:
        return known
    kind = _body_type(cls)
    body: Body
    if kind is bytes:
        body = "bytes"
    elif kind is str:
        body = "text"
    else:
        body = _adapter(cls, kind)
    cls._body = body  # type: ignore[attr-defined]
    return body


def _adapter(cls: type, kind: Any) -> TypeAdapter[Any]:
    takes = f"{cls.__name__} takes {_shown(kind)}"
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        if adapter.core_schema["type"] not in ("callable", "is-instance", "is-subclass"):
            return adapter
    except PydanticSchemaGenerationError:
        pass
    except Exception as error:
        if isinstance(error, NameError) or getattr(error, "code", "") == "class-not-fully-defined":
            raise _NotYet(
                f"{takes}, which names a type that its module does not define; define it, and "
                "where that comes after the class, call its model_rebuild()"
            ) from None
        raise ConfigurationError(f"{takes}: {str(error).partition(chr(10))[0]}") from None
    raise ConfigurationError(
        f"{takes}, which has no JSON form; take a pydantic model, a dataclass, a dict, str or bytes"
    )


def _shown(kind: Any) -> str:
    is_plain = isinstance(kind, type) and not typing.get_args(kind)
    return kind.__name__ if is_plain else str(kind).replace("typing.", "")


def _body_type(cls: type) -> Any:
    """What stands in `Consumer[…]`, through any number of generic classes in between."""

    def holder() -> None:
        """(Only functions, classes and modules have their forward references resolved.)"""

    holder.__annotations__ = {"body": _argument(cls, {}) or Any}
    known: dict[str, Any] = {}
    for one in reversed(cls.__mro__):
        known |= vars(sys.modules.get(one.__module__, typing))
    try:
        return typing.get_type_hints(holder, known, include_extras=True)["body"]
    except NameError as error:
        raise _NotYet(
            f"{cls.__name__} takes {error.name}, which its module does not define; write the type "
            "itself, or define it at the top of the module"
        ) from None


def _argument(cls: type, known: dict[Any, Any]) -> Any:
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, Consumer)):
            continue
        arguments = [_filled_in(a, known) for a in typing.get_args(base)]
        if origin is Consumer:
            kind = arguments[0] if arguments else None
            return None if isinstance(kind, TypeVar) else kind
        parameters = getattr(origin, "__parameters__", ())
        return _argument(origin, dict(zip(parameters, arguments, strict=False)))
    return None


def _filled_in(kind: Any, known: dict[Any, Any]) -> Any:
    if isinstance(kind, TypeVar):
        return known.get(kind, kind)
    if parameters := getattr(kind, "__parameters__", ()):  # such as list[T]
        return kind[tuple(known.get(one, one) for one in parameters)]
    return kind


def decode(cls: type[Consumer[B]], body: bytes) -> B:
    """The body as the consumer's type; MalformedBody where it is not."""
    how = body_of(cls)
    value: Any
    if how == "bytes":
        value = body
    elif how == "text":
        try:
            value = body.decode()
        except UnicodeDecodeError as error:
            raise MalformedBody(f"not UTF-8 at byte {error.start}", "not UTF-8") from None
    else:
        try:
            value = how.validator.validate_json(body)
        except ValidationError as error:
            raise MalformedBody(faults(error), fault_codes(error)) from None
        except UnicodeError:  # out of pydantic, where a validator's text cannot be encoded
            raise MalformedBody("refused by a validator", "value_error") from None
    return typing.cast(B, value)


def encode(cls: type[Consumer[B]], body: B) -> tuple[bytes, str]:
    """The body on the wire and its content type. TypeError where it is not the consumer's type."""
    how = body_of(cls)
    if how == "bytes":
        if not isinstance(body, bytes):
            raise _wrong(cls, body, "bytes")
        return body, "application/octet-stream"
    if how == "text":
        if not isinstance(body, str):
            raise _wrong(cls, body, "str")
        return body.encode(), "text/plain; charset=utf-8"
    try:
        # Another model's or dataclass's fields would be left out without a word.
        # (The adapter's own methods pass a dozen arguments on, at a third of the price of this all.)
        how.validator.validate_python(body, strict=True)
        return how.serializer.to_json(body, warnings="error"), "application/json"
    except (PydanticSerializationError, ValidationError):
        raise _wrong(cls, body, _shown(_body_type(cls))) from None


def _wrong(cls: type[Consumer[Any]], body: object, wanted: str) -> TypeError:
    return TypeError(f"{cls.__name__} takes {wanted}, not this {type(body).__name__}")


def faults(error: ValidationError) -> str:
    """What pydantic found, place by place: for the message's own headers."""
    found = _found(error)
    shown = [
        f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" if one["loc"] else one["msg"]
        for one in found[:5]
    ]
    more = error.error_count() - len(shown)
    if not shown:
        return f"{more} faults"
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def fault_codes(error: ValidationError) -> str:
    """What pydantic found, in its own codes: for logs, since places and texts quote the body."""
    codes = sorted({one["type"] for one in _found(error)})
    return ", ".join(codes) or f"{error.error_count()} faults"


def _found(error: ValidationError) -> list[ErrorDetails]:
    """The faults; none where there are too many to list without holding up the event loop: a list
    of a million wrong numbers has a million."""
    if error.error_count() > MAX_FAULTS:
        return []
    return error.errors(include_input=False, include_url=False, include_context=False)
