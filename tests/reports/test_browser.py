"""The pages of `compare` in a real browser, if one is installed: legibility, console and network requests."""

import json
import re
import shutil
import subprocess

import made_runs
import numpy as np
import pytest
from commands import inside
from matplotlib import image


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: looked for chromium, chromium-browser and google-chrome"),
]
SCHEMES = {"dark": 0, "light": 1}  # of Chromium's setting
INK = 4.5  # least contrast of text on its ground (WCAG 2.1, AA)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    sweep = made_runs.sweep(folder / "s")
    assert inside(["", "", "leanformer.compare", str(sweep), f"--out={folder}"])[0] == 0
    assert inside(["", "", "leanformer.compare", str(sorted(sweep.iterdir())[0]), f"--out={folder}"])[0] == 0
    return folder


def browse(page, folder, scheme="light", *words):
    """Opens a page; returns what was written on its console, and what was asked of a network meanwhile."""
    log = folder / "net.json"
    told = subprocess.run(
        [
            *(
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
            ),
            *(f"--user-data-dir={folder / 'user'}", "--enable-logging=stderr", f"--log-net-log={log}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"),
            *("--hide-scrollbars", "--window-size=1100,1600", *words, page),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    asked = {
        event["params"]["url"].partition("?")[0]
        for event in json.loads(log.read_text())["events"]
        if "url" in event.get("params", {}) and re.match(r"(https?|wss?|ftp):", event["params"]["url"])
    }
    return [line for line in told.stderr.splitlines() if "CONSOLE" in line], asked


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return the requests that this browser makes with a blank page."""
    folder = tmp_path_factory.mktemp("blank")
    return browse("about:blank", folder, "light", "--dump-dom")[1]


def luminance(pixels):
    """Relative, as WCAG has it; pixels from 0 to 1."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("name", ["compare", "run"])
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_a_page_is_legible_and_asks_for_nothing(pages, own, tmp_path, name, scheme):
    shot = tmp_path / "shot.png"
    console, asked = browse(f"file://{pages / name}.html", tmp_path, scheme, f"--screenshot={shot}")
    assert console == [] and asked <= own
    light = luminance(image.imread(shot)[:, :, :3].astype(float))
    ground = float(np.median(light))
    assert (ground > 0.9) if scheme == "light" else (ground < 0.02)
    contrast = (np.maximum(light, ground) + 0.05) / (np.minimum(light, ground) + 0.05)
    halves = np.array_split(contrast > INK, 2)  # the words on top, and charts below them
    assert all(0.005 < half.mean() < 0.3 for half in halves)


@pytest.mark.parametrize("name", ["compare", "run"])
def test_a_page_prints(pages, tmp_path, name):
    paper = tmp_path / "paper.pdf"
    console, _ = browse(
        f"file://{pages / name}.html", tmp_path, "dark", "--no-pdf-header-footer", f"--print-to-pdf={paper}"
    )
    sheets = len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))
    assert console == [] and 1 < sheets < 12


def test_a_page_that_asks_for_something_or_fails_is_noticed(own, tmp_path):
    """Negative control of the tests above."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://elsewhere.invalid/a.png'><script>missing()</script>")
    console, asked = browse(f"file://{page}", tmp_path, "light", f"--screenshot={tmp_path / 'shot.png'}")
    assert any("missing" in line for line in console)
    assert "http://elsewhere.invalid/a.png" in asked - own
