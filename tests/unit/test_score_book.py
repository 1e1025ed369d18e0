"""Scores per token id: reset, page means, arrays that never move."""

import numpy as np
import pytest

from sglang_tiered.memory.score_book import ScoreBook


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def book() -> ScoreBook:
    """Six pages of four tokens: token i has the score i and has seen i % 4 steps."""
    book = ScoreBook(6, 4)
    book.score[:] = np.arange(24)
    book.steps[:] = np.arange(24) % 4
    book.value_norm[:] = np.arange(6)
    return book


def test_a_new_book_is_empty() -> None:
    book = ScoreBook(6, 4)
    assert not book.score.any()
    assert not book.steps.any()
    assert np.isnan(book.value_norm).all()
    assert not book.lanes.any()


def test_there_is_an_entry_per_token_and_a_norm_per_page(book: ScoreBook) -> None:
    assert (len(book.score), len(book.steps), len(book.value_norm)) == (24, 24, 6)


def test_scores_are_float32(book: ScoreBook) -> None:
    assert {book.score.dtype, book.steps.dtype, book.value_norm.dtype} == {
        np.dtype(np.float32)
    }


def test_a_row_that_is_written_anew_starts_at_zero(book: ScoreBook) -> None:
    book.reset(numbers(5, 22))
    assert (book.score[5], book.steps[5]) == (0, 0)
    assert (book.score[22], book.steps[22]) == (0, 0)


def test_a_reset_leaves_other_rows_alone(book: ScoreBook) -> None:
    book.reset(numbers(5))
    assert book.score[[4, 6]].tolist() == [4, 6]
    assert book.steps[[6, 7]].tolist() == [2, 3]


def test_a_new_row_makes_the_value_norm_of_its_page_unknown(book: ScoreBook) -> None:
    book.reset(numbers(5, 6))
    assert np.flatnonzero(np.isnan(book.value_norm)).tolist() == [1]


def test_resetting_nothing_changes_nothing(book: ScoreBook) -> None:
    book.reset(numbers())
    assert book.score.tolist() == list(range(24))


def test_a_page_has_the_mean_of_its_tokens(book: ScoreBook) -> None:
    score, steps = book.page_means(numbers(2, 1))
    assert score.tolist() == [9.5, 5.5]
    assert steps.tolist() == [1.5, 1.5]
    assert {score.dtype, steps.dtype} == {np.dtype(np.float32)}


def test_no_pages_have_no_means(book: ScoreBook) -> None:
    assert [mean.tolist() for mean in book.page_means(numbers())] == [[], []]
    assert book.per_step(numbers()).tolist() == []


def test_score_per_step_is_averaged_over_the_page(book: ScoreBook) -> None:
    expected = (4 / 1 + 5 / 1 + 6 / 2 + 7 / 3) / 4
    assert book.per_step(numbers(1)) == pytest.approx([expected], rel=1e-12)
    assert book.per_step(numbers(1)).dtype == np.float64


def test_a_page_that_no_step_has_seen_has_no_score_per_step() -> None:
    assert ScoreBook(6, 1).per_step(numbers(3)).tolist() == [0]


def test_a_page_of_one_token_is_a_token() -> None:
    book = ScoreBook(6, 1)
    book.score[4], book.steps[4] = 3, 2
    score, steps = book.page_means(numbers(4))
    assert (score.tolist(), steps.tolist()) == ([3], [2])
    assert book.per_step(numbers(4)).tolist() == [1.5]


def test_a_cleared_book_is_empty_in_the_same_arrays(book: ScoreBook) -> None:
    arrays = book.score, book.steps, book.value_norm
    book.lanes = np.ones(3, dtype=bool)
    book.clear()
    assert book.score is arrays[0]
    assert book.steps is arrays[1]
    assert book.value_norm is arrays[2]
    assert not book.score.any()
    assert not book.steps.any()
    assert not book.lanes.any()
    assert np.isnan(book.value_norm).all()
