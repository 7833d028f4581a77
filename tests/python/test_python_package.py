"""The package as such: its types, documentation, weight, and what a small call costs."""

import ast
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import anyflash as af
import pytest
from anyflash import _options

HERE = Path(__file__).parent


def run_program(*command):
    return subprocess.run(command, capture_output=True, text=True)


def run(*command):
    return run_program(sys.executable, *command)


def test_old_openmp_run_times_will_do():
    """PyTorch 2.4 brings one along that has nothing of OpenMP 5."""
    module = Path(af._core.__file__)
    library = module.with_name("libanyflash.so")  # a wheel's; a build folder's module holds it
    read = run_program("readelf", "--version-info", "--wide", library if library.exists() else module)
    assert read.returncode == 0 and "OMP_1.0" in read.stdout and "OMP_5" not in read.stdout, read.stdout + read.stderr


def test_a_program_passes_mypy_strict():
    checked = run("-m", "mypy", "--strict", str(HERE / "typed_example.py"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ran = run(str(HERE / "typed_example.py"))
    assert ran.returncode == 0, ran.stderr


def test_a_wrong_program_does_not_pass_mypy(tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text(
        "import anyflash as af\nimport numpy as np\nq = np.zeros((1, 1, 2, 4), np.float32)\n"
        "af.attention(q, q, q, align='middle')\naf.attention([1.0], q, q)\naf.causal() & 3\n"
    )
    checked = run("-m", "mypy", "--strict", str(program))
    assert [f"wrong.py:{line}: error" in checked.stdout for line in (4, 5, 6)] == [True] * 3, checked.stdout


def test_the_stubs_say_what_is_there(tmp_path):
    not_comparable = tmp_path / "allowlist"
    not_comparable.write_text(
        "anyflash\\._core\\..*\n"  # the extension's functions have no signature that Python could show
        "anyflash\\.(jax|tensorflow|torch|compat|transformers).*\n"  # have no stubs, and their frameworks are not here
        "anyflash\\.libanyflash\n"  # the library itself, beside the extension in a wheel
        "anyflash\\._attention\\.attention\n"  # overloads with **scalars: the next test
    )
    checked = run(
        "-m",
        "mypy.stubtest",
        "anyflash",
        "--ignore-disjoint-bases",
        "--ignore-unused-allowlist",
        "--allowlist",
        str(not_comparable),
        "--mypy-config-file",
        str(HERE.parents[1] / "pyproject.toml"),
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_extension_s_stub_names_what_is_there():
    tree = ast.parse((Path(af.__file__).parent / "_core.pyi").read_text())
    named = {
        getattr(node, "name", None) or node.target.id
        for node in tree.body
        if not isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert named == {name for name in dir(af._core) if not name.startswith("_")}


def test_help_tells_shapes_types_and_errors():
    text = pydoc.plain(pydoc.render_doc(af.attention))
    for word in (
        "(batch, heads, sequence..., channels)",
        "float16, bfloat16",
        "float64",
        "ValueError",
        "TypeError",
        "Returns",
        "none_end",
        "(batch, heads, queries)",
        "FlashAttention-2",
    ):
        assert word in text, word


@pytest.mark.parametrize("name", [name for name in af.__all__ if name != "__version__"])
def test_everything_public_is_documented(name):
    assert len(inspect.getdoc(getattr(af, name))) > 20
    assert getattr(af, name).__module__.startswith("anyflash")


def test_the_overloads_in_the_stub_have_the_parameters_that_are_there():
    """And **scalars, whose type has all others (test_python_options.py)."""
    tree = ast.parse((Path(af.__file__).parent / "_attention.pyi").read_text())
    overloads = [one.args for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "attention"]
    assert len(overloads) == 3
    for args in overloads:
        named = [one.arg for one in (*args.args, *args.kwonlyargs)]
        assert args.kwarg.arg == "scalars"
        assert [*named, *_options.DEFAULTS] == list(inspect.signature(af.attention).parameters)


def test_the_extension_s_stub_has_its_docstrings():
    """Editors and the reference read those of the stub."""
    tree = ast.parse((Path(af.__file__).parent / "_core.pyi").read_text())
    classes = {
        getattr(af, node.name): node for node in tree.body if isinstance(node, ast.ClassDef) and hasattr(af, node.name)
    }
    pairs = list(classes.items())
    pairs += [
        (getattr(real, node.name), node)
        for real, own in classes.items()
        for node in own.body
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    ]
    assert len(pairs) == 7
    for real, node in pairs:
        assert inspect.getdoc(real).endswith(ast.get_docstring(node)), node.name  # a signature may stand before it


def test_every_option_is_documented():
    for call in (af.attention, af.attention_backward):
        for parameter in inspect.signature(call).parameters:
            assert parameter in call.__doc__, parameter


def test_the_version_is_the_library_s():
    header = (HERE.parents[1] / "include/anyflash/version.h").read_text()
    assert f'"{af.__version__}"' in header


def test_importing_brings_no_framework():
    program = (
        "import sys, anyflash; "
        "print([name for name in ('torch', 'jax', 'tensorflow', 'PIL', 'ml_dtypes') if name in sys.modules])"
    )
    assert run("-c", program).stdout.strip() == "[]"
