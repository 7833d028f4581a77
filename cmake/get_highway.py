"""Brings the Highway sources (SIMD, Apache-2.0 / BSD-3) into a folder, where their own archive cannot be reached.

PyPI has no package of Highway of its own, but NumPy's source archive carries it whole; the archive is found through the
package index that pip is set up for (PIP_INDEX_URL, pip's configuration, or pip's default) and pinned by its hash.

    python get_highway.py FOLDER      leaves FOLDER/highway/hwy/highway.h and the rest
"""

import hashlib
import io
import os
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

ARCHIVE = "numpy-2.3.5.tar.gz"
SHA256 = "784db1dcdab56bf0517743e746dfb0f885fc68d948aba86eeec2cba234bdf1c0"
INSIDE = "numpy-2.3.5/numpy/_core/src/highway/"


def pip_setting(name):
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", f"global.{name}"], capture_output=True, text=True
    )
    return os.environ.get("PIP_" + name.upper().replace("-", "_")) or found.stdout.strip() or None


def index_url():
    configured = pip_setting("index-url")
    if configured:
        return configured
    try:
        from pip._internal.models.index import PyPI  # pip's own default
    except ImportError:
        raise RuntimeError(
            f"{sys.executable} has no pip to ask for the index; choose one with -DPython3_EXECUTABLE="
        ) from None
    return PyPI.simple_url


def download():
    context = ssl.create_default_context(cafile=pip_setting("cert"))
    page_url = index_url().rstrip("/") + "/numpy/"
    page = urllib.request.urlopen(page_url, context=context, timeout=20).read().decode()
    links = re.findall(r'href="([^"#]*' + re.escape(ARCHIVE) + r")", page)
    if not links:
        raise RuntimeError(f"the package index does not list {ARCHIVE}")
    data = urllib.request.urlopen(urljoin(page_url, links[0]), context=context, timeout=600).read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise RuntimeError(f"{ARCHIVE} does not have the expected SHA-256")
    return data


def main():
    target = Path(sys.argv[1]) / "highway"
    part = target.with_suffix(".part")  # so that an interrupted build leaves no half of it
    with tarfile.open(fileobj=io.BytesIO(download())) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.startswith(INSIDE):
                path = part / member.name[len(INSIDE) :]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    part.rename(target)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(f"get_highway: Highway could not be fetched: {error}")
