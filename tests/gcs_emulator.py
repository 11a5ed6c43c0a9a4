"""gcp-storage-emulator that keeps a carriage return at the end of an object, where gcsfs ends lines without one."""

import json
import re

from gcp_storage_emulator import server
from gcp_storage_emulator.__main__ import main


original = server._read_data


def read_data(request_handler, query):
    """Parse an upload of metadata and content by its boundary; leave all other requests to the emulator."""
    kind = request_handler.headers.get("Content-Type") or ""
    if not kind.startswith("multipart/related"):
        return original(request_handler, query)
    raw = server._decode_raw_data(server._read_raw_data(request_handler), request_handler)
    boundary = re.search(r'boundary="?([^";]+)', kind)[1].encode()
    end = b"\r\n" if raw.startswith(b"--" + boundary + b"\r\n") else b"\n"  # gcsfs ends lines without "\r"
    _, meta, content, _ = (end + raw).split(end + b"--" + boundary)
    (_, meta), (head, content) = (re.split(rb"\r?\n\r?\n", part, maxsplit=1) for part in (meta, content))
    content_type = re.search(rb"Content-Type: *([^;\r\n]+)", head, re.IGNORECASE)
    content_type = content_type[1].decode() if content_type else "application/octet-stream"
    return {"meta": json.loads(meta), "content": content, "content-type": content_type}


if __name__ == "__main__":
    server._read_data = read_data
    main()
