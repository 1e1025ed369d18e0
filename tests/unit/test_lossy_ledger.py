"""T2 and T3 in the ledger: rounded pages and dropped ones."""

import numpy as np
import pytest
from tiers import pages

from sglang_tiered.memory.ledger import NONE, UNLIMITED, Ledger

T0, HOST, WINDOW, INT8 = 4, 6, 3, 2
ROW = 2


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(
        t0_pages=T0,
        host_pages=HOST,
        window_pages=WINDOW,
        int8_pages=INT8,
        max_rows=4,
        page_size=4,
    )


@pytest.fixture
def own(ledger: Ledger) -> np.ndarray:
    """Three pages of one request, the 5th to 7th of its sequence, in T0."""
    new = ledger.allocate(3, epoch=1)
    ledger.assign(new, np.full(3, ROW), pages(5, 6, 7))
    return new


def used(ledger: Ledger) -> dict[str, int]:
    ledger.check_integrity()
    pools = {
        "t0": ledger.t0,
        "host": ledger.host,
        "window": ledger.window,
        "int8": ledger.int8,
    }
    return {name: pool.used for name, pool in pools.items() if pool.used}


# -- T2


def test_a_rounded_page_leaves_t0_and_is_read_through_the_window(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.compress(own[:2], epoch=1)
    assert used(ledger) == {"t0": 1, "window": 2, "int8": 2}
    assert (ledger.t1, ledger.t2) == (0, 2)


def test_a_page_of_t1_gives_up_its_host_page_and_keeps_its_window_page(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.demote(own[:1])
    window = ledger.window_page[own[0]]
    ledger.compress(own[:1], epoch=1)
    ledger.host.retire(1)
    assert used(ledger) == {"t0": 2, "window": 1, "int8": 1}
    assert ledger.window_page[own[0]] == window


def test_a_new_source_for_a_window_page_is_a_new_plan(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.demote(own[:1])
    before = ledger.window_version
    ledger.compress(own[:1], epoch=1)
    assert ledger.window_version != before


def test_the_host_page_of_a_rounded_page_waits_for_the_forward_that_reads_it(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.demote(own[:1])
    ledger.compress(own[:1], epoch=4)
    assert ledger.host.quarantined == 1


def test_a_rounded_page_that_is_promoted_stays_lossy(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.promote(own[:1], epoch=2)
    assert ledger.is_lossy(own).tolist() == [True, False, False]
    assert ledger.has_copy(own).tolist() == [True, False, False]
    ledger.window.retire(2)
    assert used(ledger) == {"t0": 3, "int8": 1}


def test_it_goes_back_without_a_copy_or_a_host_page(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.promote(own[:1], epoch=2)
    assert len(ledger.demote(own[:1])) == 0
    assert (ledger.t1, ledger.t2, ledger.host.used) == (0, 1, 0)


def test_no_page_is_rounded_twice(ledger: Ledger, own: np.ndarray) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.promote(own[:1], epoch=2)
    with pytest.raises(RuntimeError, match="only exact private pages"):
        ledger.compress(own[:1], epoch=2)


def test_no_page_of_the_tree_is_rounded(ledger: Ledger, own: np.ndarray) -> None:
    ledger.give_to_tree(own)
    with pytest.raises(RuntimeError, match="only exact private pages"):
        ledger.compress(own[:1], epoch=1)


def test_sglang_35888_a_rounded_page_moves_with_its_one_record(
    ledger: Ledger, own: np.ndarray
) -> None:
    """sglang#35888: there is no second slot, of scales, that could stay behind."""
    record = ledger.compress(own[:1], epoch=1)
    for move in (ledger.promote, lambda page, _: ledger.demote(page)):
        move(own[:1], 1)
        assert ledger.int8_page[own[:1]].tolist() == record.tolist()
        assert ledger.int8.used == 1
    assert (ledger.t1, ledger.t2, ledger.host.used) == (0, 1, 0)


@pytest.mark.parametrize("how", ["release", "drop"])
def test_sglang_35888_a_rounded_page_is_freed_with_its_record(
    ledger: Ledger, own: np.ndarray, how: str
) -> None:
    """sglang#35888: and so once the forward that reads it is over, not before."""
    ledger.compress(own[:2], epoch=1)
    getattr(ledger, how)(own, 1)
    assert (ledger.int8.used, ledger.int8.available) == (0, 0)
    assert used(ledger) == {}
    ledger.int8.retire(1)
    assert ledger.int8.available == INT8


# -- T3


def test_a_dropped_page_has_no_bytes_and_keeps_its_id(
    ledger: Ledger, own: np.ndarray
) -> None:
    slots = ledger.t0_page[own[:2]].copy()
    assert ledger.drop(own[:2], epoch=1).tolist() == slots.tolist()
    assert used(ledger) == {"t0": 1}
    assert (ledger.virtual.used, ledger.t3) == (3, 2)


@pytest.mark.parametrize("tier", ["T1", "T2"])
def test_a_page_is_dropped_from_any_tier(
    ledger: Ledger, own: np.ndarray, tier: str
) -> None:
    if tier == "T1":
        ledger.demote(own[:1])
    else:
        ledger.compress(own[:1], epoch=1)
    ledger.drop(own[:1], epoch=0)
    assert used(ledger) == {"t0": 2}


def test_a_dropped_page_waits_for_no_place(ledger: Ledger, own: np.ndarray) -> None:
    ledger.drop(own[:1], epoch=1)
    assert ledger.unplaced == len(ledger.unplaced_pages()) == 0


def test_no_page_is_dropped_twice(ledger: Ledger, own: np.ndarray) -> None:
    ledger.drop(own[:1], epoch=1)
    with pytest.raises(RuntimeError, match="only once"):
        ledger.drop(own[:1], epoch=1)


def test_no_page_of_the_tree_is_dropped(ledger: Ledger, own: np.ndarray) -> None:
    ledger.give_to_tree(own)
    with pytest.raises(RuntimeError, match="only private pages"):
        ledger.drop(own[:1], epoch=1)


def test_the_id_of_a_dropped_page_starts_a_new_life(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.drop(own, epoch=1)
    ledger.release(own)
    again = ledger.allocate(3, epoch=2)
    assert set(again.tolist()) == set(own.tolist())
    assert not ledger.dropped[again].any()
    ledger.check_integrity()


@pytest.mark.parametrize("how", ["compress", "drop"])
def test_the_tree_takes_exact_pages_only(
    ledger: Ledger, own: np.ndarray, how: str
) -> None:
    getattr(ledger, how)(own[1:2], 1)
    with pytest.raises(RuntimeError, match="exact pages only"):
        ledger.give_to_tree(own)


# -- what a request has lost


def test_a_request_is_exact_up_to_its_lowest_lossy_page(
    ledger: Ledger, own: np.ndarray
) -> None:
    rows = ledger.rows
    assert (rows.is_lossy(ROW), rows.exact_pages[ROW]) == (False, UNLIMITED)
    ledger.drop(own[2:], epoch=1)
    ledger.compress(own[1:2], epoch=1)
    assert (rows.is_lossy(ROW), rows.exact_pages[ROW]) == (True, 6)


def test_what_was_lost_is_counted(ledger: Ledger, own: np.ndarray) -> None:
    ledger.compress(own[:2], epoch=1)
    ledger.drop(own[1:], epoch=1)
    assert ledger.rows.compressed[ROW] == ledger.rows.dropped[ROW] == 2


def test_the_next_request_of_the_row_has_lost_nothing(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.drop(own[1:], epoch=1)
    ledger.rows.renew(ROW)
    rows = ledger.rows
    assert rows.compressed[ROW] == rows.dropped[ROW] == rows.dropped_error[ROW] == 0
    assert not rows.is_lossy(ROW)


# -- capacity


def test_there_is_a_virtual_page_for_every_int8_page(ledger: Ledger) -> None:
    assert ledger.virtual.count == T0 + HOST + INT8


def test_but_exact_pages_must_fit_t0_and_the_host(ledger: Ledger) -> None:
    assert ledger.available == T0 + HOST


def test_an_int8_page_in_use_makes_room_for_an_exact_one(
    ledger: Ledger, own: np.ndarray
) -> None:
    assert ledger.available == T0 + HOST - 3
    ledger.compress(own[:2], epoch=1)
    assert ledger.available == T0 + HOST - 1


def test_a_dropped_page_holds_its_id(ledger: Ledger, own: np.ndarray) -> None:
    """It makes room for an exact page only while ids are left."""
    ledger.drop(own, epoch=1)
    assert ledger.available == T0 + HOST + INT8 - 3


# -- what an audit finds


def test_an_audit_finds_a_page_without_bytes(ledger: Ledger, own: np.ndarray) -> None:
    ledger.dropped[own[0]] = True
    with pytest.raises(AssertionError, match="bytes nowhere, or of a dropped page"):
        ledger.check_integrity()


def test_an_audit_finds_inexact_rows_in_the_tree(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.private[own[0]] = False
    with pytest.raises(AssertionError, match="the tree has inexact rows"):
        ledger.check_integrity()


def test_an_audit_finds_a_lost_int8_page(ledger: Ledger, own: np.ndarray) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.int8.alloc(1)
    with pytest.raises(AssertionError, match="int8: 1 pages owned, 2 handed out"):
        ledger.check_integrity()


def test_an_audit_finds_an_exact_copy_of_a_lossy_page(
    ledger: Ledger, own: np.ndarray
) -> None:
    ledger.compress(own[:1], epoch=1)
    ledger.host_page[own[0]] = ledger.host.alloc(1)[0]
    assert ledger.host_page[own[0]] != NONE
    with pytest.raises(AssertionError, match="an exact and a lossy copy"):
        ledger.check_integrity()
