"""cmake/needed.cmake and cmake/highway.cmake: what a build does where something that it needs is missing."""

import hashlib
import os
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake")
GENERATOR = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"]


def configure(folder, text, *options, **environment):
    """Configures a project of these lines from folder/source into folder/build."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.25)\nproject(one NONE)\n{text}\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "ANYFLASH_DEPENDENCIES")}
    done = subprocess.run(
        [CMAKE, *GENERATOR, "-S", source, "-B", folder / "build", *options],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert [path.name for path in source.iterdir()] == ["CMakeLists.txt"]  # which may be read-only
    return done


def error(done):
    """The one error's text, as one line."""
    assert done.returncode == 1 and done.stderr.count("CMake Error") == 1, done.stdout + done.stderr
    return " ".join(done.stderr.split("(message):")[1].split("Call Stack")[0].split())


CXX = "There is no C++ compiler: install g++ (Fedora: gcc-c++), or set CXX"


@pytest.mark.parametrize(
    ("found", "environment", "message"),
    [
        ([], {}, CXX),
        ([], {"CXX": "g++", "CC": "gcc"}, CXX),  # as pip sets them
        ([], {"CXX": "/nowhere/g++ -O2"}, CXX),
        (["g++"], {}, "There is no C compiler: install gcc, or set CC"),
    ],
)
def test_a_missing_compiler(tmp_path, found, environment, message):
    path = tmp_path / "path"
    path.mkdir()
    for name in found:
        (path / name).symlink_to(shutil.which(name))
    include = f"include({PROJECT}/cmake/needed.cmake)"
    hidden = "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"
    assert error(configure(tmp_path, include, hidden, PATH=str(path), **environment)) == message


def test_a_compiler_without_openmp(tmp_path):
    done = configure(
        tmp_path, f"include({PROJECT}/cmake/needed.cmake)", "-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON", CXX="g++"
    )
    assert error(done) == "The C++ compiler has no OpenMP: install libgomp1 and g++ (Fedora: libgomp)"


@pytest.mark.parametrize("compilers", [{}, {"CXX": "g++", "CC": "gcc"}], ids=["found", "set"])
def test_all_there(tmp_path, compilers):
    done = configure(tmp_path, f"include({PROJECT}/cmake/needed.cmake)", **compilers)
    assert done.returncode == 0 and done.stderr == ""


def test_no_headers_of_python(tmp_path):
    """The project itself, whose compilers are there."""
    highway = tmp_path / "dependencies" / "highway" / "hwy" / "highway.h"
    highway.parent.mkdir(parents=True)
    highway.touch()
    done = subprocess.run(
        [CMAKE, *GENERATOR, "-S", PROJECT, "-B", tmp_path / "build", "-DANYFLASH_CLI=OFF", "-DANYFLASH_CUDA=OFF"]
        + ["-DANYFLASH_PYTHON=ON", "-DPython_INCLUDE_DIR=/nowhere"],
        env=os.environ | {"ANYFLASH_DEPENDENCIES": str(tmp_path / "dependencies")},
        capture_output=True,
        text=True,
    )
    assert "has no headers: install python3-dev (Fedora: python3-devel)" in error(done)


HIGHWAY = f"enable_language(CXX)\ninclude({PROJECT}/cmake/highway.cmake)"
SOURCES = ("abort.cc", "aligned_allocator.cc", "targets.cc", "highway.h")


def sources(folder):
    (folder / "hwy").mkdir(parents=True)
    for name in SOURCES:
        (folder / "hwy" / name).touch()


@pytest.fixture
def no_index(tmp_path):
    """A package index that is not there, and an archive that is, but is not Highway's."""
    sources(tmp_path / "highway-1.3.0")
    archive = tmp_path / "other.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "highway-1.3.0", "highway-1.3.0")
    return {"PIP_INDEX_URL": (tmp_path / "no_index").as_uri()}, archive


def test_highway_is_fetched_into_the_build_folder(tmp_path, no_index):
    """The archive's hash is checked: here it is that of a stand-in."""
    _, archive = no_index
    text = (PROJECT / "cmake" / "highway.cmake").read_text()
    expected = "07b3c1ba2c1096878a85a31a5b9b3757427af963b1141ca904db2f9f4afe0bc2"
    assert text.count(expected) == 1
    other = tmp_path / "highway.cmake"
    other.write_text(text.replace(expected, hashlib.sha256(archive.read_bytes()).hexdigest()))
    done = configure(tmp_path, f"enable_language(CXX)\ninclude({other})", f"-DANYFLASH_HIGHWAY_URL={archive.as_uri()}")
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    kept = tmp_path / "build" / "dependencies" / "highway" / "hwy"
    assert sorted(path.name for path in kept.iterdir()) == sorted(SOURCES)


@pytest.mark.parametrize("archive", ["another", "none", "refused"])
def test_without_highway_s_archive_the_package_index_is_asked(tmp_path, no_index, archive):
    environment, other = no_index
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        urls = {
            "another": other.as_uri(),
            "none": (tmp_path / "nothing").as_uri(),
            "refused": f"http://127.0.0.1:{closed.getsockname()[1]}/",
        }
        done = configure(tmp_path, HIGHWAY, f"-DANYFLASH_HIGHWAY_URL={urls[archive]}", **environment)
    assert "Highway is missing: install it (CMake package hwy 1.3 or newer)" in error(done)
    lines = [line for line in done.stdout.splitlines() if "own archive" in line]
    assert len(lines) == 1 and lines[0].endswith("; NumPy's is taken from the package index")
    assert not (tmp_path / "build" / "dependencies" / "highway").exists()


def test_kept_sources_are_taken(tmp_path):
    sources(tmp_path / "kept" / "highway")
    done = configure(
        tmp_path, HIGHWAY, "-DANYFLASH_HIGHWAY_URL=file:///nowhere", ANYFLASH_DEPENDENCIES=str(tmp_path / "kept")
    )
    assert done.returncode == 0 and done.stderr == "" and "Fetching" not in done.stdout
