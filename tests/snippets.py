"""The code blocks of the project's documents: README.md, CONTRIBUTING.md and all of docs."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").rglob("*.md"))]


def snippets(language, pages=PAGES):
    """A parameter for each block that opens with this line: "python" runs with NumPy alone, "python torch" and its
    like need a framework."""
    return [
        pytest.param(block, id=f"{page.relative_to(PROJECT)}-{number}")
        for page in pages
        for number, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M), 1)
    ]
