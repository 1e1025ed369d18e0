"""Per token: how much attention it has drawn since its row was written.

Keyed by virtual id, that is by the token itself, so a score stays with its token
wherever the row moves. After each scored decode step, for every row i that the
step's query attended to,

    score[i] += mean over layers of (mean over query heads of alpha[layer, head, i])
    steps[i] += 1

with alpha the attention weights (arXiv 2605.09490; cumulative, never decayed). A
row that several requests share gets one such term, and one step, from each of them.
"""

from __future__ import annotations

import numpy as np


class ScoreBook:
    """Scores of all tokens that can have a row.

    Args:
        pages: number of virtual pages, the sink (page 0) included.
        page_size: tokens per page.

    ``score`` and ``steps``: float32 [pages * page_size], indexed by virtual token id.
    The attention backend writes through both, so they are never reallocated.
    ``value_norm``: float32 [pages], the mean over layers, heads and the page's tokens
    of the Euclidean norm of the value; NaN until somebody asks for it.
    ``lanes``: bool [batch], which requests of the forward that is about to run have a
    decode query that is scored. Set before every forward; empty scores nothing.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.score = np.zeros(pages * page_size, dtype=np.float32)
        self.steps = np.zeros(pages * page_size, dtype=np.float32)
        self.value_norm = np.full(pages, np.nan, dtype=np.float32)
        self.lanes = np.zeros(0, dtype=bool)

    def reset(self, ids: np.ndarray) -> None:
        """The rows of tokens ``ids`` (int64 [n]) are written anew."""
        self.score[ids] = 0
        self.steps[ids] = 0
        self.value_norm[ids // self.page_size] = np.nan

    def clear(self) -> None:
        """Forget everything, in the same arrays."""
        self.score.fill(0)
        self.steps.fill(0)
        self.value_norm.fill(np.nan)
        self.lanes = np.zeros(0, dtype=bool)

    def page_means(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean score and mean steps of the tokens of ``pages`` (int64 [n]), every
        one of which has been written: float32 [n] each."""
        if self.page_size == 1:
            return self.score[pages], self.steps[pages]
        score, steps = self._of(pages, self.score), self._of(pages, self.steps)
        return score.mean(axis=1), steps.mean(axis=1)

    def per_step(self, pages: np.ndarray) -> np.ndarray:
        """Score per scored step, 0 for a row that has seen none, averaged over the
        tokens of ``pages`` (int64 [n]): float64 [n]."""
        score = self._of(pages, self.score).astype(np.float64)
        return (score / np.maximum(self._of(pages, self.steps), 1)).mean(axis=1)

    def _of(self, pages: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return tokens.reshape(-1, self.page_size)[pages]
