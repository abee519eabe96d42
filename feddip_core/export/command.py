"""The final model of a record in every form: python -m feddip_core.export RECORD [FOLDER]"""

import argparse
from pathlib import Path

from ..deploy import export


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m feddip_core.export", description=__doc__)
    parser.add_argument("record", type=Path, help="the folder of a finished run, with its model.safetensors")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("model"), help="where to write (default: model)")
    parser.add_argument("--bits", type=int, choices=(16, 32), default=16, help="of each kept weight (default: 16)")
    options = parser.parse_args(words)
    try:
        out = export(options.record, options.folder, options.bits)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for path in sorted(out.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0
