"""Take out of notebooks what changes with every run and is no result: execution times, kernel versions, widgets.

A widget without its kernel is an error message; the picture that stands beside it in the output stays.
"""

import sys

import nbformat

for path in sys.argv[1:]:
    notebook = nbformat.read(path, as_version=4)
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
