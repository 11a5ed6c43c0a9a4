"""Help pages: the description of every key, from the comments at the defaults, and the pages of commands."""

from commands import ROOT, run_in_process
from messages import mentions

from leanformer import config
from leanformer.config import key_docs


CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def parse_page(page):
    """Return the keys of a page with their descriptions."""
    lines = [line.split(maxsplit=1) for line in page.splitlines() if line.startswith("  ") and "=" in line.split()[0]]
    return {line[0].partition("=")[0]: line[1] for line in lines}


def test_every_key_of_every_config_has_a_description():
    for name in CONFIGS:
        c = config.load(name)
        result = parse_page(key_docs.help_page(c))
        assert result.keys() == {key for key, _ in key_docs.iterate_keys(c)}, name
        assert all(len(text) > 3 and text != key_docs.NO_HELP for text in result.values()), name


def test_descriptions_are_the_comments_at_the_defaults():
    """A comment is at the end of the key's line, or above it if long; keys of the same name differ by task."""
    folder = ROOT / "leanformer" / "config"
    lines = [line for name in ("common", "images") for line in (folder / f"{name}.py").read_text().splitlines()]
    result = key_docs.help_texts("images")
    for key, code in (("seed", "    c.seed = 0"), ("model.head_dim", "        head_dim=64,")):
        assert f"{code}  # {result[key]}" in lines
    index = next(number for number, line in enumerate(lines) if line.startswith("    m.remat = "))
    above = [line.strip() for line in lines[index - 2 : index]]
    assert result["model.remat"] == " ".join(line.removeprefix("# ") for line in above) and above[0].startswith("# ")
    assert key_docs.help_texts("sequences")["model.attention"] != result["model.attention"]


def run_keys(*words):
    """Return the page of the command `keys`."""
    status, out, err = run_in_process(["", "", "leanformer.keys", *words])
    assert (status, err) == (0, "")
    return out


def test_keys_lists_the_keys_of_all_tasks_or_of_a_section():
    base = {key for key, _ in key_docs.iterate_keys(config.base())}
    sequences = {key for key, _ in key_docs.iterate_keys(config.sequences())}
    all_keys = parse_page(run_keys()).keys()
    assert all_keys >= base | sequences
    assert parse_page(run_keys("optim")).keys() == {key for key in all_keys if key.startswith("optim.")}
    assert parse_page(run_keys("seed")).keys() == {"seed"}
    status, _, err = run_in_process(["", "", "leanformer.keys", "model", "optim"])
    assert status == 2 and mentions(err, "model optim")


def test_keys_page_of_a_config_has_its_values():
    out = run_keys("--config=quickstart", "--config.model.width=48")
    assert "  model.width=48 " in out and "  data.name=bundled:fashion_mnist " in out and "inner_width" not in out
    out = run_keys("--config=nystromformer_listops")
    assert "  model.landmarks=" in out and "data.recipe.max_args=" in out
    assert parse_page(run_keys("probe", "--config=quickstart")).keys() == {
        f"probe.{name}" for name in ("every", "every_epochs", "examples", "measures")
    }
    status, _, err = run_in_process(["", "", "leanformer.keys", "--config=quikstart"])
    assert status == 2 and mentions(err, "quikstart", "--config=quickstart")


def test_evaluation_intervals_are_run_only():
    c = config.base()
    run_only = [key for key in ("eval.every", "probe.every", "optim.lr") if key_docs.is_run_only(key, c)]
    assert run_only == ["eval.every", "probe.every"]


def test_own_key_of_a_config_file_is_listed():
    c = config.base()
    with c.unlocked():
        c.my_key = 5
        c.model.my_size = 7
    (line,) = [line for line in key_docs.help_page(c, "my_key").splitlines() if "my_key=5" in line]
    assert line.endswith(key_docs.NO_HELP)
    assert "model.my_size=7" in key_docs.help_page(c)
