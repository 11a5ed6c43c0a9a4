"""Pages of `compare` and of the manual in a real browser, if one is installed.

Console, widths, contrast, links. `apt-get install chromium` installs one on Debian.
"""

import functools
import html
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import fake_runs
import pytest
from commands import run, run_in_process


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: looked for chromium, chromium-browser and google-chrome"),
]
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SCHEMES = {"dark": 0, "light": 1}  # values of Chromium's setting
WIDTHS = (390, 1280)  # of a phone and of a laptop, in CSS pixels


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    sweep = fake_runs.write_sweep(folder / "s")
    assert run_in_process(["", "", "leanformer.compare", str(sweep), f"--out={folder}"])[0] == 0
    return folder


def audit(pages, folder, scheme):
    """Open pages at all WIDTHS; return what audit.html found, and the lines of the console."""
    fragment = urllib.parse.quote(json.dumps({"pages": [page.as_uri() for page in pages], "widths": WIDTHS}))
    words = ["--allow-file-access-from-files", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    words += ["--hide-scrollbars", "--virtual-time-budget=600000", "--enable-logging=stderr", "--dump-dom"]
    address = f"{Path(__file__).with_name('audit.html').as_uri()}#{fragment}"
    process = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={folder / 'user'}", *words, address],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    result = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', process.stdout, re.DOTALL)[1]))
    result["failures"] += [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    result["failures"] += [f"{page}: {link}: no such file" for page, link in result["links"] if not is_there(link)]
    return result


def is_there(link):
    """Return whether the file of a local link exists, with the element of its fragment; True for other links."""
    parts = urllib.parse.urlsplit(link)
    if parts.scheme != "file":
        return True
    path, name = Path(urllib.parse.unquote(parts.path)), urllib.parse.unquote(parts.fragment)
    return path.is_file() and (not name or f'id="{name}"' in read_page(path))


@functools.cache
def read_page(path):
    return path.read_text()


@pytest.fixture(scope="module")
def manual(tmp_path_factory):
    """Return the pages of the manual, built as `make docs` builds it."""
    pytest.importorskip("furo", reason="the manual needs the extra docs")
    folder = tmp_path_factory.mktemp("manual")
    words = [sys.executable, "-m", "sphinx", "-q", "-c", "docs", "-b", "html", ".", str(folder)]
    assert run(words, timeout=600)[0] == 0
    return [path for path in sorted(folder.rglob("*.html")) if path.parent != folder and "_static" not in path.parts]


@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_pages_fit_have_contrast_and_their_links_resolve(pages, tmp_path, scheme):
    result = audit([pages / "compare.html"], tmp_path, scheme)
    assert result["failures"] == [] and result["opened"] == len(WIDTHS)
    assert result["texts"] > 100 and result["lines"] > 50


@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_manual_fits_has_contrast_and_its_links_resolve(manual, tmp_path, scheme):
    result = audit(manual, tmp_path, scheme)
    print(
        f"{scheme}: " + ", ".join(f"{key} {result[key]}" for key in ("opened", "texts")), len(result["links"]), "links"
    )
    assert result["failures"] == [] and result["opened"] == len(WIDTHS) * len(manual)
    assert len(manual) > 25 and len(result["links"]) > 1500


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<h1>", "<h1><a href='gone.html'>x</a>", "no such file"),
        ("--ink: #1d2730", "--ink: #bbbbbb", "text"),
        ("<h1>", "<h1 style='width: 500px'>", "scrolls to"),
        ("minmax(min(22rem, 100%), 1fr)", "minmax(6rem, 1fr)", "picture cut"),
        ("<h2>Methods</h2>", "<h2>Methods</h2><script>missing()</script>", "CONSOLE"),
    ],
)
def test_audit_finds_what_is_broken_on_purpose(pages, tmp_path, old, new, words):
    """Negative control: one link, one colour of text, one width, one of pictures, one script."""
    text = (pages / "compare.html").read_text()
    assert old in text
    page = pages / "broken.html"
    page.write_text(text.replace(old, new))
    failures = audit([page], tmp_path, "light")["failures"]
    assert failures and all(words in failure for failure in failures)
