"""README.md, the guide and the page of figures are read with ease: short sentences, and the README shows before it tells."""

import re

import pytest
from snippets import PROJECT

PAGES = [
    PROJECT / "README.md",
    PROJECT / "docs" / "performance.md",
    PROJECT / "docs" / "tile-machine.md",
    PROJECT / "docs" / "hopper.md",
    *sorted((PROJECT / "docs" / "guide").glob("*.md")),
    *sorted((PROJECT / "learn").glob("*.md")),
]
MEAN, MOST = 18, 35  # words of a sentence


def prose(text):
    """Paragraphs, points of lists and cells of tables, without code, pictures and the addresses of links."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.S | re.M)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.M)  # indented code
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "code", text)
    paragraphs, cells, now = [], [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells += [cell.strip() for cell in line.strip("|").split("|")]
        if not line.strip() or line.startswith(("#", "|")) or re.match(r"\s*[-*] ", line):
            paragraphs.append(" ".join(now))
            now = []
        if not line.startswith(("#", "|")):
            now.append(re.sub(r"^\s*[-*] ", "", line.strip()))
    return [one for one in paragraphs if one.strip()], [cell for cell in cells if re.search(r"\w", cell)]


def sentences(parts):
    """A full stop between digits, or within a name, ends nothing."""
    return [one for part in parts for one in re.split(r"(?<=[.!?])[*\"')]*\s+", part) if re.search(r"\w", one)]


def words(sentence):
    return [word for word in sentence.split() if re.search(r"\w", word)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_sentences_are_short(page):
    paragraphs, cells = prose(page.read_text())
    lengths = [len(words(one)) for one in sentences(paragraphs)]
    assert sum(lengths) / len(lengths) < MEAN
    long = [one for one in sentences([*paragraphs, *cells]) if len(words(one)) > MOST]
    assert not long


def test_how_sentences_are_counted():
    text = "# Heading\n\nOne two. Three `a b. c`\nfour 1.5 five [six](x.md)!\n- seven\n\n| eight nine | |\n|---|---|\n\n    code here\n"
    paragraphs, cells = prose(text)
    assert [len(words(one)) for one in sentences(paragraphs)] == [2, 6, 1] and cells == ["eight nine"]


def test_the_readme_s_first_figure_is_on_its_first_screen():
    lines = (PROJECT / "README.md").read_text().splitlines()
    assert any("](docs/pictures/" in line for line in lines[:40])
    assert lines.index("## PyTorch in four lines") < 40


def test_the_notes_stay_short():
    pages = (PROJECT / "docs" / "notes").glob("*.md")
    assert sum(len(words(page.read_text())) for page in pages) < 9000
