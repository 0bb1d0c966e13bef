"""What pyproject.toml says runs need, one requirement a line, for pip. Python 3.11 or newer."""

from pathlib import Path

import tomllib

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["train"], sep="\n")
