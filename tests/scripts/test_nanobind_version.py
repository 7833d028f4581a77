"""cmake/nanobind.cmake: which versions of nanobind the build takes."""

import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def configure(folder, version):
    """Configures a project that finds a nanobind of this version, whose version file accepts one major version."""
    major = version.split(".")[0]
    (folder / "nanobind-config.cmake").write_text("")
    (folder / "nanobind-config-version.cmake").write_text(
        f'set(PACKAGE_VERSION "{version}")\n'
        f'if(NOT PACKAGE_FIND_VERSION OR PACKAGE_FIND_VERSION_MAJOR STREQUAL "{major}")\n'
        "  set(PACKAGE_VERSION_COMPATIBLE TRUE)\nendif()\n"
    )
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.25)\nproject(one NONE)\ninclude({PROJECT}/cmake/nanobind.cmake)\n"
    )
    return subprocess.run(
        ["cmake", "-S", folder, "-B", folder / "build", f"-Dnanobind_DIR={folder}"], capture_output=True, text=True
    )


@pytest.mark.parametrize("version", ["2.15.0", "2.99.1", "3.0.0", "3.1.0"])
def test_versions_that_are_taken(tmp_path, version):
    done = configure(tmp_path, version)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("version", ["1.9.2", "2.14.9", "4.0.0"])
def test_other_versions(tmp_path, version):
    done = configure(tmp_path, version)
    assert done.returncode == 1 and done.stderr.count("CMake Error") == 1
    assert f"nanobind {version}: expected 2.15 to 3.x" in done.stderr
