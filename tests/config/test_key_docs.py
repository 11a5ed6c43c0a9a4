"""Help pages: the description of every key, from the comments at the defaults, and the pages of commands."""

from commands import ROOT, run_in_process
from messages import mentions

from leanformer import config
from leanformer.config import attention, declare, key_docs
from leanformer.config.architectures import ARCHITECTURES
from leanformer.models import find_class


CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def parse_page(page):
    """Return the keys of a page with their descriptions."""
    lines = [line.split(maxsplit=1) for line in page.splitlines() if line.startswith("  ") and "=" in line.split()[0]]
    return {line[0].partition("=")[0]: line[1] for line in lines}


def test_every_key_of_every_config_has_a_description():
    for name in CONFIGS:
        c = config.load(name)
        result = parse_page(key_docs.help_page(c))
        assert result.keys() == {key for key, _ in config.iterate_keys(c)}, name
        assert all(len(text) > 3 and text != key_docs.NO_HELP for text in result.values()), name


def test_descriptions_are_the_comments_at_the_declarations():
    """A comment is at the end of the key's line, or above it if long; allowed values are added."""
    result = key_docs.help_texts(config.base())
    common, lines = (
        (ROOT / f"leanformer/config/{name}.py").read_text().splitlines() for name in ("common", "architectures")
    )
    assert f"    seed: int = 0  # {result['seed']}" in common
    index = next(number for number, line in enumerate(lines) if line.startswith("    remat: "))
    above = " ".join(line.strip().removeprefix("# ") for line in lines[index - 2 : index])
    assert result["model.remat"] == f"{above} (Literal['none', 'light', 'block'])"
    assert key_docs.help_texts(config.sequences())["data.name"] != result["data.name"]


def test_every_declaration_belongs_to_a_model_or_an_attention():
    assert {path.stem for path in (ROOT / "leanformer" / "models").glob("[a-z]*.py")} == {*ARCHITECTURES}
    assert {name: find_class(name).keys for name in ARCHITECTURES} == ARCHITECTURES
    options = {name for keys in attention.OPTIONS for name in declare.types_of(keys)}
    kinds = [kind for name in ARCHITECTURES for kind in find_class(name).attentions.values()]
    assert options == {name for kind in kinds for name in kind.options}


def run_keys(*words):
    """Return the page of the command `keys`."""
    status, out, err = run_in_process(["", "", "leanformer.keys", *words])
    assert (status, err) == (0, "")
    return out


def test_keys_lists_the_keys_of_all_tasks_or_of_a_section():
    base = {key for key, _ in config.iterate_keys(config.base())}
    sequences = {key for key, _ in config.iterate_keys(config.sequences())}
    all_keys = parse_page(run_keys()).keys()
    assert all_keys >= base | sequences
    assert parse_page(run_keys("optim")).keys() == {key for key in all_keys if key.startswith("optim.")}
    assert parse_page(run_keys("seed")).keys() == {"seed"}
    assert parse_page(run_keys("wd")).keys() == {"optim.weight_decay"}
    assert parse_page(run_keys("model.dropout", "--config=quickstart")).keys() == {
        "model.attention_dropout",
        "model.drop_path",
    }
    status, _, err = run_in_process(["", "", "leanformer.keys", "colour_of_paper"])
    assert status == 2 and mentions(err, "colour_of_paper")


def test_keys_page_of_a_config_has_its_values():
    out = run_keys("--config=quickstart", "--config.model.width=48")
    assert "  model.width=48 " in out and "  data.name=bundled:fashion_mnist " in out and "inner_width" not in out
    out = run_keys("--config=nystromformer_listops")
    assert "  model.landmarks=" in out and "data.recipe.max_args=" in out
    assert parse_page(run_keys("probe", "--config=quickstart")).keys() == {
        f"probe.{name}" for name in ("every", "every_epochs", "examples", "measures")
    }
