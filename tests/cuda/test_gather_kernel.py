"""The page copy kernel against numpy, interpreted and guarded."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from sglang_tiered.transfer.gather import PageBuffers, PagePlan, copy_pages
from tests.cuda.interpreter import Guard, KernelFault

pytestmark = pytest.mark.interpreted

SOURCE_PAGES, TARGET_PAGES, CAPACITY = 90, 70, 40
# Bytes of a page: less than a word, odd in words, below and at powers of two, a latent
# row, and more than one tile.
SIZES = (2, 30, 96, 1024, 1152, 40_000)
COUNTS = (0, 1, 33, CAPACITY)
CANARY = -77
# Of Linux; Python has it only since 3.13.
MAP_NORESERVE = 0x4000

every_size = pytest.mark.parametrize("page_bytes", SIZES)
every_count = pytest.mark.parametrize("count", COUNTS)


def random_pages(pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (pages, page_bytes), dtype=torch.uint8, generator=generator
    )


def scattered(pages: int, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(pages)[:count]


@dataclass
class Copy:
    """Buffers, a plan in the middle of a larger allocation, and what must come out."""

    page_bytes: tuple[int, ...]
    programs: int = 3
    sources: list[torch.Tensor] = field(init=False)
    targets: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = [
            random_pages(SOURCE_PAGES, size, seed=2 * i)
            for i, size in enumerate(self.page_bytes)
        ]
        self.targets = [
            random_pages(TARGET_PAGES, size, seed=2 * i + 1)
            for i, size in enumerate(self.page_bytes)
        ]
        self.buffers = PageBuffers(self.sources, self.targets, "cpu")
        self.plan = PagePlan(CAPACITY, "cpu")
        # What lies behind the plan is somebody else's: pages that nobody has.
        memory = torch.full((1 + CAPACITY + 50, 2), CANARY)
        self.plan.table = memory[: 1 + CAPACITY]
        self.plan.table[0] = 0
        self.staging = self.plan.new_staging()

    def write(self, source_pages: np.ndarray, target_pages: np.ndarray) -> None:
        self.plan.write(source_pages, target_pages, self.staging)

    def run(self) -> None:
        inputs = [*self.sources, self.buffers.table, self.plan.table]
        with Guard(inputs, self.targets):
            copy_pages(self.buffers, self.plan, self.programs)

    def expected(
        self, source_pages: np.ndarray, target_pages: np.ndarray
    ) -> list[np.ndarray]:
        wanted = [target.numpy().copy() for target in self.targets]
        for target, source in zip(wanted, self.sources, strict=True):
            target[target_pages] = source.numpy()[source_pages]
        return wanted

    def check(self, source_pages: np.ndarray, target_pages: np.ndarray) -> None:
        """Copies them, and nothing else."""
        wanted = self.expected(source_pages, target_pages)
        self.write(source_pages, target_pages)
        self.run()
        for target, pages in zip(self.targets, wanted, strict=True):
            np.testing.assert_array_equal(target.numpy(), pages)


@every_count
@every_size
def test_planned_pages_arrive_and_no_others(page_bytes: int, count: int) -> None:
    """The tables are permuted: flashinfer#3219."""
    Copy((page_bytes,)).check(
        scattered(SOURCE_PAGES, count, 1), scattered(TARGET_PAGES, count, 2)
    )


@every_size
def test_runs_of_pages_arrive(page_bytes: int) -> None:
    Copy((page_bytes,)).check(np.arange(7, 40), np.arange(30, 63))


@every_size
def test_one_page_can_have_many_targets(page_bytes: int) -> None:
    Copy((page_bytes,)).check(np.full(20, 5), scattered(TARGET_PAGES, 20, 2))


def test_the_first_and_the_last_page_are_pages_like_others() -> None:
    Copy((1024,)).check(np.array([0, 89]), np.array([69, 0]))


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_any_number_of_programs_shares_the_work(programs: int) -> None:
    Copy((1152, 1152), programs).check(
        scattered(SOURCE_PAGES, CAPACITY, 1), scattered(TARGET_PAGES, CAPACITY, 2)
    )


@pytest.mark.parametrize("sizes", [(1024, 1024), (1024, 96), (30, 1152), (2, 4, 6)])
def test_all_buffers_of_a_layer_go_in_one_launch(sizes: tuple[int, ...]) -> None:
    Copy(sizes).check(scattered(SOURCE_PAGES, 33, 1), scattered(TARGET_PAGES, 33, 2))


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_buffers_may_begin_anywhere(shift: int) -> None:
    source = random_pages(1, 10 * 64 + shift, 0)[0, shift:].view(10, 64)
    target = torch.zeros(10, 64, dtype=torch.uint8)
    plan = PagePlan(10, "cpu")
    plan.write(np.arange(10), np.arange(10)[::-1], plan.new_staging())
    buffers = PageBuffers([source], [target], "cpu")
    with Guard([source, buffers.table, plan.table], [target]):
        copy_pages(buffers, plan)
    assert torch.equal(target, source.flip(0))


@pytest.mark.parametrize(
    ("page_bytes", "word_bytes", "vector"),
    [(2, 2, 1), (30, 2, 1), (36, 4, 1), (40, 8, 1), (96, 8, 2), (1152, 8, 2)],
)
def test_words_are_as_wide_as_the_pages_allow(
    page_bytes: int, word_bytes: int, vector: int
) -> None:
    pages = torch.zeros(4, page_bytes, dtype=torch.uint8)
    buffers = PageBuffers([pages], [pages.clone()], "cpu")
    assert (buffers.word_bytes, buffers.vector) == (word_bytes, vector)


@pytest.mark.parametrize(
    ("shift", "word_bytes", "vector"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (8, 8, 1)]
)
def test_words_are_as_wide_as_the_addresses_allow(
    shift: int, word_bytes: int, vector: int
) -> None:
    source = torch.zeros(64 + shift, dtype=torch.uint8)[shift:].view(1, 64)
    target = torch.zeros(1, 64, dtype=torch.uint8)
    for pair in ((source, target), (target, source)):
        buffers = PageBuffers([pair[0]], [pair[1]], "cpu")
        assert (buffers.word_bytes, buffers.vector) == (word_bytes, vector)


@pytest.mark.parametrize("page_bytes", [1024, 1152, 2048, 9216, 16384, 18432, 40_000])
def test_few_threads_are_without_work(page_bytes: int) -> None:
    pages = torch.zeros(1, page_bytes, dtype=torch.uint8)
    buffers = PageBuffers([pages], [pages.clone()], "cpu")
    words = page_bytes // buffers.word_bytes
    assert words <= buffers.chunks * buffers.columns <= words * 9 / 8


def test_a_new_plan_copies_nothing() -> None:
    copy = Copy((1024,))
    wanted = copy.expected(np.empty(0, int), np.empty(0, int))
    copy.run()
    np.testing.assert_array_equal(copy.targets[0].numpy(), wanted[0])


def test_a_replay_copies_what_the_plan_holds_by_then() -> None:
    """TensorRT-LLM#18769, rtp-llm#1084: here the launch is the same, the counts not."""
    copy = Copy((1024, 1024))
    for count in (33, 0, CAPACITY, 1):
        copy.check(
            scattered(SOURCE_PAGES, count, count), scattered(TARGET_PAGES, count, 9)
        )


def test_rows_past_the_count_are_not_followed() -> None:
    """sglang#24587: they name pages that nobody has."""
    copy = Copy((1024,))
    copy.plan.table[1:] = CANARY
    copy.check(np.array([3, 4]), np.array([5, 6]))
    assert (copy.plan.table[3:] == CANARY).all()


def test_a_plan_is_written_within_its_table() -> None:
    """sglang#24587."""
    copy = Copy((1024,))
    copy.write(np.arange(CAPACITY), np.arange(CAPACITY))
    memory = copy.plan.table.untyped_storage()
    behind = torch.empty(0, dtype=torch.int64).set_(memory)[2 * (1 + CAPACITY) :]
    assert len(behind) == 100
    assert (behind == CANARY).all()


@pytest.mark.parametrize("count", [CAPACITY + 1, CAPACITY + 50, 1 << 40])
def test_a_count_beyond_the_capacity_reads_nothing_behind_the_plan(count: int) -> None:
    """sglang#24587: the count is on the device, nobody can check it before."""
    copy = Copy((1024,))
    pages = scattered(SOURCE_PAGES, CAPACITY, 1), scattered(TARGET_PAGES, CAPACITY, 2)
    wanted = copy.expected(*pages)
    copy.write(*pages)
    copy.plan.table[0, 0] = count
    copy.run()
    np.testing.assert_array_equal(copy.targets[0].numpy(), wanted[0])


@pytest.mark.parametrize("count", [-1, CAPACITY - (1 << 40)])
def test_a_negative_count_copies_nothing(count: int) -> None:
    copy = Copy((1024,))
    wanted = copy.expected(np.empty(0, int), np.empty(0, int))
    copy.plan.table[0, 0] = count
    copy.run()
    np.testing.assert_array_equal(copy.targets[0].numpy(), wanted[0])


def test_duplicate_targets_are_a_race() -> None:
    """What the caller has to check; the guard that watches these tests sees it."""
    copy = Copy((1024,))
    copy.write(np.array([1, 2]), np.array([7, 7]))
    with pytest.raises(KernelFault, match="two lanes store one byte"):
        copy.run()


def test_page_numbers_times_page_sizes_pass_32_bits() -> None:
    """flashinfer#3136: in words as in bytes. Only touched pages of it exist."""
    page_bytes = 1024
    pages = (1 << 31) // (page_bytes // 8) + 8
    raw = mmap.mmap(-1, pages * page_bytes, mmap.MAP_PRIVATE | MAP_NORESERVE)
    source = torch.frombuffer(raw, dtype=torch.uint8).view(pages, page_bytes)
    source[-2:] = random_pages(2, page_bytes, 0)
    target = torch.zeros(4, page_bytes, dtype=torch.uint8)
    plan = PagePlan(4, "cpu")
    plan.write(np.array([pages - 2, pages - 1]), np.array([2, 1]), plan.new_staging())
    buffers = PageBuffers([source], [target], "cpu")
    with Guard([source[-2:], buffers.table, plan.table], [target]):
        copy_pages(buffers, plan)
    assert torch.equal(target[[2, 1]], source[-2:])


def test_rows_make_the_way_to_the_host_and_back_by_staging() -> None:
    """Demotion gathers T0 pages for the DMA engine, promotion scatters them."""
    t0, back = random_pages(TARGET_PAGES, 1152, 0), random_pages(TARGET_PAGES, 1152, 1)
    staging = torch.zeros(CAPACITY, 1152, dtype=torch.uint8)
    pages = scattered(TARGET_PAGES, 17, 3)
    plan = PagePlan(CAPACITY, "cpu")
    for source, target, pair in (
        (t0, staging, (pages, np.arange(17))),
        (staging, back, (np.arange(17), pages)),
    ):
        plan.write(*pair, plan.new_staging())
        buffers = PageBuffers([source], [target], "cpu")
        with Guard([source, buffers.table, plan.table], [target]):
            copy_pages(buffers, plan)
    assert torch.equal(back[pages], t0[pages])


def test_buffers_of_any_type_are_bytes() -> None:
    source = torch.randn(10, 4, 64).bfloat16()
    target = torch.zeros(10, 512, dtype=torch.uint8)
    plan = PagePlan(10, "cpu")
    plan.write(np.arange(10), np.arange(10), plan.new_staging())
    copy_pages(PageBuffers([source], [target], "cpu"), plan)
    assert torch.equal(target, source.view(10, -1).view(torch.uint8))


def test_more_pages_than_the_plan_holds_are_refused() -> None:
    """sglang#24587."""
    copy = Copy((1024,))
    pages = np.arange(CAPACITY + 1)
    with pytest.raises(ValueError, match="41 pages in a plan of at most 40"):
        copy.write(pages, pages)


def test_source_and_target_pages_are_equally_many() -> None:
    with pytest.raises(ValueError, match="source pages"):
        Copy((1024,)).write(np.arange(3), np.arange(2))


def test_pages_of_different_sizes_are_refused() -> None:
    pages = torch.zeros(4, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="differ in size"):
        PageBuffers([pages], [torch.zeros(4, 64, dtype=torch.uint8)], "cpu")


def test_buffers_come_in_pairs() -> None:
    pages = torch.zeros(4, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="1 source, 2 target"):
        PageBuffers([pages], [pages, pages], "cpu")


def test_buffers_with_gaps_are_refused() -> None:
    pages = torch.zeros(4, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="contiguous"):
        PageBuffers([pages[:, :64]], [torch.zeros(4, 64, dtype=torch.uint8)], "cpu")
