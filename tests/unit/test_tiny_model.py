"""The properties of the tiny model that the end-to-end tests rest on."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_model import VOCAB_SIZE, make_tiny_model

PROMPT_TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def generated(model: PreTrainedModel) -> torch.Tensor:
    """Prompts and 600 greedy tokens each, int64 [8, PROMPT_TOKENS + 600]."""
    prompts = torch.randint(
        VOCAB_SIZE, (8, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=600,
    )


def logits_step_by_step(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the first request of a batch, decoded one token at a time."""
    logits, past = [], None
    with torch.no_grad():
        for column in tokens.split(1, dim=1):
            step = model(column, past_key_values=past, use_cache=True)
            past = step.past_key_values
            logits.append(step.logits[0, -1])
    return torch.stack(logits)


def test_one_seed_gives_one_model(tmp_path: Path) -> None:
    first, second = (
        make_tiny_model(tmp_path / name, layers=2) / "model.safetensors"
        for name in ("a", "b")
    )
    assert first.read_bytes() == second.read_bytes()


def test_another_seed_gives_another_model(tmp_path: Path) -> None:
    first, second = (
        make_tiny_model(tmp_path / str(seed), layers=2, seed=seed) / "model.safetensors"
        for seed in (0, 1)
    )
    assert first.read_bytes() != second.read_bytes()


def test_nothing_ends_a_request_early(generated: torch.Tensor) -> None:
    assert generated.shape[1] == PROMPT_TOKENS + 600


def test_output_stays_varied(generated: torch.Tensor) -> None:
    late = generated[:, -300:]
    assert min(len(set(request)) for request in late.tolist()) >= 60


def test_a_result_does_not_depend_on_the_batch(
    model: PreTrainedModel, generated: torch.Tensor
) -> None:
    tokens = generated[:, :150]
    alone = logits_step_by_step(model, tokens[:1])
    assert torch.equal(alone, logits_step_by_step(model, tokens))


def test_one_wrong_row_changes_the_output(
    model: PreTrainedModel, generated: torch.Tensor
) -> None:
    """Row 50 of every layer is overwritten with row 60 before token 100."""
    with torch.no_grad():
        past = model(generated[:, :100], use_cache=True).past_key_values
        for layer in past.layers:
            layer.keys[:, :, 50] = layer.keys[:, :, 60]
            layer.values[:, :, 50] = layer.values[:, :, 60]
        token, output = generated[:, 100:101], []
        for _ in range(200):
            step = model(token, past_key_values=past, use_cache=True)
            token = step.logits[:, -1:].argmax(-1)
            output.append(token)
    same = torch.cat(output, dim=1) == generated[:, 101:301]
    assert not same.all(dim=1).any()
