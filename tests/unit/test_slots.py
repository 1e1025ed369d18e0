"""Free lists: every slot is free, quarantined or owned, once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.memory.slots import SlotPool


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool("slot", 6, first=1)


def test_a_new_pool_is_free(pool: SlotPool) -> None:
    assert (pool.available, pool.used, pool.quarantined) == (6, 0, 0)


def test_the_lowest_slots_come_first(pool: SlotPool) -> None:
    assert pool.alloc(3).tolist() == [1, 2, 3]


def test_slots_are_int64(pool: SlotPool) -> None:
    assert pool.alloc(2).dtype == np.int64


def test_no_slots_may_be_asked_for(pool: SlotPool) -> None:
    assert pool.alloc(0).tolist() == []


def test_what_was_handed_out_is_not_handed_out_again(pool: SlotPool) -> None:
    assert set(pool.alloc(4)).isdisjoint(pool.alloc(2))


def test_the_caller_may_keep_the_answer(pool: SlotPool) -> None:
    first = pool.alloc(3)
    pool.free(first)
    pool.alloc(2)
    assert first.tolist() == [1, 2, 3]


def test_more_than_is_free_is_refused(pool: SlotPool) -> None:
    pool.alloc(4)
    with pytest.raises(RuntimeError, match="3 slots asked for, 2 free"):
        pool.alloc(3)


def test_a_refused_request_takes_nothing(pool: SlotPool) -> None:
    with pytest.raises(RuntimeError):
        pool.alloc(7)
    assert pool.available == 6


def test_a_freed_slot_is_handed_out_again(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.free(slots(4))
    assert pool.alloc(1).tolist() == [4]


def test_freeing_nothing_changes_nothing(pool: SlotPool) -> None:
    pool.free(slots())
    assert pool.available == 6


def test_sglang_jax_982_a_double_free_is_refused(pool: SlotPool) -> None:
    """sglang-jax#982."""
    pool.alloc(3)
    pool.free(slots(2))
    with pytest.raises(RuntimeError, match=r"double free of slots \[2\]"):
        pool.free(slots(1, 2))


def test_a_slot_that_was_never_handed_out_is_not_freed(pool: SlotPool) -> None:
    with pytest.raises(RuntimeError, match="double free"):
        pool.free(slots(5))


def test_a_refused_free_changes_nothing(pool: SlotPool) -> None:
    pool.alloc(2)
    with pytest.raises(RuntimeError):
        pool.free(slots(1, 3))
    assert pool.used == 2


def test_a_pool_that_is_asked_to_hands_out_the_lowest_first() -> None:
    pool = SlotPool("slot", 6, lowest_first=True)
    pool.alloc(6)
    pool.free(slots(4, 1))
    pool.free(slots(3))
    assert pool.alloc(3).tolist() == [1, 3, 4]


def test_a_slot_that_a_forward_may_touch_is_not_handed_out(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.free(slots(1, 2), epoch=3)
    assert (pool.available, pool.quarantined, pool.used) == (0, 2, 4)


def test_quarantine_ends_with_its_forward(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.free(slots(1), epoch=3)
    pool.free(slots(2), epoch=4)
    pool.retire(3)
    assert pool.alloc(1).tolist() == [1]
    assert pool.quarantined == 1


def test_a_slot_of_a_forward_that_is_over_is_free_at_once(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.retire(3)
    pool.free(slots(5), epoch=3)
    assert (pool.available, pool.quarantined) == (1, 0)


def test_an_older_epoch_does_not_end_a_quarantine(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.free(slots(1), epoch=3)
    pool.retire(2)
    assert pool.quarantined == 1


def test_quarantined_slots_have_no_owner(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.free(slots(3), epoch=1)
    assert pool.free_slots().tolist() == [3]


def test_a_quarantined_slot_is_not_freed_again(pool: SlotPool) -> None:
    pool.alloc(6)
    pool.free(slots(3), epoch=1)
    with pytest.raises(RuntimeError, match="double free"):
        pool.free(slots(3))


def test_a_reset_frees_everything(pool: SlotPool) -> None:
    pool.alloc(5)
    pool.free(slots(2), epoch=9)
    pool.reset()
    assert sorted(pool.alloc(6).tolist()) == [1, 2, 3, 4, 5, 6]


def test_a_slot_that_is_free_twice_is_found(pool: SlotPool) -> None:
    pool.alloc(2)
    pool.free(slots(1))
    pool._stack[pool._top] = 1
    pool._top += 1
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()


def test_a_slot_that_is_free_and_owned_is_found(pool: SlotPool) -> None:
    pool.alloc(2)
    pool._handed_out[6] = True
    with pytest.raises(AssertionError, match="free and owned"):
        pool.check_integrity()


def test_a_lost_slot_is_found(pool: SlotPool) -> None:
    pool.alloc(2)
    pool._handed_out[2] = False
    with pytest.raises(AssertionError, match=r"1 owned \+ 4 free != 6"):
        pool.check_integrity()


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans())),
)
def test_slots_are_conserved(lowest: bool, steps: list[tuple[int, int, bool]]) -> None:
    """Whatever was allocated and freed, every slot has one state and comes back."""
    pool = SlotPool("slot", 8, first=1, lowest_first=lowest)
    owned: list[int] = []
    epoch = 0
    for n, delay, free in steps:
        if free:
            out, owned = owned[:n], owned[n:]
            pool.free(slots(*out), epoch + delay)
        elif n <= pool.available:
            new = pool.alloc(n).tolist()
            assert set(new).isdisjoint(owned)
            owned += new
        epoch += 1
        pool.retire(epoch)
        pool.check_integrity()
        assert pool.available + pool.quarantined + pool.used == 8
        assert pool.used == len(owned)
    pool.free(slots(*owned))
    pool.retire(epoch + 3)
    assert sorted(pool.alloc(8).tolist()) == list(range(1, 9))


def test_lmcache_1285_a_long_run_recovers_from_fragmentation() -> None:
    """LMCache#1285: after 100,000 allocations and frees in any order."""
    pool = SlotPool("host page", 256, lowest_first=True)
    rng = np.random.default_rng(0)
    owned = slots()
    for _ in range(100_000):
        if rng.random() < 0.5:
            new = pool.alloc(int(rng.integers(0, pool.available + 1)) // 8)
            owned = np.concatenate([owned, new])
        else:
            rng.shuffle(owned)
            cut = int(rng.integers(0, len(owned) + 1)) // 8
            pool.free(owned[:cut])
            owned = owned[cut:]
    pool.free(owned)
    assert pool.alloc(200).tolist() == list(range(200))
