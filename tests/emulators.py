"""Emulators of Google Cloud Storage and Amazon S3 on this machine, as subprocesses."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import find_free_port


BUCKET = "bucket"
SCHEMES = ("gs", "s3")
MOTO = Path(sys.prefix) / "moto" / "bin" / "python"  # environment of the emulator of s3, by `make test-all`


def is_installed(scheme):
    """Return whether an emulator and the package that reads its store are installed."""
    if scheme == "s3":
        return importlib.util.find_spec("s3fs") is not None and MOTO.exists()
    return all(importlib.util.find_spec(name) is not None for name in ("gcsfs", "gcp_storage_emulator"))


def make_command(scheme, port):
    """Return the command line of an emulator, and the environment variables of its clients."""
    address = f"http://127.0.0.1:{port}"
    if scheme == "gs":
        words = [
            sys.executable,
            "-m",
            "gcp_storage_emulator",
            "start",
            "--host=127.0.0.1",
            f"--port={port}",
            "--in-memory",
        ]
        variables = {"STORAGE_EMULATOR_HOST": address, "CLOUD_STORAGE_EMULATOR_ENDPOINT": address}
        # Without credentials, and without looking for the kind of the bucket at Google.
        variables |= {"FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        variables |= {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "t", "GOOGLE_CLOUD_PROJECT": "project", "NO_GCE_CHECK": "true"}
        return [*words, f"--default-bucket={BUCKET}"], variables
    variables = {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key"}
    return [str(MOTO), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], variables


@contextlib.contextmanager
def run_emulator(scheme):
    """Yield the URL of an empty bucket of an emulator, with the variables of its clients in the environment."""
    words, variables = make_command(scheme, find_free_port())
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            wait_for_bucket(scheme, server)
            yield f"{scheme}://{BUCKET}"
        finally:
            server.kill()
            server.wait()
            os.environ.clear()
            os.environ.update(before)


def wait_for_bucket(scheme, server, seconds=60):
    """Wait for the server, and make the bucket if it does not."""
    import fsspec

    options = {"use_listings_cache": False, "skip_instance_cache": True}
    fs, deadline = fsspec.filesystem(scheme, **options), time.monotonic() + seconds
    while True:
        assert server.poll() is None and time.monotonic() < deadline, f"the emulator of {scheme} did not start"
        with contextlib.suppress(Exception):  # of many classes, until the server answers
            if scheme == "s3" and not fs.exists(BUCKET):
                fs.mkdir(BUCKET)
            fs.pipe_file(f"{BUCKET}/ready", b"")
            fs.rm_file(f"{BUCKET}/ready")
            return
        time.sleep(0.2)


def upload_folder(folder: Path, url):
    """Upload all files in a folder."""
    from leanformer.stores import Store

    paths = [path for path in folder.rglob("*") if path.is_file()]
    Store(url).upload((path, path.relative_to(folder).as_posix()) for path in paths)
