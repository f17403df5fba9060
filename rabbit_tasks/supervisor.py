"""Several workers side by side: started, started anew when they die, stopped together.

    Supervisor.run      the supervisor's life; in each worker's process it returns at once
    Supervisor._start   fork: the worker's process goes on with its Place
    Supervisor._ended   a worker is gone: start another, or end the whole
    Place               what a worker's process has of its supervisor

The supervisor has one thread and no event loop, and never imports the app: so it can fork, which
makes a worker in milliseconds, and nothing an app does can hurt it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from rabbit_tasks.durations import duration_text
from rabbit_tasks.process import end_with_parent, ending

if TYPE_CHECKING:
    from rabbit_tasks.settings import Settings

log = logging.getLogger("rabbit_tasks")

FIRST_PAUSE: Final = 0.1
"""Seconds that the pause before the first restart does not exceed; doubled with each one after."""
HEALTHY: Final = 10.0
"""Seconds after which a worker's life counts as a success, and the pauses begin small again."""
OVERTIME: Final = 5.0
"""Seconds after the grace time, or after the order to stop now, before a worker is killed."""
MOST: Final = 500
"""Workers of one supervisor; more is a typing error."""

_HEEDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
# What a worker writes to its supervisor, in this order. The last is followed by the error's text.
_LOADED, _CONSUMES, _GIVES_UP = b"l", b"c", b"g"
# What the supervisor writes to its workers: once for "stop", once more for "stop now".
_STOP: Final = b"s"


class Signals:
    """The signals that come to a supervisor: none gets lost, each waits until it is asked for.

    Made as early as possible: to process 1 of a container a signal without a handler means nothing.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _HEEDED:
            optional = number in (signal.SIGHUP, signal.SIGQUIT)
            if optional and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, _noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEEDED)

    def fileno(self) -> int:
        """Readable when there are some."""
        return self._read

    def take(self) -> bytes:
        """The numbers of those that came, in order."""
        try:
            return os.read(self._read, 4096)
        except BlockingIOError:
            return b""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """For the length of a block, let them wait at the door."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def forget(self) -> None:
        """In a worker's process: they are no longer the supervisor's.

        SIGTERM ends a worker that has not come as far as its event loop. What a terminal sends to
        all of its processes is passed on by the supervisor, or handled by the event loop.
        """
        signal.set_wakeup_fd(-1)
        for end in (self._read, self._write):
            os.close(end)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)


def _noted(number: int, frame: object) -> None:
    """The number is in the pipe; there is nothing to do but to be a handler."""


class Place:
    """What a worker's process has of its supervisor: a number, and a line that both talk on."""

    def __init__(self, number: int, line: socket.socket) -> None:
        self.number = number
        self._line = line
        self._lock = threading.RLock()  # (a signal may come while another is handled)
        self._signals = 0
        self._orders = 0
        self._obeyed = 0
        self._obey: Callable[[], None] = lambda: None

    def name(self, given: str | None) -> str | None:
        """The worker's name, where the settings give all of them one."""
        return given and f"{given}-{self.number}"

    def attach(self, stop: Callable[[], None], asked: Callable[[], None]) -> None:
        """When the supervisor, or a signal, says so: call `asked`, and `stop` in the running loop.

        The first one at once, be it in another thread or in a signal's handler: the loop may stand
        still.
        """
        loop = asyncio.get_running_loop()

        def obey() -> None:
            asked()
            with suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(stop)

        self._obey = obey
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._heard(signals=1))
        threading.Thread(target=self._listen, name="rabbit-tasks-place", daemon=True).start()
        self._tell(_LOADED)

    def detach(self) -> None:
        """The event loop is over: nothing that comes now may spoil the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def consumes(self) -> None:
        """The worker consumes: from now on its death is worth another try."""
        self._tell(_CONSUMES)

    def gives_up(self, why: str) -> bool:
        """The worker ends of what trying again does not mend; whether the supervisor was told."""
        return self._tell(_GIVES_UP + why.encode(errors="replace"))

    def _tell(self, what: bytes) -> bool:
        try:
            self._line.sendall(what)
        except OSError:
            return False  # there is no supervisor any more
        return True

    def _listen(self) -> None:
        with suppress(OSError):
            while orders := self._line.recv(64):
                self._heard(orders=len(orders))
        if not self._orders:
            self._heard(orders=1)  # the supervisor is gone

    def _heard(self, *, signals: int = 0, orders: int = 0) -> None:
        # Not their sum: a terminal's Ctrl-C, or a service manager's SIGTERM to all of a service,
        # comes from there and once more from the supervisor, and is one order all the same.
        with self._lock:
            self._signals += signals
            self._orders += orders
            while self._obeyed < min(2, max(self._signals, self._orders)):
                self._obeyed += 1
                self._obey()


class _Process:
    """A worker's process, as its supervisor sees it."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        self.born = time.monotonic()
        self.hears = True
        self.is_killed = False
        self._heard = b""

    def listen(self) -> None:
        """Take in what it has written."""
        with suppress(OSError):
            while more := self.line.recv(65_536):
                self._heard += more
            self.hears = False  # it closed its end

    def order(self, times: int) -> None:
        """Tell it to stop, or twice, to stop now."""
        with suppress(OSError):
            self.line.send(_STOP * times)
        self.listen()
        if not self.is_loaded:
            self.kill(signal.SIGTERM)  # nobody reads the line yet

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)  # (nobody else has its number before we have reaped it)

    @property
    def is_loaded(self) -> bool:
        return _LOADED in self._heard.partition(_GIVES_UP)[0]

    @property
    def has_consumed(self) -> bool:
        return _CONSUMES in self._heard.partition(_GIVES_UP)[0]

    @property
    def despair(self) -> str:
        """Why it gave up; empty where it did not."""
        text = self._heard.partition(_GIVES_UP)[2].decode(errors="replace")
        return "; ".join(text.splitlines())


class _Slot:
    """Room for one worker: there is one in it, or there will be."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: _Process | None = None
        self.due = 0.0
        self.failures = 0

    def __str__(self) -> str:
        return f"worker {self.number}" + (f" (pid {self.process.pid})" if self.process else "")

    def fields(self, **more: Any) -> dict[str, Any]:
        """For a log line about its worker."""
        pid = self.process.pid if self.process else None
        return {"fields": {"number": self.number, "pid": pid, **more}}


class Supervisor:
    """Keeps so many workers running until it is told to stop.

    SIGTERM, SIGINT    stop in good order; once more: stop now. What still lives some seconds after
                       the grace time is killed
    SIGHUP             stop in good order: the terminal is gone
    SIGQUIT            stop now
    """

    def __init__(self, processes: int, signals: Signals, settings: Settings) -> None:
        self._slots = [_Slot(number) for number in range(1, processes + 1)]
        self._signals = signals
        self._grace = settings.grace
        self._cap = settings.restart_cap.total_seconds()
        self._asked = 0
        self._orders = 0
        self._deadline: float | None = None
        self._consumed = False
        self._code = 0

    def run(self) -> int | Place:
        """The exit code when all is over; in the process of a worker its Place, and life goes on.

        0: it was told to stop, and all workers ended well. Else that of a worker which could not
        begin, or 1.
        """
        gc.collect()
        gc.freeze()  # what is here now stays, in memory that all workers share
        self._heed()
        while not self._orders or self._running():
            if not self._orders:
                for slot in self._slots:
                    if slot.process is None and slot.due <= time.monotonic():
                        place = self._start(slot)
                        if place is not None:
                            return place
            self._wait()
            self._heed()
            self._reap()
            if self._deadline is not None and self._deadline <= time.monotonic():
                self._kill()
        return self._code

    def _running(self) -> list[tuple[_Slot, _Process]]:
        return [(slot, slot.process) for slot in self._slots if slot.process is not None]

    # --- beginning ------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> Place | None:
        """Fork. In the worker's process: its place."""
        ours = theirs = None
        supervisor = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or else the worker writes it a second time
        # Between the fork and its own handlers a worker would take its signals for the supervisor's.
        with self._signals.held_back():
            try:
                ours, theirs = socket.socketpair()
                pid = os.fork()
            except OSError as error:
                for end in (ours, theirs):
                    if end is not None:
                        end.close()
                self._again(slot, f"cannot be started ({error.strerror})", {})
                return None
            if pid == 0:
                self._signals.forget()
                ours.close()
                for _, other in self._running():
                    other.line.close()  # each ends with the supervisor, and with nobody else
                _end_with(supervisor)
                return Place(slot.number, theirs)
        theirs.close()
        ours.setblocking(False)
        slot.process = _Process(pid, ours)
        log.info("%s started", slot, extra=slot.fields())
        return None

    # --- the day's work -------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until there is something to do."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        for _, process in self._running():
            if process.hears:
                poll.register(process.line, select.POLLIN)
        ends = [] if self._deadline is None else [self._deadline]
        if not self._orders:
            ends += [slot.due for slot in self._slots if slot.process is None]
        poll.poll(max(0.0, min(ends) - time.monotonic()) * 1000 + 1 if ends else None)
        for _, process in self._running():
            process.listen()
            self._consumed = self._consumed or process.has_consumed

    def _heed(self) -> None:
        for number in self._signals.take():
            if number in (signal.SIGTERM, signal.SIGINT):
                self._asked += 1
            elif number == signal.SIGHUP:
                self._asked = max(1, self._asked)  # systemd may send it right behind SIGTERM
            elif number == signal.SIGQUIT:
                self._asked = 2
        self._stop(self._asked)

    def _reap(self) -> None:
        """Whoever has ended: ours, and as process 1 those whose own parent left them behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for slot, process in self._running():
                if process.pid == pid:
                    process.listen()
                    self._ended(slot, process, os.waitstatus_to_exitcode(status))

    def _ended(self, slot: _Slot, process: _Process, code: int) -> None:
        lived = time.monotonic() - process.born
        told = f"{ending(code)} after {lived:.1f} s"
        if process.despair:
            told += f": {process.despair}"
        more = {"code": code, "lived": round(lived, 3)}
        process.line.close()
        self._consumed = self._consumed or process.has_consumed
        if self._orders:
            # SIGTERM ends only one that has not begun or is through: else it is an order to it.
            if code not in (0, -signal.SIGTERM):
                self._code = self._code or 1
                if not process.is_killed and not process.despair:
                    log.error("%s %s", slot, told, extra=slot.fields(**more))
            slot.process = None
            return
        # Of what it cannot begin, no other can; and an app that has never worked is not kept going
        # as if it did.
        if code > 0 and not process.has_consumed and (process.despair or not self._consumed):
            log.error("stopping, for %s %s", slot, told, extra=slot.fields(**more))
            slot.process = None
            self._code = code
            self._stop(1, told=True)
            return
        if lived > HEALTHY:
            slot.failures = 0
        self._again(slot, told, more)

    def _again(self, slot: _Slot, told: str, more: dict[str, Any]) -> None:
        """Another worker, after a pause."""
        slot.failures += 1
        pause = restart_pause(slot.failures, self._cap, random.random())
        log.log(
            logging.ERROR if more.get("code") != 0 else logging.INFO,
            "%s %s; the next one in %.2f s", slot, told, pause,
            extra=slot.fields(**more, pause=round(pause, 3)),
        )  # fmt: skip
        slot.process = None
        slot.due = time.monotonic() + pause

    # --- the end --------------------------------------------------------------------------------

    def _stop(self, orders: int, *, told: bool = False) -> None:
        """Tell the workers to stop; a second time, to stop now."""
        new = min(orders, 2) - self._orders
        if new <= 0:
            return
        deadline, how = time.monotonic() + OVERTIME, "now"
        if self._orders + new == 1:
            deadline += self._grace.total_seconds()
            how = f"within {duration_text(self._grace)}"
        if not told:
            log.info("stopping the workers, %s", how)
        self._deadline = min(deadline, self._deadline or deadline)
        self._orders += new
        for _, process in self._running():
            process.order(new)

    def _kill(self) -> None:
        for slot, process in self._running():
            log.error("%s did not stop in time: killed", slot, extra=slot.fields())
            process.is_killed = True
            process.kill(signal.SIGKILL)
        self._deadline = None


def restart_pause(failures: int, cap: float, draw: float) -> float:
    """Seconds before a worker is started after so many failures in a row: full jitter.

    >>> [restart_pause(n, 10.0, 1.0) for n in (1, 2, 3, 8)]
    [0.1, 0.2, 0.4, 10.0]
    """
    return draw * min(cap, FIRST_PAUSE * 2.0 ** min(failures - 1, 30))


def _end_with(supervisor: int) -> None:
    """In a worker's process: SIGTERM when the supervisor dies, which cannot tell it any more.

    Its event loop sees it by the line's end too, on any system; this one works before there is one.
    """
    end_with_parent(signal.SIGTERM)
    if os.getppid() != supervisor:
        os._exit(1)
