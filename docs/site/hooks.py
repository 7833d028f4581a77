"""MkDocs' hooks of the site: the reference of C++ and C, pages from outside of docs/, links out of docs/."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from cpp_reference import ASKS, HEADERS, PROJECT, Headers, run_doxygen

# Documents of the project's root that are pages of the site; the site's own first page stands for README.md.
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES = OUTSIDE | {"README.md": "index.md"}
# Pages that stand alone in their part of the menu leave its place to their tables.
_ALONE = ("index.md", "gallery.md", "performance.md", "tile-machine.md")
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)
_CODE_WITH_BAR = re.compile(r"`([^`]*\\\|[^`]*)`")
_headers: Headers


def on_config(config: Any) -> Any:
    global _headers
    try:
        _headers = Headers(run_doxygen())
    except (RuntimeError, FileNotFoundError) as error:  # its warnings, or there is none
        raise PluginError(str(error)) from None
    for page in sorted((PROJECT / "docs" / "reference").glob("*.md")):
        for header in ASKS.findall(page.read_text()):
            if not (HEADERS / header).is_file():
                raise PluginError(f"docs/reference/{page.name}: include/anyflash/{header} does not exist")
            _headers.pages[header] = f"reference/{page.name}"
    return config


def on_files(files: Any, config: Any) -> Any:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(PROJECT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    own = page.file.src_uri
    source = next((name for name, uri in OUTSIDE.items() if uri == own), f"docs/{own}")
    markdown = re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.M)  # what tests read behind a block's language
    markdown = re.sub(r"^\|.*", lambda row: _CODE_WITH_BAR.sub(_bar, row[0]), markdown, flags=re.M)
    if own in _ALONE:
        page.meta.setdefault("hide", ["navigation"])
    markdown = ASKS.sub(lambda match: _headers.markdown(match[1], own), markdown)
    code = [match.span() for match in _CODE.finditer(markdown)]
    return _LINK.sub(lambda link: _link(link, source, own, code, files), markdown)


def _bar(code: re.Match[str]) -> str:
    """Code in a table's row that has a bar, which GitHub's Markdown wants escaped and MkDocs' would show so."""
    return f"<code>{escape(code[1].replace(chr(92) + '|', '|')).replace('|', '&#124;')}</code>"


def _link(link: re.Match[str], source: str, own: str, code: list[tuple[int, int]], files: Any) -> str:
    """A link as the site has it: to a page of it, or the text alone where it leads to a file that the site has not."""
    target, anchor = link[3], link[4] or ""
    if not target or ":" in target or any(begin <= link.start() < end for begin, end in code):
        return link[0]
    at = normpath(f"{source}/../{target}")
    if not (PROJECT / at).exists():
        raise PluginError(f"{source}: link to {target}, which does not exist")
    uri = PAGES.get(at) or (at.removeprefix("docs/") if at.startswith("docs/") else None)
    if uri is not None and files.get_file_from_path(uri) is not None:
        return f"{link[1]}[{link[2]}]({relpath(uri, Path(own).parent.as_posix())}{anchor})"
    if link[1]:
        raise PluginError(f"{source}: picture {target} is outside of docs")
    return link[2]
