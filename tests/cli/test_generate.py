"""`heddle generate`: one answer in the command's own process."""

from __future__ import annotations

from pathlib import Path

import heddle as package

SQL = Path(package.__path__[0]) / "adapters" / "sql"
QUESTION = "Table books (title, author, pages, price). How many books are there?"


def test_an_adapter_changes_the_answer(heddle, demo_base):
    """The expected answers are those of transformers and PEFT on the same files."""
    common = ["generate", str(demo_base), QUESTION, "--chat", "--max-tokens", "24"]
    plain, adapted = heddle(*common), heddle(*common, "--adapter", str(SQL))
    assert (plain.exit_code, plain.stdout) == (0, "There are 12 books in total.\n")
    assert (adapted.exit_code, adapted.stdout) == (0, "SELECT COUNT(*) FROM books;\n")


def test_without_chat_the_prompt_is_continued(heddle, demo_base):
    result = heddle("generate", str(demo_base), "The capital of France is", "--max-tokens", "2")
    assert (result.exit_code, result.stdout) == (0, " Paris.\n")


def test_a_model_that_is_nowhere_is_status_1_and_an_adapter_2(heddle, tmp_path):
    for status, args in (
        (1, ["nowhere/", "x"]),
        (1, [str(tmp_path), "x"]),
        (2, [str(tmp_path), "x", "--adapter", "nowhere"]),
    ):
        result = heddle("generate", *args)
        assert result.exit_code == status
        assert ("nowhere" if "nowhere" in str(args) else str(tmp_path)) in result.stderr


def test_a_prompt_that_does_not_fit_is_status_1(heddle, demo_base):
    result = heddle("generate", str(demo_base), "word " * 9000)
    assert result.exit_code == 1
    assert "8192" in result.stderr
