"""Places of pages that are in one tier only."""

import numpy as np

from sglang_tiered.memory.places import Places

Array = np.ndarray


def on_host(pages: Array) -> Places:
    nowhere = np.full(len(pages), -1, dtype=np.int64)
    return Places(nowhere, np.array(pages, dtype=np.int64), nowhere)
