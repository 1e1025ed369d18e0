import threading
from collections.abc import Iterator
from functools import partial

import pytest

from sglang_tiered.transfer.streams import Event, InlineStream, Stream, ThreadStream


class Broken(Exception):
    pass


def fail() -> None:
    raise Broken


def nothing() -> None:
    pass


class Opening:
    """An event that opens the gate of its work when it is waited for, not before."""

    def __init__(self, event: Event, gate: threading.Event) -> None:
        self.name = event.name
        self._event = event
        self._gate = gate

    def wait(self) -> None:
        self._gate.set()
        self._event.wait()

    def done(self) -> bool:
        return self._event.done()


def pass_through(gate: threading.Event) -> None:
    gate.wait()


@pytest.fixture
def thread() -> Iterator[ThreadStream]:
    stream = ThreadStream("test")
    yield stream
    stream.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.fixture(params=["inline", "thread"])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream]:
    made: Stream = InlineStream() if request.param == "inline" else ThreadStream("test")
    yield made
    made.close()


def test_work_has_run_after_the_wait(stream: Stream) -> None:
    ran: list[int] = []
    stream.submit("one", lambda: ran.append(1)).wait()
    assert ran == [1]


def test_an_event_has_the_name_of_its_work(stream: Stream) -> None:
    assert stream.submit("one", nothing).name == "one"


def test_an_event_is_done_after_the_wait(stream: Stream) -> None:
    event = stream.submit("one", nothing)
    event.wait()
    assert event.done()


def test_work_runs_in_the_order_of_submission(stream: Stream) -> None:
    ran: list[int] = []
    for number in range(100):
        last = stream.submit(str(number), partial(ran.append, number))
    last.wait()
    assert ran == list(range(100))


def test_close_is_idempotent(stream: Stream) -> None:
    stream.close()
    stream.close()


def test_a_thread_runs_beside_the_caller(
    thread: ThreadStream, gate: threading.Event
) -> None:
    event = thread.submit("one", partial(pass_through, gate))
    assert not event.done()
    gate.set()
    event.wait()


def test_inline_work_waits_for_the_events_before_it(
    thread: ThreadStream, gate: threading.Event
) -> None:
    ran: list[str] = []

    def first() -> None:
        gate.wait()
        ran.append("first")

    event = thread.submit("first", first)
    after = [Opening(event, gate)]
    InlineStream().submit("second", lambda: ran.append("second"), after)
    assert ran == ["first", "second"]


def test_a_thread_waits_for_the_events_of_another(
    thread: ThreadStream, gate: threading.Event
) -> None:
    ran: list[str] = []

    def first() -> None:
        gate.wait()
        ran.append("first")

    other = ThreadStream("other")
    event = other.submit("first", first)
    second = thread.submit("second", lambda: ran.append("second"), [event])
    gate.set()
    second.wait()
    assert ran == ["first", "second"]
    other.close()


def test_inline_failures_are_raised_by_submit() -> None:
    with pytest.raises(Broken):
        InlineStream().submit("one", fail)


def test_thread_failures_are_raised_by_every_wait(thread: ThreadStream) -> None:
    event = thread.submit("one", fail)
    for _ in range(2):
        with pytest.raises(Broken):
            event.wait()


def test_a_failed_event_is_done(thread: ThreadStream) -> None:
    event = thread.submit("one", fail)
    with pytest.raises(Broken):
        event.wait()
    assert event.done()


def test_work_after_a_failure_does_not_run(thread: ThreadStream) -> None:
    ran: list[int] = []
    failed = thread.submit("one", fail)
    with pytest.raises(Broken):
        thread.submit("two", lambda: ran.append(1), [failed]).wait()
    assert ran == []


def test_a_failure_does_not_stop_unrelated_work(thread: ThreadStream) -> None:
    ran: list[int] = []
    thread.submit("one", fail)
    thread.submit("two", lambda: ran.append(1)).wait()
    assert ran == [1]


def test_a_failed_wait_has_waited_for_the_other_events_too(
    thread: ThreadStream, gate: threading.Event
) -> None:
    """sglang#27444: the memory of a copy may be reused after a failure next to it."""
    failed = thread.submit("one", fail)
    slow = thread.submit("two", partial(pass_through, gate))
    with pytest.raises(Broken):
        InlineStream().submit("three", nothing, [failed, Opening(slow, gate)])
    assert slow.done()


def test_all_waiters_of_an_event_are_released(
    thread: ThreadStream, gate: threading.Event
) -> None:
    event = thread.submit("one", partial(pass_through, gate))
    waiters = [threading.Thread(target=event.wait, daemon=True) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    gate.set()
    for waiter in waiters:
        waiter.join(timeout=60)
    assert not any(waiter.is_alive() for waiter in waiters)


def test_close_lets_submitted_work_run_out(gate: threading.Event) -> None:
    ran: list[int] = []
    stream = ThreadStream("test")
    stream.submit("one", partial(pass_through, gate))
    for number in range(5):
        stream.submit("more", partial(ran.append, number))
    gate.set()
    stream.close()
    assert ran == [0, 1, 2, 3, 4]


def test_a_closed_stream_takes_no_work(thread: ThreadStream) -> None:
    thread.close()
    with pytest.raises(RuntimeError, match="one: the stream is closed"):
        thread.submit("one", nothing)
