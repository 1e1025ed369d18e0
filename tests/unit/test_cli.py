"""cli/main.py: the console script in front of SGLang's own launcher."""

import pytest
import sglang.cli.serve

from sglang_tiered import __version__
from sglang_tiered.cli.main import main
from sglang_tiered.flags import FLAGS

ADDED = ["--radix-cache-backend", "tiered", "--cuda-graph-backend-decode", "disabled"]


@pytest.fixture
def handed_over(monkeypatch):
    """The arguments that SGLang's ``serve`` receives."""
    calls = []
    monkeypatch.setattr(
        sglang.cli.serve, "serve", lambda args, extra: calls.append(extra)
    )
    return calls


def test_version_names_both_versions(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"sglang-tiered {__version__} (SGLang 0.5.23)\n"


def test_no_command_is_an_error():
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2


def test_serve_adds_the_tiered_cache_in_front(handed_over):
    main(["serve", "--model-path", "m", "--port", "1"])
    assert handed_over == [
        ["--model-type", "llm", *ADDED, "--model-path", "m", "--port", "1"]
    ]


def test_a_leading_model_path_stays_in_front(handed_over):
    main(["serve", "org/model", "--tiered-host-gb", "8"])
    assert handed_over == [
        ["--model-type", "llm", "org/model", *ADDED, "--tiered-host-gb", "8"]
    ]


@pytest.mark.parametrize("argv", [["serve"], ["serve", "m", "--help"], ["serve", "-h"]])
def test_the_help_of_serve_teaches_with_an_example(capsys, handed_over, argv):
    main(argv)
    text = capsys.readouterr().out
    assert "sglang-tiered serve --model-path MODEL --max-total-tokens 8000" in text
    assert [flag.cli for flag in FLAGS if flag.cli not in text] == []
    assert handed_over == []
