"""The documents keep their word: Python examples run, links lead somewhere, the gallery is up to date."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
BLOCKS = [pytest.param(block, id=f"{page.name}-{number}") for page in PAGES
          for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S), 1)]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_example_runs(block, tmp_path):
    run = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_gallery_is_up_to_date():
    run = subprocess.run([sys.executable, PROJECT / "docs" / "make_gallery.py", "--check"], capture_output=True, text=True,
                         env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert run.returncode == 0, run.stderr


def test_there_are_examples():
    assert len(BLOCKS) >= 4
