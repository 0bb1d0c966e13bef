"""Sites of static pages, which a browser reads from the disk: the report's and the benchmark's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from analysis.records.files import remove_path, write_atomic

TEMPLATES = Path(__file__).parent / "templates"


class NavigationLink(NamedTuple):
    """A link at the top of every page."""

    page: str  # the name of its page
    path: str  # from the site's folder
    title: str


class StaticSite:
    """A folder of pages, and the templates that they are made from. Texts reach pages escaped."""

    def __init__(
        self,
        folder: Path,
        templates: Path,
        brand: str,
        navigation: Sequence[NavigationLink],
        filters: Mapping[str, Callable[..., Any]],
        **names: Any,
    ) -> None:
        """Prepare the templates.

        Args:
            folder: where pages go; nothing is written yet.
            templates: a folder of templates, which may extend those that all sites share.
            brand: the title of the first page, at the top of every page.
            navigation: links beside it.
            filters: for templates.
            names: what all templates can refer to.
        """
        self.folder = folder
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader([templates, TEMPLATES]),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters |= filters
        self.templates.globals |= {"brand": brand, "navigation": navigation, "title_suffix": "", **names}

    def write_page(self, template: str, name: str = "", subfolder: str = "", **values: Any) -> Path:
        """Write one page, and return its path.

        Args:
            template: its name.
            name: of the page, by default the template's.
            subfolder: of the site, where the page lies in one.
            values: for the template.
        """
        page = name or template
        path_to_root = "../" if subfolder else ""
        text = self.templates.get_template(f"{template}.html").render(page=page, up=path_to_root, **values)
        return self.write_file(f"{subfolder}/{page}.html" if subfolder else f"{page}.html", text)

    def write_file(self, path: str, text: str) -> Path:
        """Write one file of the site, and return its path; a folder in its place is removed."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            remove_path(file)  # all that is in a site's folders was made
        write_atomic(file, text, durable=False)  # it can be made again
        return file
