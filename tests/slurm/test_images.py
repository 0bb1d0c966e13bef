"""What an image says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm import images


@pytest.mark.parametrize(
    ("said", "expected"), [('{"labels": {"a": "b"}}', {"a": "b"}), ('{"labels": null}', {}), ("{}", {})]
)
def test_an_image_may_have_no_labels(tmp_path: Path, said: str, expected: dict[str, str]) -> None:
    program = tmp_path / "apptainer"
    program.write_text(f'#!/bin/sh\necho \'{{"data": {{"attributes": {said}}}}}\'\n')
    program.chmod(0o755)
    assert images.labels(tmp_path / "x.sif", str(program)) == expected
