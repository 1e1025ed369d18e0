"""Which page gives up T0 first: protection classes, orders, the share of ratio mode."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.protection import PageView, Protection, classify
from sglang_tiered.policy.ranking import (
    demotion_order,
    promotion_order,
)

PLAIN: dict[str, Any] = {
    "read": True,
    "waiting": False,
    "private": True,
    "generated": True,
    "row": 1,
    "index": 5,
    "length": 400,
    "prompt": 16,
    "readers": 1,
    "worth": 0,
    "last_read": 0,
    "promoted": 0,
}


def view_of(*pages: dict[str, Any]) -> PageView:
    """One entry a page; what is not named is that of a generated page in the middle
    of a running request."""
    return PageView(
        **{name: np.array([(PLAIN | page)[name] for page in pages]) for name in PLAIN}
    )


def class_of(page_size: int = 4, **page: Any) -> Protection:
    classes = classify(
        view_of(page),
        page_size=page_size,
        sink_tokens=4,
        recent_window=32,
        settled_before=100,
    )
    return Protection(classes[0])


TREE = {"private": False, "row": -1}
COLD = TREE | {"read": False, "readers": 0}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ({}, Protection.UNPROTECTED),
        (COLD, Protection.COLD),
        (COLD | {"promoted": 100}, Protection.COLD),
        (COLD | {"waiting": True}, Protection.WAITING),
        ({"read": False, "waiting": True}, Protection.WAITING),
        ({"read": False, "waiting": True, "index": 99}, Protection.WAITING),
        ({"promoted": 99}, Protection.UNPROTECTED),
        ({"promoted": 100}, Protection.SETTLING),
        ({"generated": False, "index": 1}, Protection.PREFIX),
        ({"generated": False, "index": 1, "promoted": 100}, Protection.PREFIX),
        (TREE | {"generated": False}, Protection.PREFIX),
        (TREE, Protection.UNPROTECTED),
        (TREE | {"promoted": 100}, Protection.SETTLING),
        ({"index": 99}, Protection.RECENT),
        ({"index": 99, "promoted": 100}, Protection.RECENT),
        ({"generated": False, "index": 99}, Protection.RECENT),
    ],
    ids=[
        "generated",
        "tree, no reader",
        "tree, no reader, promoted",
        "parked",
        "idle session",
        "idle session, recent",
        "promoted long ago",
        "promoted now",
        "prompt",
        "prompt, promoted",
        "shared prefix",
        "resumed reasoning",
        "resumed reasoning, promoted",
        "recent",
        "recent, promoted",
        "recent prompt",
    ],
)
def test_every_page_has_the_class_of_its_kind(
    page: dict[str, Any], expected: Protection
) -> None:
    assert class_of(**page) is expected


@pytest.mark.parametrize(
    ("index", "expected"),
    [(3, "PREFIX"), (4, "PREFIX"), (5, "UNPROTECTED")],
)
def test_the_first_generated_tokens_are_sinks(index: int, expected: str) -> None:
    """A prompt of 16 tokens and 4 sinks: tokens 16 to 19, page 4."""
    assert class_of(index=index, generated=index >= 4).name == expected


@pytest.mark.parametrize(
    ("index", "expected"), [(91, "UNPROTECTED"), (92, "RECENT"), (99, "RECENT")]
)
def test_the_last_tokens_are_recent(index: int, expected: str) -> None:
    """400 tokens, the last 32 are recent: from token 368, page 92."""
    assert class_of(index=index).name == expected


def test_a_page_is_recent_if_one_of_its_tokens_is() -> None:
    assert class_of(page_size=16, index=22, length=399) is Protection.RECENT


def test_the_page_that_is_being_written_is_recent() -> None:
    """``index`` 100 holds token 400, which length does not count yet."""
    assert class_of(index=100) is Protection.RECENT


def test_classes_give_up_t0_in_this_order() -> None:
    assert [p.name for p in sorted(Protection)] == [
        "COLD",
        "WAITING",
        "UNPROTECTED",
        "SETTLING",
        "PREFIX",
        "RECENT",
    ]


# -- orders


def order(protection: Protection, *pages: dict[str, Any]) -> list[int]:
    view = view_of(*pages)
    return demotion_order(view, np.full(len(pages), protection)).tolist()


def test_lower_classes_come_first() -> None:
    view = view_of({"worth": 1}, {"worth": 2}, {"worth": 3})
    classes = np.array([Protection.RECENT, Protection.COLD, Protection.PREFIX])
    assert demotion_order(view, classes).tolist() == [1, 2, 0]


@pytest.mark.parametrize("protection", [Protection.COLD, Protection.WAITING])
def test_unread_pages_go_by_last_use(protection: Protection) -> None:
    pages = ({"last_read": 7, "worth": 1}, {"last_read": 3, "worth": 2})
    assert order(protection, *pages) == [1, 0]


@pytest.mark.parametrize("protection", [Protection.COLD, Protection.WAITING])
def test_of_one_cold_path_the_tail_goes_first(protection: Protection) -> None:
    assert order(protection, {"index": 0}, {"index": 2}, {"index": 1}) == [1, 2, 0]


@pytest.mark.parametrize(
    "protection", [Protection.UNPROTECTED, Protection.SETTLING, Protection.RECENT]
)
def test_reasoning_goes_by_age(protection: Protection) -> None:
    pages = ({"worth": 9}, {"worth": 2}, {"worth": 5})
    assert order(protection, *pages) == [1, 2, 0]


def test_of_one_step_of_reasoning_the_head_goes_first() -> None:
    pages = ({"index": 7}, {"index": 5}, {"index": 6})
    assert order(Protection.UNPROTECTED, *pages) == [1, 2, 0]


def test_prefixes_with_fewer_readers_go_first() -> None:
    pages = ({"readers": 3, "worth": 1}, {"readers": 1, "worth": 2})
    assert order(Protection.PREFIX, *pages) == [1, 0]


def test_of_a_prefix_the_tail_goes_first() -> None:
    assert order(Protection.PREFIX, {"index": 0}, {"index": 1}) == [1, 0]


@pytest.mark.parametrize("protection", list(Protection))
def test_ties_go_by_position(protection: Protection) -> None:
    assert order(protection, {}, {}, {}, {}) == [0, 1, 2, 3]


def test_no_page_has_an_order() -> None:
    assert order(Protection.COLD) == []


def test_promotion_is_the_reverse() -> None:
    view = view_of({"worth": 9}, {"worth": 2}, {"worth": 5})
    classes = np.full(3, Protection.UNPROTECTED)
    assert promotion_order(view, classes).tolist() == [0, 2, 1]


def test_shared_prefixes_and_recent_rows_return_first() -> None:
    view = view_of({}, {"readers": 4}, {"readers": 1}, {})
    classes = np.array(
        [
            Protection.UNPROTECTED,
            Protection.PREFIX,
            Protection.PREFIX,
            Protection.RECENT,
        ]
    )
    assert promotion_order(view, classes).tolist() == [3, 1, 2, 0]


facts = st.fixed_dictionaries(
    {
        "worth": st.integers(0, 4),
        "index": st.integers(0, 4),
        "readers": st.integers(0, 3),
        "last_read": st.integers(0, 4),
    }
)


@given(st.lists(st.tuples(facts, st.sampled_from(list(Protection))), max_size=30))
def test_an_order_names_every_page_once(
    pages: list[tuple[dict[str, Any], Protection]],
) -> None:
    view = view_of(*(page for page, _ in pages))
    classes = np.array([protection for _, protection in pages], dtype=np.int64)
    result = demotion_order(view, classes)
    assert sorted(result.tolist()) == list(range(len(pages)))
    assert (np.diff(classes[result]) >= 0).all()
