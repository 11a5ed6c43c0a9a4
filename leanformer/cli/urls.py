"""Local folders in place of the URLs on a command line, while a command runs."""

import contextlib
from collections.abc import Iterator

from leanformer import stores
from leanformer.cli.flags import CommandLine, Values
from leanformer.stores import downloads, staging


@contextlib.contextmanager
def staged(line: CommandLine, values: Values) -> Iterator[None]:
    """Replace the URLs in the values of a command by local copies within a `with` block, and upload what it writes.

    All processes of a command must call it.

    Raises:
        ConfigError, StoreError: the errors of `staging.mirrored` and `downloads.downloaded`.
    """
    with contextlib.ExitStack() as stack:

        def replace(path: str | None) -> str | None:
            return str(stack.enter_context(_open(line, values, path))) if path and stores.is_url(path) else path

        if line.urls == "words":
            values.words = [replace(word) for word in values.words]
        elif line.urls:
            setattr(values, line.urls, replace(getattr(values, line.urls)))
        yield


def _open(line: CommandLine, values: Values, url: str) -> contextlib.AbstractContextManager:
    if line.trains:
        return downloads.downloaded(url, downloads.NAMES, upload=False) if values.dry_run else staging.mirrored(url)
    if not hasattr(values, "step"):
        return downloads.downloaded(url, downloads.NONE)
    every = values.best if hasattr(values, "best") else values.all
    return downloads.downloaded(url, downloads.choose(values.step, every=every))
