"""Execution of every notebook from top to bottom, at reduced size."""

from pathlib import Path

import pytest
import small_notebooks
from commands import FAST_COMPILE_FLAGS
from nbclient import NotebookClient


NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILE_FLAGS)
    notebook = small_notebooks.read(path)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    figures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(figures) >= 4
