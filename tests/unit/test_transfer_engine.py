"""The engine as it runs on a CPU: forwards inline, fills on a thread."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from where import on_host

from sglang_tiered.memory.backing import Backing, MemfdBacking, PlainBacking
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.layout import PoolLayout, RowBuffer
from sglang_tiered.transfer.engine import TransferEngine
from sglang_tiered.transfer.streams import Event, InlineStream, ThreadStream

LAYERS = 9
T0, WINDOW, HOST = 60, 40, 120
BUFFERS = {
    "k-v float32": (
        RowBuffer("k", (3, 20), torch.float32),
        RowBuffer("v", (3, 16), torch.float32),
    ),
    "k-v float16": (
        RowBuffer("k", (1, 5), torch.float16),
        RowBuffer("v", (1, 5), torch.float16),
    ),
    "latent bfloat16": (RowBuffer("latent", (576,), torch.bfloat16),),
}
Pages = np.ndarray
NONE = np.empty(0, np.int64)


class Broken(Exception):
    pass


class BreakingStream:
    """A thread stream on which work of the given names fails."""

    def __init__(self, *broken: str) -> None:
        self._stream = ThreadStream("breaking")
        self._broken = broken

    def submit(
        self, name: str, work: Callable[[], None], after: Sequence[Event] = ()
    ) -> Event:
        def fail() -> None:
            raise Broken(name)

        return self._stream.submit(name, fail if name in self._broken else work, after)

    def close(self) -> None:
        self._stream.close()


class Rig:
    """An engine over random host and T0 rows."""

    def __init__(
        self,
        buffers: tuple[RowBuffer, ...] = BUFFERS["k-v float32"],
        page_size: int = 1,
        *,
        kind: type[MemfdBacking] | type[PlainBacking] = MemfdBacking,
        fill: BreakingStream | ThreadStream | None = None,
    ) -> None:
        self.layout = PoolLayout(page_size, T0, WINDOW, HOST, (buffers,) * LAYERS)
        self.names = [buffer.name for buffer in buffers]
        self.backing: Backing = kind(self.layout)
        self.host = HostPool(self.layout)
        self.engine = TransferEngine(
            self.backing,
            self.host,
            schedule=InlineStream(),
            fill=ThreadStream("fill") if fill is None else fill,
        )
        generator = torch.Generator().manual_seed(0)
        for layer in range(LAYERS):
            for name in self.names:
                for rows in (
                    self.host.pages(layer, name),
                    self.backing.pages(layer, name)[: 1 + T0],
                ):
                    rows.copy_(torch.randn(rows.shape, generator=generator))

    def window(self, *numbers: int) -> Pages:
        return self.backing.window_base + np.array(numbers, dtype=np.int64)

    def host_rows(self, layer: int) -> list[torch.Tensor]:
        return [self.host.pages(layer, name) for name in self.names]

    def device_rows(self, layer: int) -> list[torch.Tensor]:
        return [self.backing.pages(layer, name) for name in self.names]

    def reads_right(self, layer: int, host_pages: Pages, window_pages: Pages) -> bool:
        """Whether attention of this layer would now read the bytes of the host."""
        return all(
            same_bytes(device[window_pages], host[host_pages])
            for host, device in zip(
                self.host_rows(layer), self.device_rows(layer), strict=True
            )
        )


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*args: object, **kwargs: object) -> Rig:
        rigs.append(Rig(*args, **kwargs))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.close()
        rig.backing.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture(params=[1, 2, 16], ids=lambda size: f"page{size}")
def shaped_rig(
    request: pytest.FixtureRequest, shape: str, make_rig: Callable[..., Rig]
) -> Rig:
    return make_rig(BUFFERS[shape], request.param)


@pytest.mark.parametrize("shape", BUFFERS)
def test_bytes_of_every_row_survive_demotion_and_promotion(shaped_rig: Rig) -> None:
    """sglang#38031."""
    rig = shaped_rig
    rng = np.random.default_rng(0)
    rows = 1 + rng.permutation(T0)[:50]
    hosts = rng.permutation(HOST)[:50]
    homes = 1 + rng.permutation(T0)[:50]
    before = [
        [rows_of[rows].clone() for rows_of in rig.device_rows(layer)]
        for layer in range(LAYERS)
    ]
    rig.engine.demote(rows, hosts, written_epoch=0)
    for layer in range(LAYERS):
        for device in rig.device_rows(layer):
            device[: 1 + T0] = float("nan")
    rig.engine.promote(on_host(hosts), homes)
    for layer in range(LAYERS):
        for device, old in zip(rig.device_rows(layer), before[layer], strict=True):
            assert same_bytes(device[homes], old)


@pytest.mark.parametrize("shape", BUFFERS)
def test_attention_of_every_layer_reads_the_demoted_bytes(shaped_rig: Rig) -> None:
    """sglang#38031."""
    rig = shaped_rig
    rng = np.random.default_rng(0)
    rows = 1 + rng.permutation(T0)[:30]
    hosts = rng.permutation(HOST)[:30]
    window = rig.window(*rng.permutation(WINDOW)[:30])
    rig.engine.demote(rows, hosts, written_epoch=0)
    rig.engine.begin_forward(on_host(hosts), window)
    for layer in range(LAYERS):
        rig.engine.wait_until(layer)
        for device in rig.device_rows(layer):
            assert same_bytes(device[window], device[rows])
    rig.engine.end_forward()


def test_a_plain_backing_reads_the_same_bytes(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(kind=PlainBacking)
    hosts, window = np.array([9, 3, 4]), rig.window(0, 1, 2)
    rig.engine.begin_forward(on_host(hosts), window)
    right = []
    for layer in range(LAYERS):
        rig.engine.wait_until(layer)
        right.append(rig.reads_right(layer, hosts, window))
    rig.engine.end_forward()
    assert right == [True] * LAYERS


def layers_asked_for(rng: np.random.Generator) -> list[int]:
    """All layers in order, some of them, or any in any order."""
    kind = rng.integers(4)
    if kind == 0:
        return sorted(rng.permutation(LAYERS)[: rng.integers(LAYERS)].tolist())
    if kind == 1:
        return rng.integers(LAYERS, size=12).tolist()
    return list(range(LAYERS))


@pytest.mark.parametrize("seed", range(8))
def test_any_forwards_and_copies_agree_with_a_plain_model(
    seed: int, make_rig: Callable[..., Rig]
) -> None:
    """sglang#38031, vllm#46014: 40 forwards with random plans, copies between them."""
    rng = np.random.default_rng(seed)
    rig = make_rig(list(BUFFERS.values())[seed % 3], [1, 2, 16][seed % 3])
    engine = rig.engine
    model_host = [[r.clone() for r in rig.host_rows(n)] for n in range(LAYERS)]
    model_t0 = [
        [r[: 1 + T0].clone() for r in rig.device_rows(n)] for n in range(LAYERS)
    ]

    def agrees(layer: int, hosts: Pages, window: Pages) -> bool:
        return all(
            same_bytes(device[window], host[hosts])
            for host, device in zip(
                model_host[layer], rig.device_rows(layer), strict=True
            )
        )

    for _ in range(40):
        count = rng.integers(T0)
        rows, hosts = 1 + rng.permutation(T0)[:count], rng.permutation(HOST)[:count]
        if rng.random() < 0.5:
            engine.demote(rows, hosts, engine.submitted_epoch)
            for t0, host in zip(model_t0, model_host, strict=True):
                for t0_rows, host_rows in zip(t0, host, strict=True):
                    host_rows[hosts] = t0_rows[rows]
        else:
            engine.promote(on_host(hosts), rows)
            for t0, host in zip(model_t0, model_host, strict=True):
                for t0_rows, host_rows in zip(t0, host, strict=True):
                    t0_rows[rows] = host_rows[hosts]
        count = rng.integers(WINDOW + 1)
        first = 0 if rng.random() < 0.5 else None
        numbers = np.arange(count) if first == 0 else rng.permutation(WINDOW)[:count]
        hosts, window = rng.integers(HOST, size=count), rig.window(*numbers)
        engine.begin_forward(on_host(hosts), window)
        for layer in layers_asked_for(rng):
            engine.wait_until(layer)
            assert agrees(layer, hosts, window)
            engine.wait_until(layer)
            assert agrees(layer, hosts, window)
        engine.end_forward()
        engine.check_integrity()
        assert engine.done_epoch == engine.submitted_epoch
    for layer in range(LAYERS):
        for rows_of, t0_rows in zip(
            rig.device_rows(layer), model_t0[layer], strict=True
        ):
            assert same_bytes(rows_of[: 1 + T0], t0_rows)
        for rows_of, host_rows in zip(
            rig.host_rows(layer), model_host[layer], strict=True
        ):
            assert same_bytes(rows_of, host_rows)


def test_without_fills_the_window_holds_other_bytes(rig: Rig) -> None:
    """The negative control."""
    rig.engine.skip_fill = True
    hosts, window = np.array([9, 3, 4]), rig.window(0, 1, 2)
    rig.engine.begin_forward(on_host(hosts), window)
    right = []
    for layer in range(LAYERS):
        rig.engine.wait_until(layer)
        right.append(rig.reads_right(layer, hosts, window))
    rig.engine.end_forward()
    assert right == [False] * LAYERS


def test_a_wait_outside_a_forward_does_nothing(rig: Rig) -> None:
    rig.engine.wait_until(3)
    assert rig.engine.bytes_streamed == 0


def test_a_wait_after_a_forward_does_nothing(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    rig.engine.end_forward()
    streamed = rig.engine.bytes_streamed
    rig.engine.wait_until(5)
    assert rig.engine.bytes_streamed == streamed


def test_a_forward_that_streams_nothing_copies_nothing(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(NONE), NONE)
    for layer in range(LAYERS):
        rig.engine.wait_until(layer)
    rig.engine.end_forward()
    assert (rig.engine.bytes_streamed, rig.engine.done_epoch) == (0, 1)


def test_a_second_wait_fills_nothing_again(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    for layer in range(LAYERS):
        rig.engine.wait_until(layer)
        rig.engine.wait_until(layer)
    rig.engine.end_forward()
    assert rig.engine.bytes_streamed == rig.layout.bytes_per_token


def test_layers_never_asked_for_are_not_filled(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    rig.engine.wait_until(0)
    rig.engine.end_forward()
    assert rig.engine.bytes_streamed == 2 * rig.layout.bytes_per_token // LAYERS
    assert rig.engine.done_epoch == 1


def test_copied_bytes_are_counted(rig: Rig) -> None:
    rig.engine.demote(np.array([1, 2, 3]), np.array([7, 8, 9]), 0)
    rig.engine.promote(on_host(np.array([7, 8])), np.array([5, 6]))
    token = rig.layout.bytes_per_token
    assert rig.engine.bytes_demoted == 3 * token
    assert rig.engine.bytes_promoted == 2 * token


def test_waits_are_counted_and_timed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(BUFFERS["latent bfloat16"], 16)
    for _ in range(20):
        rig.engine.begin_forward(on_host(np.arange(WINDOW)), rig.window(*range(WINDOW)))
        for layer in range(LAYERS):
            rig.engine.wait_until(layer)
        rig.engine.end_forward()
    assert 0 < rig.engine.fill_waits <= 20 * LAYERS
    assert rig.engine.fill_wait_seconds > 0


def test_a_consumer_may_be_set_at_any_time(rig: Rig) -> None:
    rig.engine.set_consumer(-1)


def test_a_failed_fill_is_raised_to_attention_for_key_and_value(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(fill=BreakingStream("fill(1, 2)"))
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    rig.engine.wait_until(0)
    rig.engine.wait_until(1)
    for _ in ("key", "value"):
        with pytest.raises(Broken, match=r"fill\(1, 2\)"):
            rig.engine.wait_until(2)


def test_a_failed_fill_that_nobody_read_is_raised_at_the_end(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(fill=BreakingStream("fill(1, 1)"))
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    rig.engine.wait_until(0)
    with pytest.raises(Broken):
        rig.engine.end_forward()
    rig.engine.check_integrity()
    assert rig.engine.done_epoch == 1


def test_forwards_after_a_failed_one_read_the_right_bytes(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(fill=BreakingStream("fill(1, 0)"))
    hosts, window = np.array([9, 4]), rig.window(0, 5)
    rig.engine.begin_forward(on_host(hosts), window)
    with pytest.raises(Broken):
        rig.engine.wait_until(0)
    with pytest.raises(Broken):
        rig.engine.end_forward()
    rig.engine.begin_forward(on_host(hosts), window)
    rig.engine.wait_until(0)
    assert rig.reads_right(0, hosts, window)
    rig.engine.end_forward()


def test_an_engine_closes_in_the_middle_of_a_failed_forward(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(fill=BreakingStream("fill(1, 0)"))
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    rig.engine.close()
    rig.engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        rig.engine.begin_forward(on_host(NONE), NONE)


def test_an_engine_keeps_its_buffers_until_it_is_gone(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(np.arange(30)), rig.window(*range(30)))
    rig.backing.close()
    rig.engine.wait_until(0)
    rig.engine.end_forward()


def test_copies_inside_a_forward_are_refused(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(NONE), NONE)
    for call in (
        lambda: rig.engine.demote(np.array([1]), np.array([2]), 0),
        lambda: rig.engine.promote(on_host(np.array([1])), np.array([2])),
        lambda: rig.engine.begin_forward(on_host(NONE), NONE),
    ):
        with pytest.raises(RuntimeError, match="inside forward 1"):
            call()
    rig.engine.end_forward()


def test_an_end_without_a_beginning_is_refused(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="end_forward outside a forward"):
        rig.engine.end_forward()


def test_a_layer_that_does_not_exist_is_refused(rig: Rig) -> None:
    rig.engine.begin_forward(on_host(np.array([9])), rig.window(0))
    with pytest.raises(ValueError, match="layer 9 of 9"):
        rig.engine.wait_until(LAYERS)
    rig.engine.end_forward()


def test_rows_of_a_forward_that_never_began_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="written by forward 1 of 0"):
        rig.engine.demote(np.array([1]), np.array([2]), 1)


@pytest.mark.parametrize("page", [0, 1 + T0])
def test_t0_pages_outside_t0_are_refused(page: int, rig: Rig) -> None:
    with pytest.raises(ValueError, match="T0 pages"):
        rig.engine.demote(np.array([page]), np.array([2]), 0)
    with pytest.raises(ValueError, match="T0 pages"):
        rig.engine.promote(on_host(np.array([2])), np.array([page]))


@pytest.mark.parametrize("page", [-1, HOST])
def test_host_pages_outside_the_pool_are_refused(page: int, rig: Rig) -> None:
    with pytest.raises(ValueError, match="host pages"):
        rig.engine.demote(np.array([1]), np.array([page]), 0)
    with pytest.raises(ValueError, match="host pages"):
        rig.engine.promote(on_host(np.array([page])), np.array([1]))
    with pytest.raises(ValueError, match="host pages"):
        rig.engine.begin_forward(on_host(np.array([page])), rig.window(0))


@pytest.mark.parametrize("number", [-1, WINDOW])
def test_window_pages_outside_the_window_are_refused(number: int, rig: Rig) -> None:
    with pytest.raises(ValueError, match="window pages"):
        rig.engine.begin_forward(on_host(np.array([1])), rig.window(number))


def test_a_refused_forward_does_not_begin(rig: Rig) -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        rig.engine.begin_forward(on_host(np.array([1, 2])), rig.window(3, 3))
    assert rig.engine.submitted_epoch == 0
    rig.engine.check_integrity()
