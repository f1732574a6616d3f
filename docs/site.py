"""What the documentation site adds to MkDocs: links that leave ``docs/``, and roles in docstrings.

Pages link to each other, and to files, with paths that work in a clone and on a code host. Here
those paths become the site's: a page beside ``docs/`` gets a place in it, any other file is copied,
and a link to a folder becomes its text.

Docstrings name other objects by roles, as in ``:func:`~shardwise.fully_shard```. They become links
into the reference, or code where the reference does not have the name.
"""

from __future__ import annotations

import functools
import os.path
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/gpu.md": "gpu.md",
    "benchmarks/measurements.md": "measurements.md",
}

LINK = re.compile(
    r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)|(?<=src=\")(?P<source>[^\"]+)(?=\")"
)
# What a browser would fetch from elsewhere: scripts, style sheets, images and fonts.
FETCHED = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//[^\s\">]+")
LINKED = re.compile(r"<link[^>]*\shref=\"?(?:https?:)?//[^\s\">]+")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?P<name>[^`]+)`")
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of ``docs/``, and every file that a page links to."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for file in files.documentation_pages():
        for link in LINK.finditer(file.content_string):
            target = link["target"] or link["source"]
            path = _in_repository(file.src_uri, target)
            if path is not None and (ROOT / path).is_file():
                place = _place(path)
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to the site's own places."""
    del config, files
    folder = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = link["target"] or link["source"]
        path = _in_repository(page.file.src_uri, target)
        if path is None:
            return link[0]
        if (ROOT / path).is_dir():
            return link["text"] or ""
        _, hash_, anchor = target.partition("#")
        place = os.path.relpath(_place(path), folder or ".") + hash_ + anchor
        return f"[{link['text']}]({place})" if link["target"] else place

    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site whose pages fetch anything from elsewhere.

    Raises:
        PluginError: one does; the message names page and address.
    """
    for page in Path(config.site_dir).rglob("*.html"):
        for found in (*FETCHED.finditer(page.read_text()), *LINKED.finditer(page.read_text())):
            raise PluginError(f"{page.name} is not self-contained: {found[0]}")


def _in_repository(page: str, target: str) -> str | None:
    """The path, from the root of the repository, that a link on a page leads to, if any."""
    file = target.partition("#")[0]
    if not file or "://" in target or target.startswith("mailto:"):
        return None
    outside = {place: source for source, place in PAGES.items()}
    folder = os.path.dirname(outside.get(page, f"docs/{page}"))
    return os.path.normpath(os.path.join(folder, file))


def _place(path: str) -> str:
    """The place on the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"files/{path}")


class Roles(griffe.Extension):
    """Makes links of the roles in docstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that was just loaded."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(
                lambda role: _linked(role["name"], obj), obj.docstring.value
            )


def _linked(name: str, obj: griffe.Object) -> str:
    """A name in a docstring, as a link where the reference has it."""
    shown = name.rpartition(".")[2] if name.startswith("~") else name
    wanted = name.lstrip("~.")
    owner = obj.name if obj.is_class else "" if obj.parent is None else obj.parent.name
    for target in _reference():
        own = target.rpartition(".")[2]
        if target == wanted or own == wanted:
            return f"[`{shown}`][{target}]"
        if wanted.startswith((f"{target}.", f"{own}.")):
            return f"[`{shown}`][{target}.{wanted.rpartition('.')[2]}]"
        if own == owner and "." not in wanted and wanted in obj.parent.members:
            return f"[`{shown}`][{target}.{wanted}]"
    return f"`{shown}`"


@functools.cache
def _reference() -> tuple[str, ...]:
    """The names that the pages of the reference show."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return tuple(name for page in pages for name in DIRECTIVE.findall(page.read_text()))
