"""Streams that run nothing until told, then in the worst order their waits allow."""

from collections.abc import Callable, Sequence

from sglang_tiered.transfer.streams import Event


class Work:
    """Submitted work and the event of its end."""

    def __init__(
        self, stream: str, name: str, work: Callable[[], None], after: list[Event]
    ) -> None:
        self.stream = stream
        self.name = name
        self.work = work
        self.after = after
        self.has_run = False

    def wait(self) -> None:
        assert self.has_run, f"the host blocks on {self.name}"

    def done(self) -> bool:
        return self.has_run


class Recorder:
    """Three streams of one device.

    `forget(waiter, event)` makes every wait of work whose name starts with `waiter` for
    an event whose name starts with `event` disappear, as if the code left it out.
    """

    def __init__(self) -> None:
        self.submitted: list[Work] = []
        self._forgotten: tuple[str, str] | None = None
        self.forward = RecordingStream(self, "forward")
        self.schedule = RecordingStream(self, "schedule")
        self.fill = RecordingStream(self, "fill")

    def forget(self, waiter: str, event: str) -> None:
        self._forgotten = (waiter, event)

    def record(
        self,
        stream: str,
        name: str,
        work: Callable[[], None],
        after: Sequence[Event],
    ) -> Work:
        kept = list(after)
        if self._forgotten is not None and name.startswith(self._forgotten[0]):
            kept = [e for e in kept if not e.name.startswith(self._forgotten[1])]
        self.submitted.append(Work(stream, name, work, kept))
        return self.submitted[-1]

    def named(self, start: str) -> Work:
        """The last work whose name starts so."""
        return [work for work in self.submitted if work.name.startswith(start)][-1]

    def waits(self, start: str) -> list[str]:
        """Names of the events that this work waits for."""
        return [event.name for event in self.named(start).after]

    def run(self, *eager: str) -> None:
        """Run all that can run on these streams, work of the one named first first."""
        while ready := [work for work in self._ready() if work.stream in eager]:
            work = min(ready, key=lambda work: eager.index(work.stream))
            work.work()
            work.has_run = True

    def _ready(self) -> list[Work]:
        heads: dict[str, Work] = {}
        for work in self.submitted:
            if not work.has_run:
                heads.setdefault(work.stream, work)
        return [w for w in heads.values() if all(e.done() for e in w.after)]


class RecordingStream:
    """One of a recorder's streams."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def submit(
        self, name: str, work: Callable[[], None], after: Sequence[Event] = ()
    ) -> Event:
        return self._recorder.record(self._name, name, work, after)

    def close(self) -> None:
        pass
