"""Fixtures of the end-to-end tests: the models, the reference, one server at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.server import Flags
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest
from tests.tiny_model import HEAD_DIM, NUM_KV_HEADS, make_tiny_model

REFERENCE_TOKENS = 100_000
# The tiny model speaks token ids only.
TINY = ("--skip-tokenizer-init",)
LAYERS = 8
# K and V of one of its tokens in one layer, float32.
ROW_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"), layers=LAYERS)


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server_logs")


@pytest.fixture(scope="session")
def reference(tiny_model: Path, log_folder: Path) -> Iterator[Reference]:
    """The stock server; it runs to the end of the session, asleep most of the time."""
    flags = Flags(REFERENCE_TOKENS, (*TINY, "--sleep-on-idle"))
    with ServerUnderTest(tiny_model, flags, log_folder / "stock.log") as server:
        yield Reference(server)
