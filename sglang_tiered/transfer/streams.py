"""Streams and events: what orders copies against each other and against forwards.

A stream runs work in the order of submission. Work of different streams is ordered only
by the events it is submitted `after`. Events have names, so that a test can read which
event a copy waits for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol


class Event(Protocol):
    """The end of one piece of work on a stream."""

    name: str

    def wait(self) -> None:
        """Block until the work has ended; raises what the work raised."""

    def done(self) -> bool:
        """Whether the work has ended, well or not; never blocks."""


class Stream(Protocol):
    """Runs work in order."""

    def submit(
        self, name: str, work: Callable[[], None], after: Sequence[Event] = ()
    ) -> Event:
        """Run `work` after everything submitted before and after the events `after`.

        Work whose `after` failed does not run; its event fails with the same exception.
        """

    def close(self) -> None:
        """End the stream after the work it has. Idempotent."""


class InlineStream:
    """Runs work at once in the calling thread; failures are raised by `submit`."""

    def submit(
        self, name: str, work: Callable[[], None], after: Sequence[Event] = ()
    ) -> Event:
        _wait_all(after)
        work()
        return _Ended(name)

    def close(self) -> None:
        pass


class ThreadStream:
    """Runs work on one daemon thread; failures are raised by the event's `wait`."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, name: str, work: Callable[[], None], after: Sequence[Event] = ()
    ) -> Event:
        if self._closed:
            raise RuntimeError(f"{name}: the stream is closed")
        task = _Task(name, work, after)
        self._queue.put(task)
        return task

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            # Drop the reference now: the queue may stay empty for long, and a task
            # keeps its events and through them the arrays it copied.
            del task


class _Ended:
    """The event of work that has already run."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class _Task:
    """Work of a thread stream and the event of its end."""

    __slots__ = ("_after", "_done", "_error", "_running", "_work", "name")

    def __init__(
        self, name: str, work: Callable[[], None], after: Sequence[Event]
    ) -> None:
        self.name = name
        self._work: Callable[[], None] | None = work
        self._after = after
        self._error: BaseException | None = None
        self._done = False
        # A bare lock that the worker releases: the cheapest thing two threads can meet
        # at. A forward waits once per layer.
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        work, after = self._work, self._after
        self._work, self._after = None, ()
        assert work is not None
        try:
            _wait_all(after)
            work()
        except BaseException as error:
            self._error = error
        self._done = True
        self._running.release()

    def wait(self) -> None:
        if not self._done:
            self._running.acquire()
            # Let the next waiter through.
            self._running.release()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._done


def _wait_all(events: Sequence[Event]) -> None:
    """Wait for every event, also after a failure: nothing may run on unwaited for."""
    failure: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure
