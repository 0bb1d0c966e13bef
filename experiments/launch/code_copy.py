"""A copy of the code that a queued job can count on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from analysis.files import write_json
from experiments.config.code_version import NOTE, digest, files, origin
from experiments.config.folders import ROOT


def take(into: Path) -> Path:
    """A copy of the code below `into`, named by its digest: what is edited after submission changes no job.

    Copies are shared by all that submit the same code.
    """
    place = into / digest()
    if not (place / NOTE).is_file():
        into.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{digest()}-", dir=into))
        for path in files():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, part / path)
        write_json(part / NOTE, origin())
        part.chmod(0o755)
        try:
            part.rename(place)
        except OSError:  # somebody else was faster
            shutil.rmtree(part)
    return place
