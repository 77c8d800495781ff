"""Make the pictures of docs/gallery.md again, from the commands that stand beside them.

    python benchmarks/gallery.py [NAME...]

A picture `![…](gallery/NAME.jpg)` belongs to the next line that begins with `stylize`. It is run in the project's
folder, and its result saved as a JPEG of at most 60 KB with its settings inside. Without names, all are made: about
half a minute each.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from stylize.images import read_picture, read_record, save_picture

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
MOST_BYTES = 60_000


def commands(page: str) -> dict[str, list[str]]:
    """The arguments of `stylize` for each picture of the page, by the picture's name."""
    found = re.findall(r"\(gallery/([\w-]+)\.jpg\).*?^stylize (.*?)$", page, re.DOTALL | re.MULTILINE)
    return {name: shlex.split(command, comments=True) for name, command in found}


def make(arguments: list[str], out: Path) -> None:
    """Paint, and save as a small JPEG."""
    with tempfile.TemporaryDirectory() as folder:
        painted = Path(folder) / "painted.png"
        command = [sys.executable, "-m", "stylize", *arguments, "--out", str(painted)]
        subprocess.run(command, check=True, cwd=ROOT)
        picture, record = read_picture(painted), read_record(painted)
    for quality in range(90, 30, -4):
        save_picture(picture.tensor, out, record=record, quality=quality, overwrite=True)
        if out.stat().st_size <= MOST_BYTES:
            return


def main() -> None:
    known = commands(PAGE.read_text(encoding="utf-8"))
    for name in sys.argv[1:] or known:
        make(known[name], ROOT / "docs" / "gallery" / f"{name}.jpg")


if __name__ == "__main__":
    main()
