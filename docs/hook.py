"""A hook of MkDocs: what pages link to outside of docs/, such as examples, becomes pages of the site.

In the repository such links lead to the files themselves, so pages read the same there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_ALWAYS = ("CHANGELOG.md",)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that pages link to, and for those that these link to."""
    waiting = [ROOT / name for name in _ALWAYS]
    for file in files.documentation_pages():
        waiting += _outside(Path(str(file.abs_src_path)))
    seen: set[Path] = set()
    while waiting:
        source = waiting.pop()
        if source in seen or not source.is_file():  # what does not exist is found by the check of links
            continue
        seen.add(source)
        text = source.read_text()
        if source.suffix == ".md":
            waiting += _outside(source)
        else:
            language = {".py": "python", ".yaml": "yaml"}.get(source.suffix, "text")
            text = f"# {source.relative_to(ROOT)}\n\n````{language}\n{text}````\n"
        in_nav = InclusionLevel.INCLUDED if source.name in _ALWAYS else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, _uri(source), content=text, inclusion=in_nav))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the pages that `on_files` has made."""
    here = page.file.src_uri
    own = ROOT / here.removeprefix("source/") if here.startswith("source/") else ROOT / "docs" / here
    if not own.is_file():  # the page of a source that is no page, whose brackets are code
        return markdown

    def led(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(own.parent / link[1]))
        uri = _uri(target) if not target.is_relative_to(ROOT / "docs") else str(target.relative_to(ROOT / "docs"))
        return f"]({os.path.relpath(uri, Path(here).parent)}{link[2] or ''})"

    return _LINK.sub(led, markdown)


def on_post_page(output: str, **_: object) -> str:
    """Name the theme's search for screen readers."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')


def _outside(page: Path) -> Iterator[Path]:
    for target, _ in _LINK.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / target))
        if not path.is_relative_to(ROOT / "docs"):
            yield path


def _uri(source: Path) -> str:
    """Return where the page of a file is: source/examples/small_library.py.md, source/CHANGELOG.md."""
    name = source.relative_to(ROOT).as_posix()
    return f"source/{name}" if source.suffix == ".md" else f"source/{name}.md"
