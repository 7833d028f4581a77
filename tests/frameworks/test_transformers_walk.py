"""Every architecture that the installed Transformers can build small: the values of "eager", or refused in one line.

Without a mask, with padding on either side, and in generation with both kinds of caches.
"""

import re
import warnings
from pathlib import Path

import anyflash.transformers
import architectures
import pytest
import transformers

PARTS = 32  # of the architectures, some twenty each
NAMES = architectures.names()
LISTED = re.findall(r"^\[(.*)\]\n([^[]*)", (Path(__file__).parent / "architectures.txt").read_text(), re.M)
KNOWN = {name: kind for kind, names in LISTED for name in names.split()}  # what is not equal


@pytest.fixture
def calls(monkeypatch):
    """Gets longer with each call that reaches anyflash."""
    seen = []
    for name in ("attention", "plain_attention"):
        real = getattr(anyflash.transformers, name)
        monkeypatch.setattr(anyflash.transformers, name, lambda *a, real=real, **o: seen.append(1) or real(*a, **o))
    return seen


@pytest.mark.parametrize("part", range(PARTS))
def test_equal_to_eager_or_refused(part, calls, record_property):
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found, wrong = {}, []
    for name in NAMES[part::PARTS]:
        calls.clear()
        try:
            found[name], line = architectures.compare(name, calls)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            assert found[name] != "refused" or "\n" not in line, name
    assert not wrong, "\n".join(wrong)
    for kind in ("equal", "refused", "not built"):
        record_property(f"architectures {kind}", [name for name in found if found[name] == kind])
    other = {name: kind for name, kind in found.items() if KNOWN.get(name, "equal") not in (kind, "not built")}
    assert list(found.values()).count("equal") >= 4, found
    assert not other  # if what an architecture needs has come with a new Transformers, change architectures.txt
