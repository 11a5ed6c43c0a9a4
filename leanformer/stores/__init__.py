"""Objects below a URL of Google Cloud Storage (gs://) or Amazon S3 (s3://), read and written with fsspec."""

import concurrent.futures
import contextlib
import importlib.util
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, WorkdirError, first_line


PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # package and extra of leanformer by scheme
FOLDER = re.compile(r"(\w+)://[\w.\-]+(/[^/\\*?#\[\]\s]+)+/*")
PARALLEL = 8  # simultaneous transfers
POLL, BACKOFF = 1.0, 60.0  # first and longest pause between two attempts, in seconds
PATIENCE = 15.0  # seconds of failures after which a command that cannot read a store ends
SILENCE = 60.0  # seconds without an answer after which a request is repeated
WHOLE = 2**26  # bytes up to which a file is read as a whole, so that it may grow during the upload


logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints tracebacks of the errors that it raises


def is_url(text: Any) -> bool:
    """Return whether a text begins with a scheme, as gs://bucket/run does."""
    return re.match(r"[a-z][a-z0-9+.-]*://", str(text)) is not None


def check_url(url: str, shown: str) -> None:
    """Raise ConfigError unless a URL names a folder in a bucket and the package that reads it is installed.

    Args:
        url: URL to check.
        shown: flag or key with its value, for messages.
    """
    scheme = url.partition("://")[0]
    if scheme not in PACKAGES:
        raise ConfigError(f"{shown}: {scheme}:// is not supported. Use a folder, gs://BUCKET/FOLDER or s3://...")
    if not FOLDER.fullmatch(url) or {".", ".."} & set(url.split("/")):
        raise ConfigError(f"{shown}: expected {scheme}://BUCKET/FOLDER, without spaces, dots alone or any of *?#[].")
    check_package(url, shown)


def check_package(url: str, shown: str) -> None:
    """Raise ConfigError if the package that reads a URL, gs:// or s3://, is not installed.

    Args:
        url: URL to read.
        shown: flag or key with its value, for messages.
    """
    package, extra = PACKAGES[url.partition("://")[0]]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{shown}: the package {package} is not installed. In the repository, run: pip install -e '.[{extra}]'."
        )


class StoreError(WorkdirError):
    """Store that cannot be read or written: wrong URL, no permission, no network, or an object that has vanished."""


class Store:
    """Folder in a bucket of an object store, whose objects are named relative to its URL. Methods raise StoreError.

    Attributes:
        url: URL without a slash at its end.
        fs: file system of fsspec.

    Args:
        url: URL of the folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.

    Raises:
        ConfigError: the URL names no such folder, or the package that reads it is not installed.
    """

    def __init__(self, url: str):
        import fsspec  # slow to import, and not needed without a URL

        check_url(url, url)
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        options = {"use_listings_cache": False, "skip_instance_cache": True}  # other processes write to the store
        if scheme == "gs":
            import aiohttp

            # Limits on silence. The default limits the whole transfer of a file to five minutes.
            options["requests_timeout"] = aiohttp.ClientTimeout(sock_connect=30, sock_read=SILENCE)
        self.fs = fsspec.filesystem(scheme, **options)
        self._root = self.fs._strip_protocol(self.url)
        # Compare the checksum in the answer to each upload. s3fs does so by default.
        self._verified = {"consistency": "md5"} if scheme == "gs" else {}

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise StoreError for an error of the library, which may be of many classes."""
        try:
            yield
        except Exception as error:
            raise StoreError(
                f"{self.url} cannot be used: {type(error).__name__}: {first_line(error)}. Check the URL, the "
                "credentials and the network."
            ) from error

    def path(self, name: str) -> str:
        """Return the path of the object `name` as fsspec expects it: with bucket and folder, without the scheme."""
        return f"{self._root}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return {name: size in bytes} of every object, also in subfolders.

        Raises:
            WorkdirError: a name would leave the folder into which it is downloaded.
        """
        with self._errors():
            self.fs.invalidate_cache()
            objects = self.fs.find(self._root, detail=True)
        # Objects that stand for folders, which web consoles make, are left out.
        objects = {path: info["size"] for path, info in objects.items() if info.get("type") != "directory"}
        objects = {path: size for path, size in objects.items() if not path.endswith("/") and path != self._root}
        sizes = {path.removeprefix(f"{self._root}/"): size for path, size in objects.items()}
        for name in sizes:
            if {"", ".", ".."} & set(name.split("/")) or "\0" in name or "\\" in name:
                raise WorkdirError(f"{self.url} has an object with an unsafe name: {name!r}. Delete or rename it.")
        return sizes

    def read(self, name: str) -> bytes | None:
        """Return the content of an object; None if it does not exist."""
        with self._errors():
            try:
                return self.fs.cat_file(self.path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, replacing an earlier one."""
        # gcsfs ends lines without a carriage return when it sends metadata and content in one request. A server may
        # then take a carriage return at the end of the content for part of the line end; so these are sent in two.
        two_requests = self.url.startswith("gs:") and content.endswith(b"\r")
        with self._errors():
            options = self._verified | ({"chunksize": len(content)} if two_requests else {})
            self.fs.pipe_file(self.path(name), content, **options)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object and return True if it does not exist; otherwise change nothing and return False."""
        with self._errors():
            try:
                self.fs.pipe_file(self.path(name), content, mode="create")
            except FileExistsError:
                return False
        return True

    def upload(self, files: Iterable[tuple[Path, str]]) -> None:
        """Upload files, several at once; those that have been deleted are skipped.

        Args:
            files: path of each file, and name of the object to write.
        """
        _in_parallel(self._upload, files)

    def _upload(self, item: tuple[Path, str]) -> None:
        path, name = item
        try:
            content = path.read_bytes() if path.stat().st_size < WHOLE else None
        except FileNotFoundError:
            return
        if content is None:
            with self._errors():
                self.fs.put_file(str(path), self.path(name), **self._verified)
        else:
            self.write(name, content)

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Download objects to files of the same names in a folder, several at once; a file is never half written."""
        _in_parallel(lambda name: self._download(name, folder / name), names)

    def _download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.part")
        with self._errors():
            self.fs.get_file(self.path(name), str(draft))
        draft.replace(path)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        for name in names:
            with self._errors(), contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name))


def _in_parallel[T](function: Callable[[T], None], items: Iterable[T]) -> None:
    with concurrent.futures.ThreadPoolExecutor(PARALLEL, "transfer") as pool:
        for future in [pool.submit(function, item) for item in items]:
            future.result()


def retry[T](function: Callable[[], T], patience: float = PATIENCE) -> T:
    """Return the result of a function that uses a store; repeat it after a StoreError, with growing pauses.

    Args:
        function: function without arguments.
        patience: seconds of failures after which a StoreError is raised instead. The time that the first attempt took
            does not count, nor that of one that took longer than this.
    """
    failing, pause = None, POLL
    while True:
        begun = time.monotonic()
        try:
            return function()
        except StoreError:
            now = time.monotonic()
            if failing is None or now - begun > patience:
                failing, pause = now, POLL
            if now + pause - failing > patience:
                raise
        time.sleep(pause)
        pause = min(BACKOFF, 2 * pause)
