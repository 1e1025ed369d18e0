"""A tiny random Llama model for end-to-end tests.

It is made so that two servers can be compared token for token:

* Every row of every weight matrix has two entries, each plus or minus a power of two.
  Two such products add up to the same float in whatever order a matrix product takes
  them, so a token's result does not depend on the batch that it was computed in.
* Attention is sharp and the embeddings are large: greedy output stays varied for
  thousands of tokens, and one wrong K/V row changes it within some tens of tokens.
* There is no end-of-sequence token: only `max_new_tokens` ends a request.

There is no tokenizer either: start servers with `--skip-tokenizer-init` and send
`input_ids` below `VOCAB_SIZE`.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 512
NUM_KV_HEADS = 2
HEAD_DIM = 16

_EMBEDDING_SCALE = 3.0
# Of the larger of a row's two entries. Sharp attention needs large queries and keys.
_SCALE = {"q_proj": 2.0, "k_proj": 2.0}


def make_tiny_model(folder: Path, *, layers: int = 8, seed: int = 0) -> Path:
    """Write the float32 model into `folder` as a Hugging Face folder; return `folder`.

    The same `layers` and `seed` give the same weights.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            kind = name.split(".")[-2]
            if kind == "embed_tokens":
                weight.normal_(std=_EMBEDDING_SCALE, generator=generator)
            elif weight.dim() == 2:
                _fill_two_per_row(weight, _SCALE.get(kind, 1.0), generator)
    model.save_pretrained(folder)
    return folder


def _fill_two_per_row(
    weight: torch.Tensor, scale: float, generator: torch.Generator
) -> None:
    """Set two random entries of each row to +-`scale` or +-`scale / 2`, others to 0.

    No two rows are equal: two equal rows of `lm_head` would tie for ever.
    """
    rows, columns = weight.shape
    seen: set[tuple[float, ...]] = set()
    weight.zero_()
    while len(seen) < rows:
        at = torch.randperm(columns, generator=generator)[:2]
        sign = torch.randint(0, 2, (2,), generator=generator) * 2 - 1
        half = torch.randint(1, 3, (2,), generator=generator)
        row = torch.zeros(columns).scatter_(0, at, sign * scale / half)
        if (key := tuple(row.tolist())) not in seen:
            weight[len(seen)] = row
            seen.add(key)
