import numpy as np
import pytest
import torch

from sglang_tiered.transfer.row_copy import RowCopy, page_records

PAGES = 4000


def filled(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PAGES, width, generator=generator).to(dtype)


def copied(
    plan: RowCopy, width: int = 576, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source, before = filled(width, dtype, 0), filled(width, dtype, 1)
    after = before.clone()
    plan.run(page_records(source), page_records(after))
    return source, before, after


def scattered(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).permutation(PAGES)[:count]


TARGETS = {
    "contiguous": np.arange(50, 1050),
    "shuffled range": 50 + np.random.default_rng(0).permutation(1000),
    "small gaps": np.delete(np.arange(50, 1050), np.arange(3, 900, 7)),
    "one page": np.array([7]),
    "scattered": scattered(300),
    "more than the scratch holds": scattered(1500),
}


@pytest.mark.parametrize("overwrite_gaps", [False, True])
@pytest.mark.parametrize("shape", TARGETS)
def test_every_planned_page_arrives(shape: str, overwrite_gaps: bool) -> None:
    target_pages = TARGETS[shape]
    source_pages = scattered(len(target_pages), seed=5)
    plan = RowCopy(source_pages, target_pages, overwrite_gaps=overwrite_gaps)
    source, _, after = copied(plan)
    assert torch.equal(after[target_pages], source[source_pages])


@pytest.mark.parametrize("shape", TARGETS)
def test_no_other_page_is_touched(shape: str) -> None:
    target_pages = TARGETS[shape]
    plan = RowCopy(scattered(len(target_pages), seed=5), target_pages)
    _, before, after = copied(plan)
    others = np.setdiff1d(np.arange(PAGES), target_pages)
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("shape", TARGETS)
def test_overwritten_gaps_stay_between_the_planned_pages(shape: str) -> None:
    target_pages = TARGETS[shape]
    source_pages = scattered(len(target_pages), seed=5)
    plan = RowCopy(source_pages, target_pages, overwrite_gaps=True)
    _, before, after = copied(plan)
    for outside in (slice(0, target_pages.min()), slice(target_pages.max() + 1, None)):
        assert torch.equal(after[outside], before[outside])


@pytest.mark.parametrize("width", [1, 3, 96, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["contiguous", "scattered"])
def test_any_row_width_and_type(shape: str, dtype: torch.dtype, width: int) -> None:
    target_pages = TARGETS[shape]
    source_pages = scattered(len(target_pages), seed=5)
    source, _, after = copied(RowCopy(source_pages, target_pages), width, dtype)
    assert torch.equal(after[target_pages], source[source_pages])


def test_a_source_may_be_copied_twice() -> None:
    source, _, after = copied(RowCopy(np.array([4, 4]), np.array([9, 2])))
    assert torch.equal(after[[2, 9]], source[[4, 4]])


def test_a_nan_keeps_its_bits() -> None:
    bits = torch.tensor([[0x7FC1_2345], [-0x0040_0001]], dtype=torch.int32)
    target = torch.zeros_like(bits)
    plan = RowCopy(np.array([0, 1]), np.array([1, 0]))
    plan.run(page_records(bits.view(torch.float32)), page_records(target))
    assert torch.equal(target, bits.flip(0))


def test_an_empty_plan_copies_nothing() -> None:
    none = np.empty(0, np.int64)
    _, before, after = copied(RowCopy(none, none))
    assert torch.equal(after, before)


@pytest.mark.parametrize("overwrite_gaps", [False, True])
def test_a_target_named_twice_is_refused(overwrite_gaps: bool) -> None:
    with pytest.raises(ValueError, match="a target page occurs twice"):
        RowCopy(np.arange(3), np.array([5, 9, 5]), overwrite_gaps=overwrite_gaps)


def test_unequal_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"source pages \(3,\), target pages \(2,\)"):
        RowCopy(np.arange(3), np.arange(2))
