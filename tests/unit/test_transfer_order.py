"""The order of copies and forwards, on recorded streams.

Each race is run twice on streams that order nothing but what they are told to: with all
waits the bytes are right, and with one wait left out the same run reads wrong ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from recording import Recorder
from where import on_host

from sglang_tiered.memory.backing import MemfdBacking
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.layout import PoolLayout, RowBuffer
from sglang_tiered.transfer.engine import TransferEngine

LAYERS = 4


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


class Rig:
    """An engine on recorded streams, with a forward that the test writes.

    Rows are one number wide. Host page h of layer l holds 100 * l + h and T0 page t
    holds -(100 * l + t).
    """

    def __init__(self) -> None:
        buffers = (RowBuffer("k", (1,), torch.float32),)
        layout = PoolLayout(1, 8, 4, 16, (buffers,) * LAYERS)
        self.recorder = Recorder()
        self.backing = MemfdBacking(layout)
        self.host = HostPool(layout)
        self.engine = TransferEngine(
            self.backing,
            self.host,
            schedule=self.recorder.schedule,
            fill=self.recorder.fill,
            forward=self.recorder.forward,
        )
        self.seen: list[float] = []
        for layer in range(LAYERS):
            self.host.pages(layer, "k")[:, 0] = 100 * layer + torch.arange(16)
            self.device(layer)[:9] = -100 * layer - torch.arange(9)

    def device(self, layer: int) -> torch.Tensor:
        return self.backing.pages(layer, "k")[:, 0]

    def window(self, *numbers: int) -> np.ndarray:
        return pages(*numbers) + self.backing.window_base

    def writes(self, t0_page: int, value: float) -> None:
        """The running forward writes a T0 page of every layer."""

        def compute() -> None:
            for layer in range(LAYERS):
                self.device(layer)[t0_page] = value

        self.recorder.forward.submit("compute", compute)

    def reads(self, layer: int, page: int) -> None:
        """The running forward reads a device page of a layer."""
        self.recorder.forward.submit(
            "compute", lambda: self.seen.append(float(self.device(layer)[page]))
        )

    def attends(self, host_page: int, *, layers: int = LAYERS) -> None:
        """A whole forward that reads one host page through window row 0."""
        self.engine.begin_forward(on_host(pages(host_page)), self.window(0))
        for layer in range(layers):
            self.engine.wait_until(layer)
            self.reads(layer, self.backing.window_base)
        self.engine.end_forward()


@pytest.fixture
def rig() -> Rig:
    return Rig()


@dataclass(frozen=True)
class Race:
    """Who waits for whom, and a run whose result is wrong if it does not."""

    report: str
    waiter: str
    event: str
    eager: tuple[str, str, str]
    run: Callable[[Rig], None]
    result: Callable[[Rig], list[float]]
    right: list[float]


def demote_what_a_forward_writes(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(pages()), pages())
    rig.writes(3, 7.0)
    rig.engine.end_forward()
    rig.engine.demote(pages(3), pages(5), written_epoch=1)


def demote_what_an_earlier_forward_wrote(rig: Rig) -> None:
    demote_what_a_forward_writes(rig)
    rig.engine.begin_forward(on_host(pages()), pages())
    rig.engine.end_forward()


def promote_into_what_a_forward_reads(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(pages()), pages())
    rig.reads(2, 3)
    rig.engine.end_forward()
    rig.engine.promote(on_host(pages(5)), pages(3))


def promote_into_what_a_forward_writes(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(pages()), pages())
    rig.writes(3, 7.0)
    rig.engine.end_forward()
    rig.engine.promote(on_host(pages(5)), pages(3))


def write_into_what_is_demoted(rig: Rig) -> None:
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    rig.engine.begin_forward(on_host(pages()), pages())
    rig.writes(3, 7.0)
    rig.engine.end_forward()


def read_what_is_promoted(rig: Rig) -> None:
    rig.engine.promote(on_host(pages(5)), pages(3))
    rig.engine.begin_forward(on_host(pages()), pages())
    rig.reads(2, 3)
    rig.engine.end_forward()


def fill_from_what_is_demoted(rig: Rig) -> None:
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    rig.attends(5)


def attend_once(rig: Rig) -> None:
    rig.attends(5)


def attend_twice(rig: Rig) -> None:
    rig.attends(5)
    rig.attends(6)


def host_page_5(rig: Rig) -> list[float]:
    return [float(rig.host.pages(layer, "k")[5, 0]) for layer in range(LAYERS)]


def t0_page_3(rig: Rig) -> list[float]:
    return [float(rig.device(layer)[3]) for layer in range(LAYERS)]


def what_was_read(rig: Rig) -> list[float]:
    return rig.seen


FORWARD_LAST = ("schedule", "fill", "forward")
FILL_FIRST = ("fill", "forward", "schedule")
FORWARD_FIRST = ("forward", "fill", "schedule")

RACES = [
    Race(
        "sglang#38463 vllm#45704 rows copied out while their forward writes them",
        waiter="demote",
        event="forward_done(1)",
        eager=FORWARD_LAST,
        run=demote_what_a_forward_writes,
        result=host_page_5,
        right=[7.0] * LAYERS,
    ),
    Race(
        "sglang#20611 the copy out races a forward that is not the last",
        waiter="demote",
        event="forward_done(1)",
        eager=FORWARD_LAST,
        run=demote_what_an_earlier_forward_wrote,
        result=host_page_5,
        right=[7.0] * LAYERS,
    ),
    Race(
        "sglang#36738 a page is loaded while a launched step reads it",
        waiter="promote",
        event="forward_done(1)",
        eager=FORWARD_LAST,
        run=promote_into_what_a_forward_reads,
        result=what_was_read,
        right=[-203.0],
    ),
    Race(
        "sglang#36738 a page is loaded while a launched step writes it",
        waiter="promote",
        event="forward_done(1)",
        eager=FORWARD_LAST,
        run=promote_into_what_a_forward_writes,
        result=t0_page_3,
        right=[5.0, 105.0, 205.0, 305.0],
    ),
    Race(
        "sglang#20611 a freed slot is written before it is copied out",
        waiter="forward_begin",
        event="demote",
        eager=FORWARD_FIRST,
        run=write_into_what_is_demoted,
        result=host_page_5,
        right=[-3.0, -103.0, -203.0, -303.0],
    ),
    Race(
        "sglang#36738 a loaded page is read before it has arrived",
        waiter="forward_begin",
        event="promote",
        eager=FORWARD_FIRST,
        run=read_what_is_promoted,
        result=what_was_read,
        right=[205.0],
    ),
    Race(
        "vllm#46014 a host page is read before its demotion has filled it",
        waiter="fill",
        event="demote",
        eager=FILL_FIRST,
        run=fill_from_what_is_demoted,
        result=what_was_read,
        right=[-3.0, -103.0, -203.0, -303.0],
    ),
    Race(
        "sglang#20611 attention reads a window that is not filled",
        waiter="read(1, 3)",
        event="fill",
        eager=FORWARD_FIRST,
        run=attend_once,
        result=what_was_read,
        right=[5.0, 105.0, 205.0, 305.0],
    ),
    Race(
        "sglang#20611 a fill overwrites a window that attention reads",
        waiter="fill(1, 2)",
        event="read_done(1, 0)",
        eager=FILL_FIRST,
        run=attend_once,
        result=what_was_read,
        right=[5.0, 105.0, 205.0, 305.0],
    ),
    Race(
        "sglang#20611 a fill overwrites a window that the step before reads",
        waiter="fill(2, 0)",
        event="forward_done(1)",
        eager=FILL_FIRST,
        run=attend_twice,
        result=what_was_read,
        right=[5.0, 105.0, 205.0, 305.0, 6.0, 106.0, 206.0, 306.0],
    ),
]


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.report)
def test_the_bytes_are_right_in_the_worst_order(race: Race, rig: Rig) -> None:
    race.run(rig)
    rig.recorder.run(*race.eager)
    assert race.result(rig) == race.right


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.report)
def test_the_bytes_are_wrong_without_the_wait(race: Race, rig: Rig) -> None:
    rig.recorder.forget(race.waiter, race.event)
    race.run(rig)
    rig.recorder.run(*race.eager)
    assert race.result(rig) != race.right


def test_every_copy_to_the_device_names_the_event_it_waits_for(rig: Rig) -> None:
    """sglang#36738."""
    rig.attends(5)
    rig.engine.promote(on_host(pages(6)), pages(3))
    rig.attends(7)
    to_device = [
        work
        for work in rig.recorder.submitted
        if work.name.startswith(("promote", "fill(2"))
    ]
    assert {work.name: [event.name for event in work.after] for work in to_device} == {
        "promote(1 pages)": ["forward_done(1)"],
        "fill(2, 0)": ["forward_done(1)"],
        "fill(2, 1)": ["forward_done(1)"],
        "fill(2, 2)": ["read_done(2, 0)"],
        "fill(2, 3)": ["read_done(2, 1)"],
    }


def test_a_promotion_waits_for_the_demotion_that_filled_its_source(rig: Rig) -> None:
    """vllm#46014."""
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    rig.engine.promote(on_host(pages(5)), pages(4))
    assert rig.recorder.waits("promote") == ["demote(1 pages)"]


def test_a_promotion_waits_for_the_demotion_of_its_target(rig: Rig) -> None:
    """sglang#36738: a slot with a copy out of it pending is not reusable."""
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    rig.engine.promote(on_host(pages(6)), pages(3))
    assert rig.recorder.waits("promote") == ["demote(1 pages)"]


def test_a_demotion_waits_for_the_promotion_that_fills_its_source(rig: Rig) -> None:
    """vllm#46014."""
    rig.engine.promote(on_host(pages(6, 7)), pages(3, 4))
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    assert rig.recorder.waits("demote") == ["promote(2 pages)"]


def test_a_demotion_waits_for_the_promotion_that_reads_its_target(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.engine.promote(on_host(pages(6)), pages(3))
    rig.engine.demote(pages(4), pages(6), written_epoch=0)
    assert rig.recorder.waits("demote") == ["promote(1 pages)"]


def test_copies_of_other_pages_do_not_wait_for_each_other(rig: Rig) -> None:
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    rig.engine.promote(on_host(pages(6)), pages(4))
    assert rig.recorder.waits("promote") == []


def test_a_demotion_does_not_wait_for_a_forward_that_only_reads(rig: Rig) -> None:
    rig.attends(5)
    rig.engine.demote(pages(3), pages(6), written_epoch=0)
    assert rig.recorder.waits("demote") == []


def test_sources_of_a_running_forward_are_pinned(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.attends(9)
    rig.attends(5)
    assert rig.engine.pinned_host_pages().tolist() == [5, 9]


def test_sources_are_free_once_their_forward_is_done(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.attends(9)
    rig.recorder.run(*FORWARD_LAST)
    rig.attends(5)
    assert rig.engine.pinned_host_pages().tolist() == [5]


def test_pages_of_pending_copies_are_pinned(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.engine.promote(on_host(pages(6)), pages(3))
    rig.engine.demote(pages(4), pages(2), written_epoch=0)
    assert rig.engine.pinned_host_pages().tolist() == [2, 6]


def test_a_forward_is_not_done_before_its_last_fill(rig: Rig) -> None:
    """sglang#27444, sglang#31427: layer 2 is filled though nothing reads it."""
    rig.attends(5, layers=2)
    assert rig.recorder.waits("forward_done(1)") == ["fill(1, 2)", "fill(1, 1)"]


def test_a_source_is_pinned_while_a_fill_nobody_reads_is_pending(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.attends(5, layers=0)
    rig.recorder.run("forward")
    assert rig.engine.pinned_host_pages().tolist() == [5]


def test_without_that_wait_a_source_is_free_while_it_is_read(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.recorder.forget("forward_done", "fill")
    rig.attends(5, layers=0)
    rig.recorder.run("forward")
    assert not rig.recorder.named("fill(1, 0)").done()
    assert rig.engine.pinned_host_pages().tolist() == []


def test_a_source_is_not_a_target_of_a_demotion(rig: Rig) -> None:
    """sglang#27444, sglang#31427."""
    rig.attends(5)
    with pytest.raises(RuntimeError, match="host pages that forward 1 reads"):
        rig.engine.demote(pages(3, 4), pages(6, 5), written_epoch=0)


def test_a_source_may_be_a_target_once_its_forward_is_done(rig: Rig) -> None:
    rig.attends(5)
    rig.recorder.run(*FORWARD_LAST)
    rig.engine.demote(pages(3), pages(5), written_epoch=0)
    rig.recorder.run(*FORWARD_LAST)
    assert host_page_5(rig) == [-3.0, -103.0, -203.0, -303.0]


def test_epochs_complete_in_order(rig: Rig) -> None:
    rig.attends(5)
    rig.attends(6)
    assert (rig.engine.submitted_epoch, rig.engine.done_epoch) == (2, 0)
    rig.recorder.run(*FORWARD_LAST)
    assert rig.engine.done_epoch == 2


def test_the_fill_of_the_next_layer_is_issued_before_this_one_is_read(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(pages(5)), rig.window(0))
    issued = []
    for layer in range(LAYERS):
        rig.engine.wait_until(layer)
        names = [work.name for work in rig.recorder.submitted]
        issued.append(sum(name.startswith("fill") for name in names))
    assert issued == [2, 3, 4, 4]


def test_the_wait_for_the_value_does_nothing_after_that_for_the_key(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(pages(5)), rig.window(0))
    rig.engine.wait_until(0)
    submitted = len(rig.recorder.submitted)
    rig.engine.wait_until(0)
    assert len(rig.recorder.submitted) == submitted


def test_plans_are_kept_as_they_were_given(rig: Rig) -> None:
    """vllm#39702: the caller's tables move on before the copy runs."""
    source, target = pages(3), pages(5)
    rig.engine.demote(source, target, written_epoch=0)
    source[0], target[0] = 4, 6
    rig.recorder.run(*FORWARD_LAST)
    assert host_page_5(rig) == [-3.0, -103.0, -203.0, -303.0]


def test_the_books_agree_at_any_time(rig: Rig) -> None:
    rig.engine.check_integrity()
    rig.engine.begin_forward(on_host(pages(5)), rig.window(0))
    rig.engine.check_integrity()
    rig.engine.end_forward()
    rig.engine.check_integrity()
    rig.recorder.run(*FORWARD_LAST)
    rig.engine.check_integrity()
