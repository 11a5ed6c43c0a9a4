"""List of config keys with values and help: `python -m leanformer.keys [WORD] [--config=FILE]`.

The word is a section, such as model, data or optim, a single key, or a word to search for in names and help, such as
dropout; some names of other libraries, such as wd, are understood. Without --config the keys of all tasks are listed,
with their defaults.
"""

from leanformer import cli
from leanformer.config import key_docs


@cli.command(cli.OPTIONAL_CONFIG, words="at most one word, such as model", optional_words=True, validated=False)
def main(flags: cli.Values) -> None:
    print(key_docs.help_page(flags.config, " ".join(flags.words)))


if __name__ == "__main__":
    cli.run(main)
