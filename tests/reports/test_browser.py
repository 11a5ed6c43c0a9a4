"""Pages of `compare` and of the manual in a real browser, if one is installed.

Console, network requests, widths, contrast, links. `apt-get install chromium` installs one on Debian.
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
import numpy as np
import pytest
from commands import run, run_in_process
from matplotlib import image


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: looked for chromium, chromium-browser and google-chrome"),
]
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SCHEMES = {"dark": 0, "light": 1}  # values of Chromium's setting
WIDTHS = (390, 1280)  # of a phone and of a laptop, in CSS pixels
MIN_CONTRAST = 4.5  # minimum contrast of text and background (WCAG 2.1, AA)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    sweep = fake_runs.write_sweep(folder / "s")
    assert run_in_process(["", "", "leanformer.compare", str(sweep), f"--out={folder}"])[0] == 0
    return folder


def open_page(page, folder, scheme="light", *words):
    """Open a page; return the lines of its console, and the URLs that were requested."""
    log = folder / "net.json"
    process = subprocess.run(
        [
            *(BROWSER, *QUIET),
            *(f"--user-data-dir={folder / 'user'}", "--enable-logging=stderr", f"--log-net-log={log}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"),
            *("--hide-scrollbars", "--window-size=1100,1600", *words, page),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    requests = {
        event["params"]["url"].partition("?")[0]
        for event in json.loads(log.read_text())["events"]
        if "url" in event.get("params", {}) and re.match(r"(https?|wss?|ftp):", event["params"]["url"])
    }
    return [line for line in process.stderr.splitlines() if "CONSOLE" in line], requests


@pytest.fixture(scope="module")
def blank_page_requests(tmp_path_factory):
    """Return the requests that this browser makes with a blank page."""
    folder = tmp_path_factory.mktemp("blank")
    return open_page("about:blank", folder, "light", "--dump-dom")[1]


def luminance(pixels):
    """Return relative luminance as defined by WCAG, for pixels from 0 to 1."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_page_is_legible_and_makes_no_requests(pages, blank_page_requests, tmp_path, scheme):
    shot = tmp_path / "shot.png"
    console, requests = open_page(f"file://{pages}/compare.html", tmp_path, scheme, f"--screenshot={shot}")
    assert console == [] and requests <= blank_page_requests
    luminances = luminance(image.imread(shot)[:, :, :3].astype(float))
    background = float(np.median(luminances))
    assert (background > 0.9) if scheme == "light" else (background < 0.02)
    contrast = (np.maximum(luminances, background) + 0.05) / (np.minimum(luminances, background) + 0.05)
    halves = np.array_split(contrast > MIN_CONTRAST, 2)  # text at the top, and charts below
    assert all(0.005 < half.mean() < 0.3 for half in halves)


def test_requests_and_errors_of_a_page_are_detected(blank_page_requests, tmp_path):
    """Negative control of the tests above."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://elsewhere.invalid/a.png'><script>missing()</script>")
    console, requests = open_page(f"file://{page}", tmp_path, "light", f"--screenshot={tmp_path / 'shot.png'}")
    assert any("missing" in line for line in console)
    assert "http://elsewhere.invalid/a.png" in requests - blank_page_requests


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
        ("--series0: #1f6f8b", "--series0: #a8e05f", "line"),
        ("<h1>", "<h1 style='width: 500px'>", "scrolls to"),
        ("minmax(min(22rem, 100%), 1fr)", "minmax(6rem, 1fr)", "picture cut"),
        ("<h2>Methods</h2>", "<h2>Methods</h2><script>missing()</script>", "CONSOLE"),
    ],
)
def test_audit_finds_what_is_broken_on_purpose(pages, tmp_path, old, new, words):
    """Negative control: one link, one colour of text, one of lines, one width, one of pictures, one script."""
    text = (pages / "compare.html").read_text()
    assert old in text
    page = pages / "broken.html"
    page.write_text(text.replace(old, new))
    failures = audit([page], tmp_path, "light")["failures"]
    assert failures and all(words in failure for failure in failures)
