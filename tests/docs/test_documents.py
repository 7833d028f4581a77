"""The documents keep their word: examples in Python, C++, C and the shell run, links lead somewhere, the gallery is up
to date."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyflash as af
import numpy as np
import pytest
from snippets import PAGES, PROJECT, snippets


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", snippets("python", [page for page in PAGES if page.name != "gallery.md"]))
def test_python_example_runs(block, tmp_path):
    run(sys.executable, "-c", block, cwd=tmp_path)


def test_the_gallery_s_examples_run_after_its_first_one(tmp_path):
    blocks = [param.values[0] for param in snippets("python", [PROJECT / "docs" / "gallery.md"])]
    assert len(blocks) == 35
    run(sys.executable, "-c", "\n".join(blocks), cwd=tmp_path)


@pytest.fixture(scope="session")
def installed(program, tmp_path_factory):
    """The library of the program's build folder, installed: what find_package looks for."""
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", program.parents[2], "--prefix", folder, "--component", "library")
    return folder


@pytest.mark.parametrize(
    "language, block",
    [
        pytest.param(language, *param.values, id=f"{language}-{param.id}")
        for language in ("cpp", "c")
        for param in snippets(language)
    ],
)
def test_compiled_example_runs(language, block, installed, tmp_path):
    """Built as the guide's CMake example says; what it prints stands beside its printf."""
    (use,) = (param.values[0] for param in snippets("cmake"))
    (tmp_path / f"main.{language}").write_text(block)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(example LANGUAGES C CXX)\n"
        f"add_executable(my_program main.{language})\n{use}"
    )
    run(
        "cmake",
        "-S",
        tmp_path,
        "-B",
        tmp_path / "build",
        "-G",
        "Ninja",
        f"-DCMAKE_PREFIX_PATH={installed}",
        "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror",
        "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror",
    )
    run("cmake", "--build", tmp_path / "build")
    printed = re.findall(r"printf\(.*?\); *// (.*)", block)
    assert printed and run(tmp_path / "build" / "my_program").splitlines() == printed


@pytest.mark.parametrize("block", snippets("sh"))
def test_shell_example_runs(block, program, tmp_path):
    q = np.random.default_rng(0).standard_normal((1, 2, 48, 16)).astype(np.float32)
    np.savez(tmp_path / "qkv.npz", q=q, k=q, v=q)
    np.save(tmp_path / "dout.npy", q)
    np.save(tmp_path / "documents.npy", np.arange(48) // 20)
    run("bash", "-ec", block, cwd=tmp_path, env=os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.relative_to(PROJECT)}: {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", "docs/notes/README.md"])
def test_files_that_are_named_exist(page):
    """Whole paths in backticks, from the project's root; a * stands for anything, NAME for a name to be chosen."""
    folders = "bench|cmake|docs|examples|include|python|scripts|src|tests"
    for path in re.findall(rf"`((?:{folders})/[^`\s]*)`", (PROJECT / page).read_text()):
        assert "NAME" in path or list(PROJECT.glob(path.rstrip("/"))), f"{page}: {path}"


def test_the_version_is_the_same_everywhere():
    version = re.search('ANYFLASH_VERSION "(.*)"', (PROJECT / "include/anyflash/version.h").read_text())[1]
    assert re.search(r"^version: (.*)$", (PROJECT / "CITATION.cff").read_text(), re.M)[1] == version
    assert re.search(r"^## (\S+)", (PROJECT / "CHANGELOG.md").read_text(), re.M)[1] == version


@pytest.mark.parametrize(
    "script", ["make_gallery.py", "make_diagrams.py", "make_kernel_table.py", "make_tile_pictures.py"]
)
def test_pictures_are_up_to_date(script):
    run(sys.executable, PROJECT / "docs" / script, "--check", env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})


@pytest.mark.parametrize("option, code", [("--help", 0), ("--chekc", 2)])
def test_the_gallery_is_not_written_for_other_options(option, code, tmp_path):
    script = shutil.copy(PROJECT / "docs" / "make_gallery.py", tmp_path)
    done = subprocess.run([sys.executable, script, option], capture_output=True, text=True)
    assert done.returncode == code and "--check" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [Path(script)]


def test_the_rules_of_the_table_of_masks_are_rules():
    """Each with the names that the table uses."""
    table = (PROJECT / "docs/guide/masks.md").read_text().split("## I have this mask")[1].split("\n\n")[1]
    names = vars(af) | dict(n=4, w=2, l=3, r=1, s=1, length=24, kernel=5, tile=3, query_rows=6, key_rows=6)
    names |= dict(ids=np.arange(24) // 10, cu_seqlens=np.array([0, 10, 24], np.int32), rule=af.causal())
    names |= dict(bitmap=np.eye(4, dtype=bool), mask=np.eye(24, dtype=bool))
    cells = [row.replace("\\|", "&#124;").split("|")[2] for row in table.splitlines()[2:]]
    rules = [re.findall(r"`([^`]*)`", cell.replace("&#124;", "|"))[:1] for cell in cells]
    rules = [code for found in rules for code in found if "(" in code or code.startswith("~")]
    assert len(rules) >= 16
    for code in rules:
        assert af.explain(eval(code, names), 24).visible_pairs > 0, code


def test_every_page_of_the_guide_shows_a_call():
    assert [len(snippets(language)) for language in ("cpp", "c", "cmake", "sh")] == [2, 1, 1, 4]
    guide = {page.stem: page.read_text() for page in PAGES if page.parent.name == "guide"}
    assert {name for name, text in guide.items() if "```" not in text} == {"index", "options"}


def test_every_block_of_code_is_run():
    """Each opens with a line that a test looks for (scripts/test runs those of the frameworks), or is plain text."""
    run_somewhere = {"python", "python torch", "python jax", "python tensorflow", "cpp", "c", "cmake", "sh"}
    for page in PAGES:
        opened = re.findall(r"^```(.*)$", page.read_text(), re.M)[::2]
        assert set(opened) <= run_somewhere | {"text"}, page
