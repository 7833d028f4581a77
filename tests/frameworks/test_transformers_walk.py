"""Every architecture that the installed Transformers can build small: the values of "eager", or refused in one line.

Without a mask, with padding on either side, and in generation with both kinds of caches.
"""

import warnings

import architectures
import pytest
import transformers

import anyflash.transformers

PARTS = 32  # of the architectures, some twenty each
NAMES = architectures.names()
FEWEST = 4  # of a part, that must be equal; today 5 to 15 are


@pytest.fixture
def calls(monkeypatch):
    """Gets longer with each call that reaches anyflash."""
    seen = []
    real = anyflash.transformers.attention
    monkeypatch.setattr(anyflash.transformers, "attention", lambda *a, **o: seen.append(1) or real(*a, **o))
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
    assert list(found.values()).count("equal") >= FEWEST, found
