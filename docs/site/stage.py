"""Lay out for mkdocs what the pages of docs/ link to.

    python docs/site/stage.py

The pages keep the links by which they are read in the repository. Links to code, which is no part of the
site, become its name.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "docs"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "results/shipped/**/*.md")
FILES = ("results/shipped/**/*.png", "results/shipped/**/*.csv", "docs/site/*.js", "CITATION.cff")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def main() -> None:
    """Write all pages anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    pages, files = ({path for glob in globs for path in ROOT.glob(glob)} for globs in (PAGES, FILES))
    for path in files:
        target(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target(path))
    for path in pages:
        target(path).parent.mkdir(parents=True, exist_ok=True)
        target(path).write_text(rewritten(path, pages | files))
    with (STAGE / "docs" / "site" / "api.md").open("a") as page:
        page.write(methods_reference())


def methods_reference() -> str:
    """Return a part of the reference: every method that the library lists, with an example.

    The example sets the first hyperparameter, to its default.
    """
    parts = []
    listed = (ROOT / "sparsify" / "__init__.py").read_text()
    for name in re.findall(r"from sparsify\.methods\.(\w+) import", listed):
        tree = ast.parse((ROOT / "sparsify" / "methods" / f"{name}.py").read_text())
        (function,) = (part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == name)
        first = [*zip(function.args.args, function.args.defaults, strict=True)][:1]
        words = "".join(f"{argument.arg}={ast.unparse(default)}" for argument, default in first)
        parts.append(f"::: sparsify.{name}\n\n```python\n>>> method = sparsify.{name}({words})\n```\n\n")
    return "".join(parts)


def target(path: Path) -> Path:
    """Return the place of a file on the site: the README is its first page."""
    name = path.relative_to(ROOT)
    return STAGE / ("index.md" if str(name) == "README.md" else name)


def rewritten(page: Path, known: set[Path]) -> str:
    """Return the text of a page, in which links to files that the site lacks have become text."""

    def link(found: re.Match[str]) -> str:
        picture, text, to, anchor = found.groups(default="")
        if "://" in to:
            return found[0]
        path = (page.parent / to).resolve()
        if path == ROOT / "README.md":
            return f"[{text}]({'../' * len(page.relative_to(ROOT).parent.parts)}index.md{anchor})"
        if path in known:
            return found[0]
        return text if picture or "`" in text else f"`{text}`"

    return LINK.sub(link, page.read_text())


if __name__ == "__main__":
    main()
