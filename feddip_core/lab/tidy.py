"""Make executed notebooks ready to be kept: python -m feddip_core.lab.tidy notebooks/*.ipynb"""

import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor


def tidy(path: str | Path) -> None:
    """Remove what changes with every run and is no result: execution times, kernel versions, widgets, cuts in a stream.

    Without its kernel a widget shows an error message. The picture beside it in the output stays.
    """
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(nbformat.read(path, as_version=4), {})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.metadata.pop("papermill", None)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data.pop("application/vnd.jupyter.widget-view+json", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        tidy(name)
