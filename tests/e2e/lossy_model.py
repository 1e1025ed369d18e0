"""The tiny model in float64, with rows that attention does not see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM


class LossyModel:
    """A model folder as `transformers` runs it, far more exact than any server."""

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()

    def logits(
        self, prompt: Sequence[int], output: Sequence[int], kept: np.ndarray
    ) -> np.ndarray:
        """Before each output token, float64 [output, vocabulary].

        `kept`: bool [output, prompt + output - 1], the rows that the query which yields
        each token attends to. All positions are the true ones.
        """
        length = len(prompt) + len(output) - 1
        allowed = np.tril(np.ones((length, length), dtype=bool))
        allowed[len(prompt) - 1 :] = kept
        mask = torch.zeros(1, 1, length, length, dtype=torch.float64)
        mask[0, 0][torch.from_numpy(~allowed)] = -torch.inf
        ids = torch.tensor([[*prompt, *output[:-1]]])
        with torch.no_grad():
            logits = self._model(ids, attention_mask=mask).logits
        answer: np.ndarray = logits[0, len(prompt) - 1 :].numpy()
        return answer
