"""List of config keys with values and help: `python -m leanformer.keys [SECTION] [--config=FILE]`.

A section is model, data, optim, ..., or a single key. Without --config the keys of all tasks are listed, with their
defaults.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("keys")


from leanformer import cli
from leanformer.config import key_docs
from leanformer.errors import ConfigError


@cli.body("keys")
def main(f: cli.Values) -> None:
    if len(f.words) > 1:
        raise ConfigError(f"{' '.join(f.words)}: name at most one section.")
    print(key_docs.help_page(f.config, *f.words))
