"""The site of scripts/docs: all that is public stands in its reference, its links lead somewhere, and it is read
without a network."""

import ast
import importlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

PROJECT = Path(__file__).resolve().parents[2]
BUILT = PROJECT / "build-docs"
SOURCES = ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "include", "python/anyflash")
MODULES = {
    "": "python",
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow",
    "compat/flash_attn": "flash_attn",
    "compat/flash_attn_interface": "flash_attn",
    "compat/bert_padding": "flash_attn",
    "transformers": "transformers",
}
VERBATIM = ("code", "pre", "script", "style")


class Page(HTMLParser):
    """What a page loads, where it leads, its anchors, and its text without code."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.anchors, self.classes, self.words = [], [], set(), set(), []
        self.verbatim = 0  # the depth of elements whose text is shown as it stands
        self.feed(text)

    def handle_endtag(self, tag):
        self.verbatim -= tag in VERBATIM

    def handle_data(self, text):
        if not self.verbatim:
            self.words.append(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.verbatim += tag in VERBATIM
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.classes |= set((given.get("class") or "").split())
        to = given.get("src") or given.get("href") or given.get("data") if tag != "meta" else None
        if to and tag == "a":
            self.links.append(to)
        elif to and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(to)


@pytest.fixture(scope="module")
def pages():
    sources = [path for name in SOURCES for path in [PROJECT / name, *(PROJECT / name).rglob("*")]]
    newest = max(path.stat().st_mtime for path in sources if path.is_file() and path.suffix != ".pyc")
    index = BUILT / "site" / "index.html"
    if not index.is_file() or index.stat().st_mtime < newest:
        pytest.fail("the site is not built from today's sources: scripts/docs")
    return {path: Page(path.read_text()) for path in (BUILT / "site").rglob("*.html")}


@pytest.fixture(scope="module")
def headers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROJECT / "docs" / "site")
        return importlib.import_module("cpp_reference").Headers(BUILT / "doxygen" / "xml")


def public_names(module):
    """__all__ of a module, or its public functions, without importing it."""
    path = PROJECT / "python" / "anyflash" / module
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


@pytest.mark.parametrize("module, page", MODULES.items())
def test_every_public_name_of_python_is_in_the_reference(module, page, pages):
    names = public_names(module)
    assert names
    built = pages[BUILT / "site" / "reference" / f"{page}.html"]
    headings = {anchor.rpartition(".")[2] for anchor in built.anchors if anchor.startswith("anyflash.")}
    assert set(names) - headings <= {"__version__"}


def declared(header):
    """The functions of a header by its lines alone; what is not public is inline there, or indented."""
    text = re.sub(r"/\*.*?\*/", "", (PROJECT / "include" / "anyflash" / header).read_text(), flags=re.S)
    return set(re.findall(r"^(?!#|//|inline|typedef)[\w:<>]+(?: [\w:<>*]+)*[*&]? (\w+)\(", text, re.M))


@pytest.mark.parametrize(
    "header, page",
    [
        ("attention.h", "cpp_attention"),
        ("option_list.h", "cpp_attention"),
        ("rule.h", "cpp_rules"),
        ("tensor.h", "cpp_tensors"),
        ("dlpack.h", "cpp_tensors"),
        ("devices.h", "cpp_devices"),
        ("tile_machine.h", "cpp_tile_machine"),
        ("explain.h", "cpp_explain"),
        ("sharding.h", "cpp_sharding"),
        ("join.h", "cpp_sharding"),
        ("c_api.h", "c"),
    ],
)
def test_every_public_function_of_a_header_is_in_the_reference_with_a_comment(header, page, pages, headers):
    names = declared(header)
    items = headers.of(header)
    found = [item for item in items if item.kind == "function"]
    assert names and names == {item.name for item in found}
    assert names <= pages[BUILT / "site" / "reference" / f"{page}.html"].anchors
    # Of a C function the comment may be that of its C++ counterpart; of a constructor its class's.
    twins = [headers.cpp_twin(item, item.name) for item in found]
    bare = [item.name for item, twin in zip(found, twins) if not (item.documented or twin and twin.documented)]
    bare += [
        f"{item.name}::{member.name}"
        for item in items
        for member in item.members
        if member.kind == "function" and not member.documented and member.name != item.name
    ]
    assert not bare


def test_every_header_is_in_the_reference(headers):
    pages = "".join(page.read_text() for page in (PROJECT / "docs" / "reference").glob("*.md"))
    wanted = {path.name for path in (PROJECT / "include" / "anyflash").glob("*.h")} - {"anyflash.h", "version.h"}
    assert set(re.findall(r"<!-- header: (\S+) -->", pages)) == wanted


def test_it_loads_nothing_from_a_network(pages):
    for path, page in pages.items():
        assert not [one for one in page.loaded if re.match(r"(https?:)?//", one)], path
        assert not page.classes & {"mermaid", "arithmatex"}, path  # of which the theme fetches scripts
    for style in (BUILT / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style


def test_links_lead_somewhere(pages):
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            target, _, anchor = unquote(link).partition("#")
            if ":" in target or path.name == "404.html":  # whose links begin with /
                continue
            to = (path.parent / target).resolve() if target else path
            assert to.is_file(), f"{path}: {link}"
            assert not anchor or to.suffix != ".html" or anchor in pages[to].anchors | {"__"}, f"{path}: {link}"


def test_no_markdown_is_left(pages):
    for path, page in pages.items():
        text = " ".join(page.words)
        assert not re.search(r"\\[<>_*|]|\]\(|```|:::|&lt;|<!--", text), path


def test_search_knows_the_reference():
    text = (BUILT / "site" / "search" / "search_index.js").read_text()
    index = json.loads(text.removeprefix("var __index = "))
    assert not re.search(index["config"]["separator"], "anyflash_forward")  # a whole name finds its own entry first
    places = {entry["location"] for entry in index["docs"]}
    assert {
        "contributing.html",
        "gallery.html#longformer",
        "guide/jax.html",
        "guide/masks.html#alignment",
        "reference/c.html#anyflash_forward",
        "reference/cpp_rules.html#neighbourhood",
        "reference/python.html#anyflash.attention",
    } <= places


@pytest.mark.parametrize(
    "link, line",
    [
        ("guide/jax.md#no-such-heading", "does not contain an anchor '#no-such-heading'"),
        ("no-such-page.md", "docs/index.md: link to no-such-page.md, which does not exist"),
        ("../src/no_such_file.h", "docs/index.md: link to ../src/no_such_file.h, which does not exist"),
    ],
)
def test_a_broken_link_ends_the_build(link, line, tmp_path):
    for name in ("docs", "include", "python"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "src"))
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md", "README.md"):
        shutil.copy(PROJECT / name, tmp_path)
    with open(tmp_path / "docs" / "index.md", "a") as page:
        page.write(f"\n[there]({link})\n")
    command = [PROJECT / ".venv-docs" / "bin" / "python", "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and line in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    "option, code, line",
    [
        ("--help", 0, "scripts/docs: builds the documents and the reference"),
        ("--hlep", 1, "docs: unknown option --hlep; scripts/docs --help says what it does"),
    ],
)
def test_options_of_the_script(option, code, line):
    done = subprocess.run([PROJECT / "scripts" / "docs", option], capture_output=True, text=True)
    assert done.returncode == code and (done.stdout + done.stderr).startswith(line)
