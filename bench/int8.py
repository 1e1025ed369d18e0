"""T2: what rounding keys and values to int8 does to the output of attention.

Two real models read 1,024 tokens of real text. Every layer's queries, keys (after
RoPE) and values are kept, and the output of attention over rounded rows is compared
with the exact one, for every fourth query of the second half of the text. Schemes for
keys, each applied once to exact rows:

* paper: one min/max for all keys of a layer (and one for all its values);
* head: a scale per token and head;
* channel: a min/max per channel over blocks of 32 tokens (KIVI, arXiv 2402.02750);
* rotated: as head, after a Hadamard rotation with fixed random signs;
* shipped: what `memory/int8_rows.py` does.

Values are rounded as shipped for all but the paper's. Then the keys get an outlier:
their largest channel x100, with the queries as they are (attention becomes sharp) and
with the query's channel / 100 (attention stays the same, as in a model that was trained
so); and two channels that RoPE turns into one another.

Passes if the shipped scheme's error is at most a third of the paper's, within 1.1x of
the best of head, channel and rotated, and under 1e-2 with one channel x100, all for
both models, with rounded and with exact values.

Prints the tables, writes them with `result.json` to `out/int8/`; exit code 0 if all
pass, 1 if not, 2 if there is no model.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console

from bench.command import run_command
from bench.model import demo_model
from bench.rounds import Check
from bench.second_model import second_model
from bench.workload import QUESTIONS
from sglang_tiered.memory.int8_rows import Int8Rows, ValueRows, codec_for
from sglang_tiered.memory.layout import RowBuffer

OUT = Path("out/int8")
# It never changes, so that a table can be repeated.
TEXT = Path(__file__).parents[1] / "LICENSE"

TOKENS = 1024
QUERY_STEP = 4
BLOCK = 32
OUTLIER = 100.0
PAPER, SHIPPED = "paper", "shipped"
# What a server keeps keys and values in; the bytes are for this type.
BUFFER = torch.bfloat16

Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """What one layer's attention was given, float32 [heads, tokens, channels]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int | None


@dataclass(frozen=True)
class Scheme:
    """How rows [heads, tokens, channels] of a layer are rounded, and bytes per token
    and layer for shape (heads, channels)."""

    keys: Rounding
    values: Rounding
    bytes_per_token: Callable[[int, int], float]


@dataclass(frozen=True)
class Errors:
    """Relative errors of attention's output: over everything (norm of all errors by
    norm of all outputs), and the mean and largest over layers and heads."""

    total: float
    mean: float
    largest: float


@dataclass(frozen=True)
class Case:
    """What is done to keys and queries first: `channels` of the largest x100."""

    name: str
    channels: int = 0
    same_attention: bool = False


CASES = (
    Case("as they are"),
    Case("a channel x100", 1),
    Case("a channel x100, query / 100", 1, same_attention=True),
    Case("a RoPE pair x100, query / 100", 2, same_attention=True),
)


def by_layer(rows: torch.Tensor) -> torch.Tensor:
    low = rows.min()
    step = (rows.max() - low) / 255
    return ((rows - low) / step).round() * step + low


def by_channel(rows: torch.Tensor) -> torch.Tensor:
    heads, tokens, dim = rows.shape
    blocks = rows.view(heads, tokens // BLOCK, BLOCK, dim)
    low = blocks.amin(2, keepdim=True)
    step = (blocks.amax(2, keepdim=True) - low) / 255
    # 0/0 where a channel is the same all through a block.
    codes = torch.nan_to_num((blocks - low) / step).round()
    return (codes * step + low).view_as(rows)


def by_head(rows: torch.Tensor) -> torch.Tensor:
    heads, _, dim = rows.shape
    return through(ValueRows(heads, dim, rows.dtype, dim), rows)


def rotated(rows: torch.Tensor) -> torch.Tensor:
    """Blocks of channels as large as a power of two can divide them are rotated."""
    dim = rows.shape[-1]
    block = dim & -dim
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]
        )
    matrix /= math.sqrt(block)
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(0))
    signs = signs * 2.0 - 1.0

    def turned(x: torch.Tensor) -> torch.Tensor:
        return (x.view(*x.shape[:-1], -1, block) @ matrix).view(x.shape)

    return turned(by_head(turned(rows * signs))) * signs


def shipped_keys(rows: torch.Tensor) -> torch.Tensor:
    return through(codec("k", rows.shape[0], rows.shape[2], rows.dtype), rows)


def shipped_values(rows: torch.Tensor) -> torch.Tensor:
    return through(codec("v", rows.shape[0], rows.shape[2], rows.dtype), rows)


def codec(name: str, heads: int, dim: int, dtype: torch.dtype) -> Int8Rows:
    return codec_for(RowBuffer(name, (heads, dim), dtype))


def through(rounds: Int8Rows, rows: torch.Tensor) -> torch.Tensor:
    records = rounds.quantise(rows.transpose(0, 1))
    return rounds.dequantise(records).transpose(0, 1).contiguous()


def value_bytes(heads: int, dim: int) -> int:
    return codec("v", heads, dim, BUFFER).record_bytes


SCHEMES = {
    PAPER: Scheme(by_layer, by_layer, lambda heads, dim: 2 * heads * dim),
    "head": Scheme(
        by_head,
        shipped_values,
        lambda heads, dim: heads * (dim + 4) + value_bytes(heads, dim),
    ),
    # Minimum and step in float32, like every other scale here.
    "channel": Scheme(
        by_channel,
        shipped_values,
        lambda heads, dim: heads * dim * (1 + 8 / BLOCK) + value_bytes(heads, dim),
    ),
    "rotated": Scheme(
        rotated,
        shipped_values,
        lambda heads, dim: heads * (dim + 4) + value_bytes(heads, dim),
    ),
    SHIPPED: Scheme(
        shipped_keys,
        shipped_values,
        lambda heads, dim: (
            codec("k", heads, dim, BUFFER).record_bytes + value_bytes(heads, dim)
        ),
    ),
}
CANDIDATES = ("head", "channel", "rotated")


def capture(model: Path) -> list[Layer]:
    """Run `model` over the text and return what its layers' attention was given."""
    # Here, because they take seconds.
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoModelForCausalLM,
        AutoTokenizer,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: list[Layer] = []

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **settings: Any,
    ) -> Any:
        layers.append(
            Layer(
                query[0].clone(),
                key[0].clone(),
                value[0].clone(),
                settings["scaling"],
                settings.get("sliding_window"),
            )
        )
        return sdpa_attention_forward(module, query, key, value, mask, **settings)

    AttentionInterface.register("capture", attend)
    AttentionMaskInterface.register("capture", sdpa_mask)
    runs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="capture"
    )
    text = "\n".join([*QUESTIONS, TEXT.read_text()])
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        runs(input_ids=ids[:, :TOKENS], use_cache=False, logits_to_keep=1)
    return layers


def change(layer: Layer, case: Case) -> Layer:
    if case.channels == 0:
        return layer
    dim = layer.keys.shape[-1]
    largest = int(layer.keys.abs().mean((0, 1)).argmax())
    channels = [(largest + i * dim // 2) % dim for i in range(case.channels)]
    factor = torch.ones(dim)
    factor[channels] = OUTLIER
    queries = layer.queries / factor if case.same_attention else layer.queries
    return replace(layer, queries=queries, keys=layer.keys * factor)


def attention(
    layer: Layer, keys: torch.Tensor, values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs [query heads, queries, channels] over `keys`, for each of `values`."""
    heads, tokens, _ = layer.queries.shape
    shared_by = heads // len(keys)
    reading = torch.arange(tokens // 2, tokens, QUERY_STEP)[:, None]
    read = torch.arange(tokens)
    hidden = read > reading
    if layer.window is not None:
        hidden |= read <= reading - layer.window
    logits = layer.queries[:, reading[:, 0]] @ keys.repeat_interleave(
        shared_by, 0
    ).transpose(1, 2)
    weights = (logits * layer.scale).masked_fill(hidden, -math.inf).softmax(-1)
    return [weights @ rows.repeat_interleave(shared_by, 0) for rows in values]


def measure(layers: Sequence[Layer], case: Case) -> dict[str, tuple[Errors, Errors]]:
    """Per scheme: errors with rounded values, and with exact ones."""
    squares: dict[str, list[torch.Tensor]] = {name: [] for name in SCHEMES}
    outputs: list[torch.Tensor] = []
    for layer in layers:
        layer = change(layer, case)
        (exact,) = attention(layer, layer.keys, [layer.values])
        outputs.append(exact.square().sum((1, 2)))
        for name, scheme in SCHEMES.items():
            values = [scheme.values(layer.values), layer.values]
            both = torch.stack(attention(layer, scheme.keys(layer.keys), values))
            squares[name].append((both - exact).square().sum((2, 3)))
    output = torch.cat(outputs)
    return {
        name: (_errors(error[0], output), _errors(error[1], output))
        for name, error in ((n, torch.cat(parts, 1)) for n, parts in squares.items())
    }


def _errors(error: torch.Tensor, output: torch.Tensor) -> Errors:
    """From squared norms per layer and head."""
    each = (error / output).sqrt()
    total = (error.sum() / output.sum()).sqrt()
    # Nothing compares with a NaN; one in a scheme here would pass unseen.
    assert bool(each.isfinite().all())
    return Errors(total.item(), each.mean().item(), each.max().item())


def judge(
    model: str, results: dict[str, dict[str, tuple[Errors, Errors]]]
) -> list[Check]:
    checks = []
    for index, values in enumerate(("rounded", "exact")):
        plain = {n: both[index].total for n, both in results[CASES[0].name].items()}
        about = f"{model}, {values} values"
        ours = plain[SHIPPED]
        best = min(plain[name] for name in CANDIDATES)
        checks += [
            Check(f"{about}: error, of the paper's", ours / plain[PAPER], 1 / 3, True),
            Check(f"{about}: error, of the best of three", ours / best, 1.1, True),
        ]
        checks += [
            Check(
                f"{about}: error, {case.name}",
                results[case.name][SHIPPED][index].total,
                1e-2,
                True,
            )
            for case in CASES[1:]
        ]
    return checks


def table(
    layers: Sequence[Layer], results: dict[str, dict[str, tuple[Errors, Errors]]]
) -> str:
    """As Markdown; a cell with two numbers has rounded and exact values."""
    outliers = CASES[1:]
    head = ["scheme", "bytes per token", "error", "mean", "largest"]
    lines = [[*head, *(case.name for case in outliers)], ["---"] * (5 + len(outliers))]
    heads, _, dim = layers[0].keys.shape
    full = len(layers) * 2 * heads * dim * BUFFER.itemsize
    for name, scheme in SCHEMES.items():
        used = len(layers) * scheme.bytes_per_token(heads, dim)
        plain = results[CASES[0].name][name]
        lines.append(
            [
                name,
                f"{used:,.0f} ({used / full:.0%})",
                _cell(e.total for e in plain),
                _cell(e.mean for e in plain),
                _cell(e.largest for e in plain),
                *(
                    _cell(e.total for e in results[case.name][name])
                    for case in outliers
                ),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(numbers: Any) -> str:
    return ", ".join(f"{number:.4f}" for number in numbers)


def run(console: Console) -> int:
    checks: list[Check] = []
    tables: list[str] = []
    found: dict[str, Any] = {}
    for model in (demo_model(), second_model()):
        with console.status(f"{model.name}: reading the text"):
            layers = capture(model)
        results = {}
        for case in CASES:
            with console.status(f"{model.name}: {case.name}"):
                results[case.name] = measure(layers, case)
        tables.append(f"{model.name}\n\n{table(layers, results)}\n")
        console.print(tables[-1], markup=False, soft_wrap=True)
        checks += judge(model.name, results)
        found[model.name] = {
            case: {
                scheme: {"rounded values": asdict(both[0]), "exact": asdict(both[1])}
                for scheme, both in schemes.items()
            }
            for case, schemes in results.items()
        }
    for check in checks:
        verdict = "[green]PASS[/]" if check.passed else "[red]FAIL[/]"
        console.print(
            f"{verdict}  {check.name}: {check.value:.4f} (at most {check.limit:.4f})",
            soft_wrap=True,
        )
    found["checks"] = [asdict(check) | {"passed": check.passed} for check in checks]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "tables.md").write_text("\n".join(tables))
    (OUT / "result.json").write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    console.print(f"Wrote {OUT}/tables.md and {OUT}/result.json.")
    return 0 if all(check.passed for check in checks) else 1


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m bench.int8",
        description="What int8 rows do to attention's output, on real keys and values.",
    ).parse_args()
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
