"""What docs/recipes.md says of notebooks, in a real one with a real kernel."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.frameworks.both import LIMIT, needs
from tests.support.patience import crowding

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
pytestmark = [needs("nbclient"), needs("ipykernel"), pytest.mark.filterwarnings("ignore")]
COMPUTED = (
    "import torch; x = torch.randn(800, 800, requires_grad=True); (x @ x).sum().backward(); torch.get_num_threads()"
)


def cells() -> list[str]:
    return re.findall(r"^```ipython\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def execute(sources: list[str], folder: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(
        book, timeout=round(LIMIT * crowding()), kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})


def test_the_three_ways(tmp_path: Path) -> None:
    """After a cell that has computed with several threads, which a forked process can't use."""
    assert len(cells()) == 5
    execute([COMPUTED, *cells()], tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["forked.pt", "model.pt", "spawned.pt"]


def test_a_function_in_a_cell_can_not_be_spawned(tmp_path: Path) -> None:
    """Why the page says that it has to be imported."""
    from nbclient.exceptions import CellExecutionError

    source = cells()[-1].replace('start_method="fork"', 'start_method="spawn"')
    assert source != cells()[-1]
    with pytest.raises(CellExecutionError):
        execute([source], tmp_path)
