"""Local folders in place of the URLs on a command line, while a command runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from leanformer import stores
from leanformer.cli.flags import CommandLine, Values
from leanformer.errors import LeanformerError
from leanformer.stores import downloads, staging


@contextlib.contextmanager
def staged(line: CommandLine, values: Values) -> Iterator[None]:
    """Replace the URLs in the values of a command by local copies within a `with` block.

    A command that trains uploads what it saves, during the block and at its end; the copies of other commands upload
    the files that the block changes. In messages of errors the copies are replaced by their URLs. All processes of a
    command must call it.

    Args:
        line: flags of the command; `line.urls` names the one whose values may be URLs.
        values: values of the flags, in which the URLs are replaced.

    Raises:
        ConfigError: there is nothing at a URL, or another run uses it.
        StoreError: the store cannot be read or written.
    """
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}

        def replace(path: str | None) -> str | None:
            if not path or not stores.is_url(path):
                return path
            folder = str(stack.enter_context(_open(line, values, path)))
            urls[folder] = path.rstrip("/")
            return folder

        if line.urls == "words":
            values.words = [replace(word) for word in values.words]
        elif line.urls:
            setattr(values, line.urls, replace(getattr(values, line.urls)))
        try:
            yield
        except LeanformerError as error:  # users know the URL, not the copy
            text = str(error)
            for folder, url in urls.items():
                text = text.replace(folder, url)
            raise type(error)(text) from error


def _open(line: CommandLine, values: Values, url: str) -> contextlib.AbstractContextManager[Path]:
    if line.trains:
        return downloads.downloaded(url, downloads.NAMES, upload=False) if values.dry_run else staging.mirrored(url)
    if not hasattr(values, "step"):
        return downloads.downloaded(url, downloads.NONE)
    every = values.best if hasattr(values, "best") else values.all
    return downloads.downloaded(url, downloads.choose(values.step, every=every))
