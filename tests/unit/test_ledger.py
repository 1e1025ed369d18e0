"""Who owns which slot: each transition, what it refuses, and what an audit finds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import pages

from sglang_tiered.memory.ledger import NONE, Ledger

T0, HOST, WINDOW = 4, 6, 3


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(
        t0_pages=T0, host_pages=HOST, window_pages=WINDOW, max_rows=4, page_size=4
    )


@pytest.fixture
def tree(ledger: Ledger) -> np.ndarray:
    """Three cold tree pages in T0."""
    new = ledger.allocate(3, epoch=1)
    ledger.give_to_tree(new)
    return new


def counts(ledger: Ledger) -> dict[str, int]:
    ledger.check_integrity()
    return {
        name: getattr(ledger, name)
        for name in ("t0_read", "t0_unread", "t1", "unplaced", "clean")
        if getattr(ledger, name)
    } | ({"window": ledger.window.used} if ledger.window.used else {})


# -- allocate


def test_there_is_a_virtual_page_for_every_t0_and_host_page(ledger: Ledger) -> None:
    assert ledger.virtual.count == T0 + HOST


def test_the_sink_is_never_handed_out(ledger: Ledger) -> None:
    assert 0 not in ledger.virtual.free_slots()
    assert 0 not in ledger.t0.free_slots()


def test_a_new_page_is_in_t0(ledger: Ledger) -> None:
    new = ledger.allocate(2, epoch=1)
    assert ledger.at_t0[ledger.t0_page[new]].tolist() == new.tolist()


def test_a_new_page_is_private_and_read_by_its_owner(ledger: Ledger) -> None:
    new = ledger.allocate(2, epoch=1)
    assert ledger.private[new].all()
    assert counts(ledger) == {"t0_read": 2}


def test_a_new_page_remembers_the_forward_that_writes_it(ledger: Ledger) -> None:
    assert ledger.born[ledger.allocate(2, epoch=7)].tolist() == [7, 7]


def test_a_new_page_is_not_dressed_in_the_last_life_of_its_id(ledger: Ledger) -> None:
    old = ledger.allocate(1, epoch=1)
    ledger.rows.prompt[2] = 1
    ledger.assign(old, pages(2), pages(3))
    ledger.demote(old)
    ledger.promote(old, epoch=5)
    ledger.release(old)
    again = ledger.allocate(1, epoch=9)
    assert again.tolist() == old.tolist()
    facts = (ledger.owner, ledger.index, ledger.promoted, ledger.host_page)
    assert [int(fact[again[0]]) for fact in facts] == [NONE, 0, 0, NONE]
    assert not ledger.generated[again].any()


def test_more_pages_than_t0_has_are_refused(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="5 pages asked for; 4 T0 pages"):
        ledger.allocate(5, epoch=1)


def test_a_refused_allocation_takes_nothing(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError):
        ledger.allocate(5, epoch=1)
    assert counts(ledger) == {}


# -- release


def test_release_frees_every_slot(ledger: Ledger) -> None:
    new = ledger.allocate(3, epoch=1)
    ledger.demote(new[:2])
    ledger.promote(new[:1], epoch=1)
    ledger.release(new)
    used = [p.used for p in (ledger.virtual, ledger.t0, ledger.host, ledger.window)]
    assert used == [0, 0, 0, 0]
    assert counts(ledger) == {}


def test_release_answers_the_t0_pages_that_became_free(ledger: Ledger) -> None:
    new = ledger.allocate(3, epoch=1)
    in_t0 = ledger.t0_page[new[1:]].copy()
    ledger.demote(new[:1])
    assert ledger.release(new).tolist() == in_t0.tolist()


def test_host_and_window_slots_rest_until_the_forward_is_over(ledger: Ledger) -> None:
    new = ledger.allocate(2, epoch=1)
    ledger.demote(new)
    ledger.release(new, epoch=5)
    assert (ledger.host.quarantined, ledger.window.quarantined) == (2, 2)


def test_sglang_jax_982_a_double_free_is_refused(ledger: Ledger) -> None:
    """sglang-jax#982."""
    new = ledger.allocate(2, epoch=1)
    ledger.release(new[:1])
    with pytest.raises(RuntimeError, match="double free of virtual pages"):
        ledger.release(new)
    assert counts(ledger) == {"t0_read": 1}


def test_a_page_named_twice_is_refused(ledger: Ledger) -> None:
    new = ledger.allocate(1, epoch=1)
    with pytest.raises(RuntimeError, match="double free"):
        ledger.release(np.repeat(new, 2))


def test_the_sink_cannot_be_freed(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="double free"):
        ledger.release(pages(0))


def test_a_refused_release_changes_nothing(ledger: Ledger) -> None:
    new = ledger.allocate(2, epoch=1)
    with pytest.raises(RuntimeError):
        ledger.release(np.repeat(new, 2))
    assert counts(ledger) == {"t0_read": 2}


def test_a_tree_page_that_a_request_reads_cannot_be_freed(
    ledger: Ledger, tree: np.ndarray
) -> None:
    """LMCache#3130: eviction with an open reader."""
    ledger.read(tree[:1])
    with pytest.raises(RuntimeError, match="while a request reads them"):
        ledger.release(tree)


def test_a_parked_page_cannot_be_freed(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.park(tree[:1])
    with pytest.raises(RuntimeError, match="while a request reads them"):
        ledger.release(tree)


def test_an_idle_private_page_can_be_freed(ledger: Ledger) -> None:
    new = ledger.allocate(1, epoch=1)
    ledger.unread(new, epoch=1)
    ledger.release(new)
    assert counts(ledger) == {}


# -- owners


def test_pages_are_named_by_row_and_number(ledger: Ledger) -> None:
    new = ledger.allocate(2, epoch=1)
    ledger.assign(new, pages(3, 3), pages(0, 1))
    assert ledger.owner[new].tolist() == [3, 3]
    assert ledger.index[new].tolist() == [0, 1]


def test_pages_from_the_end_of_the_prompt_on_are_generated(ledger: Ledger) -> None:
    new = ledger.allocate(3, epoch=1)
    ledger.rows.prompt[1] = 6  # ends inside page 1
    ledger.assign(new, pages(1, 1, 1), pages(0, 1, 2))
    assert ledger.generated[new].tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(5, [False, True, False]), (8, [False, False, False]), (3, [True, False, False])],
)
def test_only_a_partly_filled_last_page_is_open(
    length: int, expected: list[bool], ledger: Ledger
) -> None:
    new = ledger.allocate(3, epoch=1)
    ledger.assign(new, pages(1, 1, 1), pages(0, 1, 2))
    ledger.rows.length[1] = length
    assert ledger.is_open(new).tolist() == expected


def test_pages_of_one_token_are_never_open() -> None:
    ledger = Ledger(t0_pages=4, host_pages=4, window_pages=2, max_rows=2, page_size=1)
    new = ledger.allocate(1, epoch=1)
    ledger.assign(new, pages(1), pages(0))
    ledger.rows.length[1] = 1
    assert not ledger.is_open(new).any()


def test_a_partly_filled_page_of_an_idle_session_is_not_open(ledger: Ledger) -> None:
    new = ledger.allocate(1, epoch=1)
    ledger.assign(new, pages(1), pages(0))
    ledger.rows.length[1] = 3
    ledger.unread(new, epoch=1)
    assert not ledger.is_open(new).any()


def test_sglang_18803_a_page_is_not_taken_for_one_of_the_next_request(
    ledger: Ledger,
) -> None:
    """sglang#18803: rows are recycled, so a page names row and generation."""
    new = ledger.allocate(1, epoch=1)
    ledger.assign(new, pages(1), pages(0))
    ledger.rows.length[1] = 3
    assert ledger.is_open(new).all()
    ledger.rows.renew(1)
    ledger.rows.length[1] = 3
    assert not ledger.is_open(new).any()


def test_a_new_request_begins_with_an_empty_row(ledger: Ledger) -> None:
    rows = ledger.rows
    rows.length[1] = rows.prompt[1] = rows.steps[1] = 9
    rows.streamed[1] = True
    rows.renew(1)
    facts = [rows.length, rows.prompt, rows.steps, rows.streamed]
    assert [int(fact[1]) for fact in facts] == [0] * 4


# -- the tree


def test_a_page_of_the_tree_is_read_by_nobody(ledger: Ledger, tree: np.ndarray) -> None:
    assert not ledger.private[tree].any()
    assert counts(ledger) == {"t0_unread": 3}


def test_the_tree_lock_of_the_owner_goes_on_reading(ledger: Ledger) -> None:
    new = ledger.allocate(1, epoch=1)
    ledger.read(new)
    ledger.give_to_tree(new)
    assert counts(ledger) == {"t0_read": 1}


def test_sglang_27666_giving_to_the_tree_moves_no_bytes(ledger: Ledger) -> None:
    """sglang#27666."""
    new = ledger.allocate(2, epoch=1)
    ledger.demote(new[:1])
    ledger.read(new)
    before = [t[new].tolist() for t in (ledger.t0_page, ledger.host_page)]
    ledger.give_to_tree(new)
    assert [t[new].tolist() for t in (ledger.t0_page, ledger.host_page)] == before


def test_an_idle_page_can_be_given_to_the_tree(ledger: Ledger) -> None:
    new = ledger.allocate(1, epoch=1)
    ledger.unread(new, epoch=1)
    ledger.give_to_tree(new)
    assert counts(ledger) == {"t0_unread": 1}


def test_the_tree_is_not_given_what_it_has(ledger: Ledger, tree: np.ndarray) -> None:
    with pytest.raises(RuntimeError, match="only private pages"):
        ledger.give_to_tree(tree[:1])


def test_the_tree_is_not_given_dead_pages(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="only private pages"):
        ledger.give_to_tree(pages(1))


# -- readers


def test_readers_are_counted(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.read(tree)
    ledger.read(tree[:1])
    ledger.unread(tree, epoch=1)
    assert counts(ledger) == {"t0_read": 1, "t0_unread": 2}


def test_the_last_reader_leaves_a_cold_page(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.read(tree)
    ledger.read(tree[:1])
    assert ledger.unread(tree, epoch=8).tolist() == tree[1:].tolist()
    assert ledger.last_read[tree].tolist() == [0, 8, 8]


def test_lmcache_2954_readers_never_go_negative(
    ledger: Ledger, tree: np.ndarray
) -> None:
    """LMCache#2954."""
    with pytest.raises(RuntimeError, match="nobody was reading"):
        ledger.unread(tree[:1], epoch=1)


@settings(max_examples=100, deadline=None)
@given(
    visits=st.lists(
        st.tuples(
            st.sampled_from(["read", "park"]),
            st.sets(st.integers(0, 2), min_size=1),
        ),
        min_size=1,
        max_size=6,
    ),
    data=st.data(),
)
def test_lmcache_2017_readers_that_come_and_go_in_any_order_leave_nothing(
    visits: list[tuple[str, set[int]]], data: st.DataObject
) -> None:
    """LMCache#2017: pins leaked. Pages move while they are read, too."""
    ledger = Ledger(
        t0_pages=T0, host_pages=HOST, window_pages=WINDOW, max_rows=4, page_size=4
    )
    tree = ledger.allocate(3, epoch=1)
    ledger.give_to_tree(tree)
    coming, here = list(visits), []
    while coming or here:
        what = data.draw(st.sampled_from(["come", "go", "move"]))
        if what == "move":
            pages_read = tree[ledger.readers[tree] > 0]
            ledger.demote(pages_read[ledger.t0_page[pages_read] >= 0])
        elif coming and (what == "come" or not here):
            kind, which = coming.pop()
            here.append((kind, tree[sorted(which)]))
            getattr(ledger, kind)(here[-1][1])
        elif here:
            kind, gone = here.pop(data.draw(st.integers(0, len(here) - 1)))
            ledger.unread(gone, epoch=0) if kind == "read" else ledger.unpark(gone)
        ledger.check_integrity()
        expected = Counter(
            (kind, page) for kind, held in here for page in held.tolist()
        )
        for kind, count in (("read", ledger.readers), ("park", ledger.parks)):
            assert count[tree].tolist() == [expected[kind, page] for page in tree]
    assert ledger.window.used == ledger.unplaced == ledger.t0_read == 0
    with pytest.raises(RuntimeError, match="nobody was reading"):
        ledger.unread(tree[:1], epoch=0)
    with pytest.raises(RuntimeError, match="not parked"):
        ledger.unpark(tree[:1])
    ledger.release(tree)
    assert counts(ledger) == {}


def test_a_page_read_in_t1_has_no_place_yet(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree)
    ledger.read(tree[:2])
    assert ledger.unplaced_pages().tolist() == tree[:2].tolist()
    assert counts(ledger) == {"t1": 3, "unplaced": 2}


def test_a_page_without_readers_leaves_the_window(
    ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.read(tree[:2])
    ledger.demote(tree[:2])
    ledger.unread(tree[:1], epoch=4)
    assert ledger.window_page[tree[:1]].tolist() == [NONE]
    assert ledger.window.quarantined == 1


def test_read_pages_are_counted_wherever_they_are(
    ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.demote(tree[:1])
    ledger.read(tree)
    ledger.demote(tree[1:2])
    assert ledger.read_pages == 3


def test_parks_never_go_negative(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.park(tree)
    ledger.unpark(tree)
    with pytest.raises(RuntimeError, match="not parked"):
        ledger.unpark(tree[:1])


def test_a_parked_page_has_no_reader(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.park(tree)
    assert counts(ledger) == {"t0_unread": 3}


# -- moves


def test_a_demoted_page_is_on_the_host(ledger: Ledger, tree: np.ndarray) -> None:
    source = ledger.t0_page[tree[:1]].copy()
    copies = ledger.demote(tree[:1])
    assert copies.t0_pages.tolist() == source.tolist()
    assert copies.host_pages.tolist() == ledger.host_page[tree[:1]].tolist()
    assert counts(ledger) == {"t0_unread": 2, "t1": 1}


def test_a_read_page_is_demoted_into_the_window(
    ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.read(tree[:2])
    ledger.demote(tree)
    assert ledger.in_window().tolist() == tree[:2].tolist()


def test_a_promoted_page_keeps_its_copy(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree)
    host = ledger.host_page[tree].copy()
    slots = ledger.promote(tree, epoch=3)
    assert ledger.host_page[tree].tolist() == host.tolist()
    assert slots.tolist() == ledger.t0_page[tree].tolist()
    assert counts(ledger) == {"t0_unread": 3, "clean": 3}


def test_a_promoted_page_leaves_the_window(ledger: Ledger) -> None:
    new = ledger.allocate(1, epoch=1)
    ledger.demote(new)
    ledger.promote(new, epoch=3)
    assert (ledger.window.used, ledger.window.quarantined) == (0, 1)


def test_a_promotion_is_remembered(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:1])
    ledger.promote(tree[:1], epoch=3)
    assert ledger.promoted[tree].tolist() == [3, 0, 0]


def test_a_clean_page_is_demoted_without_a_copy(
    ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.demote(tree[:1])
    host = int(ledger.host_page[tree[0]])
    ledger.promote(tree[:1], epoch=3)
    assert len(ledger.demote(tree[:1])) == 0
    assert int(ledger.host_page[tree[0]]) == host


def test_only_dirty_pages_are_copied(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:1])
    ledger.promote(tree[:1], epoch=3)
    dirty = ledger.t0_page[tree[1:]].copy()
    assert ledger.demote(tree).t0_pages.tolist() == dirty.tolist()


def test_a_page_in_t1_is_not_demoted(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:1])
    with pytest.raises(RuntimeError, match="only T0 pages"):
        ledger.demote(tree)


def test_a_page_in_t0_is_not_promoted(ledger: Ledger, tree: np.ndarray) -> None:
    with pytest.raises(RuntimeError, match="only T1 pages"):
        ledger.promote(tree[:1], epoch=1)


def test_a_dead_page_is_not_promoted(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="only T1 pages"):
        ledger.promote(pages(1), epoch=1)


def test_an_unplaced_page_enters_the_window(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:2])
    ledger.read(tree[:2])
    ledger.enter_window(tree[:1])
    assert counts(ledger) == {"t0_unread": 1, "t1": 2, "unplaced": 1, "window": 1}


def test_window_changes_are_seen(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:1])
    ledger.read(tree[:1])
    seen = ledger.window_version
    ledger.enter_window(tree[:1])
    assert ledger.window_version > seen


def test_a_dropped_copy_makes_a_page_dirty(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:1])
    ledger.promote(tree[:1], epoch=1)
    ledger.drop_copies(tree[:1])
    assert counts(ledger) == {"t0_unread": 3}
    assert ledger.host.used == 0


def test_dropping_a_copy_that_is_not_there_changes_nothing(
    ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.drop_copies(tree)
    assert counts(ledger) == {"t0_unread": 3}


def test_the_only_copy_is_never_dropped(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.demote(tree[:1])
    with pytest.raises(RuntimeError, match="loses its rows"):
        ledger.drop_copies(tree[:1])


def test_sglang_27444_a_source_that_a_forward_reads_is_not_reused(
    ledger: Ledger, tree: np.ndarray
) -> None:
    """sglang#27444, sglang#31427: T1 fills up while a copy from it is pending."""
    ledger.demote(tree)
    ledger.promote(tree, epoch=5)
    ledger.drop_copies(tree, epoch=5)
    assert ledger.host.available == HOST - 3
    ledger.host.retire(5)
    assert ledger.host.available == HOST


# -- reset and audit


def test_a_reset_leaves_nothing(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.read(tree)
    ledger.park(tree)
    ledger.demote(tree[:2])
    ledger.reset()
    assert counts(ledger) == {}
    assert ledger.virtual.available == T0 + HOST


def test_a_reset_keeps_the_tables_where_they_are(ledger: Ledger) -> None:
    before = [id(ledger.t0_page), id(ledger.host_page), id(ledger.at_t0)]
    ledger.reset()
    assert [id(ledger.t0_page), id(ledger.host_page), id(ledger.at_t0)] == before


def test_a_reset_ends_the_life_of_every_row(ledger: Ledger) -> None:
    before = ledger.rows.generation.copy()
    ledger.reset()
    assert (ledger.rows.generation > before).all()


@pytest.mark.parametrize(
    "name",
    ["t0_page", "host_page", "window_page", "readers", "at_t0", "at_window"],
)
def test_an_audit_finds_a_wrong_entry(
    name: str, ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.read(tree[:2])
    ledger.demote(tree[:2])
    ledger.check_integrity()
    table = getattr(ledger, name)
    table[np.flatnonzero(table > 0)[0]] = 0 if name.startswith("at_") else NONE
    with pytest.raises(AssertionError):
        ledger.check_integrity()


@pytest.mark.parametrize(
    "name",
    ["t0_read", "t0_unread", "t1", "t2", "t3", "exact", "unplaced", "clean"],
)
@pytest.mark.parametrize("by", [-1, 1])
def test_sglang_35270_every_counter_is_the_size_of_its_set(
    name: str, by: int, ledger: Ledger, tree: np.ndarray
) -> None:
    """sglang#35270: of pages that are shared, too."""
    ledger.read(tree[:2])
    ledger.read(tree[:1])
    ledger.check_integrity()
    setattr(ledger, name, getattr(ledger, name) + by)
    with pytest.raises(AssertionError):
        ledger.check_integrity()


def test_sglang_35270_a_page_with_two_readers_is_one_page(
    ledger: Ledger, tree: np.ndarray
) -> None:
    """sglang#35270: shared pages were counted twice."""
    ledger.read(tree)
    ledger.read(tree[:2])
    assert counts(ledger) == {"t0_read": 3}
    assert ledger.read_pages == 3
    ledger.demote(tree[:1])
    assert counts(ledger) == {"t0_read": 2, "t1": 1, "window": 1}
    assert ledger.read_pages == 3


def test_a_leak_is_found(ledger: Ledger, tree: np.ndarray) -> None:
    ledger.live[tree[0]] = False
    with pytest.raises(AssertionError, match="live pages"):
        ledger.check_integrity()


def test_sglang_6888_a_surplus_is_found(ledger: Ledger, tree: np.ndarray) -> None:
    """sglang#6888: more free than the pool owns."""
    ledger.t0.free(ledger.t0_page[tree[:1]])
    with pytest.raises(AssertionError, match="T0"):
        ledger.check_integrity()


def test_an_audit_finds_a_slot_with_two_owners(
    ledger: Ledger, tree: np.ndarray
) -> None:
    ledger.t0_page[tree[0]] = ledger.t0_page[tree[1]]
    with pytest.raises(AssertionError, match="T0 page with two owners"):
        ledger.check_integrity()
