import errno
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_tiered.memory.backing import (
    Backing,
    MemfdBacking,
    PlainBacking,
    aligned_window_base,
    make_backing,
)
from sglang_tiered.memory.layout import PoolLayout, RowBuffer

GRANULARITY = os.sysconf("SC_PAGESIZE")
LAYERS = 8
KEY_VALUE = (
    RowBuffer("k", (3, 20), torch.float32),
    RowBuffer("v", (3, 16), torch.float16),
)
LATENT = (RowBuffer("latent", (576,), torch.bfloat16),)


def make_layout(
    buffers: tuple[RowBuffer, ...], page_size: int = 1, t0_pages: int = 300
) -> PoolLayout:
    return PoolLayout(page_size, t0_pages, 100, 16, (buffers,) * LAYERS)


@pytest.fixture(
    params=[
        (buffers, page_size)
        for buffers in (KEY_VALUE, LATENT)
        for page_size in (1, 2, 16)
    ],
    ids=lambda param: f"{param[0][0].name}-page{param[1]}",
)
def layout(request: pytest.FixtureRequest) -> PoolLayout:
    return make_layout(*request.param)


@pytest.fixture
def backing(layout: PoolLayout) -> Iterator[MemfdBacking]:
    made = MemfdBacking(layout)
    yield made
    made.close()


def names(layout: PoolLayout) -> list[str]:
    return [buffer.name for buffer in layout.layers[0]]


def memory_file_mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:sglang-tiered" in line]


def resident_bytes_of_memory_files() -> int:
    """The kernel's count of our mappings; pages mapped n times count 1/n each time."""
    ours, kibibytes = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(":")[0].split(" ")[0]:
            ours = "memfd:sglang-tiered" in line
        elif ours and line.startswith("Pss:"):
            kibibytes += int(line.split()[1])
    return kibibytes * 1024


def most_bytes_allowed(backing: MemfdBacking) -> int:
    """T0 and sink of every layer, two windows, rounding of each buffer's two parts."""
    layout = backing.layout
    step = aligned_window_base(layout, GRANULARITY) - layout.t0_pages
    rounding = LAYERS * len(names(layout)) * GRANULARITY
    return rounding + sum(
        layout.page_bytes(0, name)
        * (LAYERS * (layout.t0_pages + step) + 2 * layout.window_pages)
        for name in names(layout)
    )


def test_held_memory_is_t0_of_every_layer_and_two_windows(
    backing: MemfdBacking,
) -> None:
    """sglang#5372."""
    assert backing.mapped_bytes() <= most_bytes_allowed(backing)


def test_the_kernel_counts_the_same_resident_bytes(backing: MemfdBacking) -> None:
    # Other tests of this process may still hold memory files.
    before = resident_bytes_of_memory_files()
    another = MemfdBacking(backing.layout)
    resident = resident_bytes_of_memory_files() - before
    # Pss is rounded down to KiB in every mapping.
    slack = 1024 * len(memory_file_mappings())
    assert abs(resident - another.mapped_bytes()) <= slack
    another.close()


def test_held_memory_is_less_than_a_window_per_layer_would_take() -> None:
    layout = PoolLayout(1, 255, 800, 16, (KEY_VALUE,) * LAYERS)
    backing, plain = MemfdBacking(layout), PlainBacking(layout)
    assert backing.mapped_bytes() < plain.mapped_bytes() / 2
    backing.close()


def test_the_count_is_not_computed_from_the_layout(backing: MemfdBacking) -> None:
    before = backing.mapped_bytes()
    os.ftruncate(backing._files[0], 0)
    assert backing.mapped_bytes() < before


def test_no_memory_is_held_after_close(backing: MemfdBacking) -> None:
    backing.close()
    assert backing.mapped_bytes() == 0


def test_writes_to_a_window_are_seen_by_the_layers_of_its_parity_only(
    backing: MemfdBacking,
) -> None:
    for name in names(backing.layout):
        for writer in range(LAYERS):
            for layer in range(LAYERS):
                backing.pages(layer, name)[backing.window_base :] = 0
            backing.pages(writer, name)[backing.window_base :] = 1 + writer
            seen = [
                float(backing.pages(layer, name)[backing.window_base :].float().mean())
                for layer in range(LAYERS)
            ]
            assert seen == [
                1.0 + writer if layer % 2 == writer % 2 else 0.0
                for layer in range(LAYERS)
            ]


def test_t0_is_private_to_its_layer(backing: MemfdBacking) -> None:
    for name in names(backing.layout):
        for layer in range(LAYERS):
            backing.pages(layer, name)[: backing.window_base] = layer
        for layer in range(LAYERS):
            rows = backing.pages(layer, name)[: backing.window_base]
            assert bool((rows == layer).all())


def test_the_buffers_of_a_layer_do_not_overlap() -> None:
    backing = MemfdBacking(make_layout(KEY_VALUE))
    backing.buffer(0, "k").fill_(1)
    backing.buffer(0, "v").fill_(2)
    assert bool((backing.buffer(0, "k") == 1).all())
    backing.close()


def test_the_window_starts_on_a_mapping_boundary_in_every_buffer(
    backing: MemfdBacking,
) -> None:
    for name in names(backing.layout):
        start = backing.pages(0, name)[backing.window_base :].data_ptr()
        assert start % GRANULARITY == 0


def test_the_window_base_is_the_first_boundary_after_t0(layout: PoolLayout) -> None:
    base = aligned_window_base(layout, GRANULARITY)
    assert base > layout.t0_pages
    candidates = range(1 + layout.t0_pages, base)
    for page in candidates:
        offsets = [page * layout.page_bytes(0, name) for name in names(layout)]
        assert any(offset % GRANULARITY for offset in offsets)


@pytest.mark.parametrize("kind", [MemfdBacking, PlainBacking])
def test_buffers_have_the_rows_and_shape_of_the_layout(
    kind: type[MemfdBacking] | type[PlainBacking], layout: PoolLayout
) -> None:
    backing: Backing = kind(layout)
    pages = backing.window_base + layout.window_pages
    for buffer in layout.layers[0]:
        rows = backing.buffer(3, buffer.name)
        assert rows.shape == (pages * layout.page_size, *buffer.shape)
        assert rows.dtype == buffer.dtype
        assert rows.is_contiguous()
    backing.close()


@pytest.mark.parametrize("kind", [MemfdBacking, PlainBacking])
def test_pages_and_buffer_are_the_same_memory(
    kind: type[MemfdBacking] | type[PlainBacking],
) -> None:
    backing: Backing = kind(make_layout(KEY_VALUE, page_size=16))
    backing.pages(0, "k")[2] = 7
    assert bool((backing.buffer(0, "k")[32:48] == 7).all())
    backing.close()


def test_every_call_returns_the_same_tensor(backing: MemfdBacking) -> None:
    name = names(backing.layout)[0]
    assert backing.buffer(1, name) is backing.buffer(1, name)


def test_a_plain_window_is_private_to_its_layer() -> None:
    backing = PlainBacking(make_layout(KEY_VALUE))
    backing.pages(0, "k")[backing.window_base :] = 1
    assert not backing.pages(2, "k").any()


def test_fifty_backings_leave_no_file_and_no_mapping_behind() -> None:
    MemfdBacking(make_layout(KEY_VALUE)).close()
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(50):
        backing = MemfdBacking(make_layout(KEY_VALUE))
        backing.buffer(0, "k").fill_(1)
        backing.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert memory_file_mappings() == []
    # The allocator may have moved its own mappings; fifty leaks would be hundreds.
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings + 25


def test_close_twice_is_harmless(backing: MemfdBacking) -> None:
    backing.close()
    backing.close()


def test_a_closed_backing_hands_out_nothing(backing: MemfdBacking) -> None:
    backing.close()
    with pytest.raises(RuntimeError, match="closed"):
        backing.buffer(0, names(backing.layout)[0])


def test_a_tensor_outlives_the_backing_that_made_it() -> None:
    backing = MemfdBacking(make_layout(KEY_VALUE))
    rows = backing.buffer(0, "k")
    view = rows[5:7]
    backing.close()
    del backing, rows
    gc.collect()
    view.fill_(3)
    assert float(view.sum()) == 3 * view.numel()


def test_a_mapping_goes_with_the_last_tensor_of_it() -> None:
    backing = MemfdBacking(make_layout(KEY_VALUE))
    view = backing.buffer(0, "k")[5:7]
    backing.close()
    held = len(memory_file_mappings())
    del view
    gc.collect()
    assert (held, len(memory_file_mappings())) == (2, 0)


def test_too_little_memory_is_one_error_that_names_the_flags() -> None:
    """sglang#5372: the window is part of the budget that is checked."""
    # More than a file can be long: without the check this fails at once, too.
    layout = PoolLayout(1, 8, 1 << 58, 16, (KEY_VALUE,) * LAYERS)
    with pytest.raises(
        MemoryError,
        match=r"need \d+ bytes and \d+ are free .*--max-total-tokens or "
        "--tiered-window-tokens",
    ):
        MemfdBacking(layout)


def test_memory_that_runs_out_during_allocation_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only a machine that is really out of memory could show this otherwise.
    def run_out(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match="--max-total-tokens"):
        MemfdBacking(make_layout(KEY_VALUE))
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_is_allocated_before_it_is_used() -> None:
    backing = MemfdBacking(make_layout(LATENT))
    assert all(
        os.fstat(file).st_blocks * 512 >= os.fstat(file).st_size > 0
        for file in backing._files
    )
    backing.close()


@pytest.fixture
def almost_no_files_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Three more files fit: the pool fails half-way through.
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(len(used) + 4) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[3], hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("almost_no_files_left")
def test_without_aliasing_the_windows_are_plain_and_the_cost_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = make_layout(KEY_VALUE)
    backing = make_backing(layout, "cpu")
    assert isinstance(backing, PlainBacking)
    extra = 6 * 100 * (240 + 96)
    assert f"every layer gets a window of its own, {extra} bytes more" in caplog.text


@pytest.mark.usefixtures("almost_no_files_left")
def test_a_failed_construction_leaves_nothing_behind() -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="open files"):
        MemfdBacking(make_layout(KEY_VALUE))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert memory_file_mappings() == []


def test_a_cpu_gets_aliased_windows() -> None:
    backing = make_backing(make_layout(KEY_VALUE), torch.device("cpu"))
    assert isinstance(backing, MemfdBacking)
    backing.close()


def test_other_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no tiered pool on device 'xpu'"):
        make_backing(make_layout(KEY_VALUE), "xpu:0")
