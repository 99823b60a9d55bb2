"""Notebooks run from top to bottom in a fresh kernel; outputs that are kept are those of one run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run_or_none(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    order = [cell.execution_count for cell in code]
    assert order in ([None] * len(code), list(range(1, len(code) + 1)))
    outputs = [output for cell in code for output in cell.outputs]
    assert order[0] is not None or not outputs
    assert all(output.output_type != "error" for output in outputs)
    # warnings and progress name the machine that ran it
    assert all(output.get("name") != "stderr" for output in outputs)
    shown = json.dumps(outputs)
    assert not re.search(
        r"(?<![\w/])/(?:home|root|tmp|usr|opt|var|work|mnt|private|Users)/|site-packages|[A-Z]:\\\\Users", shown
    )


def test_the_u_index_of_the_quickstart_leaves_out_the_first_position_and_says_so() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(ROOT / "notebooks" / "00_quickstart.ipynb", as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    words = " ".join("\n".join(cell.source for cell in cells if cell.cell_type == "markdown").split())
    assert "u_index" in code
    assert "describe_profile(influence.profile).without_first" in code
    for told in (
        "thinner end (first or last eighth) over the middle half's, minus 1",
        "the first position is left out",
    ):
        assert told in words
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert "density of the thinner end (first or last eighth) over the middle half's, minus 1" in readme


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own machinery
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    run = client.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    run.execute()  # raises at the first cell that does
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any(cell.outputs for cell in code)
