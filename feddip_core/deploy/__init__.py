"""From a finished run to a model one can use: a small file, ONNX, one C file, one JavaScript file.

A network becomes a short list of plain operations (`graph`), from which every form is written.
"""

from .exporting import export
from .file import load

__all__ = ["export", "load"]
