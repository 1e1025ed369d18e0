"""Cheaper attention scores: do they rank rows as the full score does?

The demo model reads 1,024 tokens of real text. Every query of the second half is a
decode step; a row's full score is the sum over those steps of the mean attention
weight over all layers and heads. `--tiered-score-layers N` takes every N-th layer,
`--tiered-score-interval N` every N-th step. Compared over the rows of the second half
that no longer are in the recent window at the end: the rank correlation (Spearman) of
the cheaper score with the full one, and how much of the lower half, the rows that would
leave first, they have in common.

Prints the table and writes `out/scores/result.json`; exit code 0, or 2 if there is no
model. There is nothing to pass: the defaults are all layers and all steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import orjson
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from bench.command import run_command
from bench.int8 import TOKENS, Layer, capture
from bench.model import demo_model

OUT = Path("out/scores")
RECENT_WINDOW = 128
FIRST_STEP = TOKENS // 2
EVERY = (1, 2, 4, 8, 16)


def weights(layer: Layer) -> torch.Tensor:
    """Mean over heads of each step's attention weights, float32 [steps, tokens]."""
    heads = len(layer.queries)
    keys = layer.keys.repeat_interleave(heads // len(layer.keys), 0)
    step = torch.arange(FIRST_STEP, TOKENS)
    logits = layer.queries[:, step] @ keys.transpose(1, 2) * layer.scale
    hidden = torch.arange(TOKENS) > step[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(0)


def scores(model: Path) -> dict[tuple[int, int], np.ndarray]:
    """The score of every row under each (score_layers, score_interval)."""
    per_layer = torch.stack([weights(layer) for layer in capture(model)])
    return {
        (layers, steps): per_layer[::layers, ::steps].mean(0).sum(0).numpy()
        for layers in EVERY
        for steps in EVERY
        if layers == 1 or steps == 1 or layers == steps
    }


def run(console: Console) -> int:
    found = scores(demo_model())
    rows = slice(FIRST_STEP, TOKENS - RECENT_WINDOW)
    full = found[1, 1][rows]
    half = len(full) // 2
    lowest = set(np.argsort(full)[:half])
    table = Table("score_layers", "score_interval", title="Against the full score")
    table.add_column("rank correlation", justify="right")
    table.add_column("lower half in common", justify="right")
    results = []
    for (layers, steps), score in found.items():
        correlation = float(spearmanr(full, score[rows]).statistic)
        common = len(lowest & set(np.argsort(score[rows])[:half])) / half
        table.add_row(str(layers), str(steps), f"{correlation:.3f}", f"{common:.0%}")
        results.append(
            {
                "score_layers": layers,
                "score_interval": steps,
                "rank_correlation": correlation,
                "lower_half_in_common": common,
            }
        )
    console.print(table)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "result.json").write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    console.print(f"Wrote {OUT}/result.json.")
    return 0


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m bench.scores",
        description="How well cheaper attention scores rank rows.",
    ).parse_args()
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
