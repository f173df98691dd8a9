"""notebooks/ocelli.ipynb runs from top to bottom and is stored without what it printed."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.mark.slow
def test_it_runs(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS / "ocelli.ipynb", as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    patience = {"timeout": 1200, "startup_timeout": 600}  # seconds a cell, and to begin: of a loaded machine
    NotebookClient(notebook, kernel_name="python3", resources=resources, **patience).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "What colour is the star? -> blue" in printed and "step 10: loss" in printed


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOKS / "ocelli.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
