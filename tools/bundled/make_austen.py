"""Generator of the bundled text: five novels by Jane Austen, with every tenth chapter held out.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb DIR
    python tools/bundled/make_austen.py --source=DIR --out=leanformer/data/bundled

The novels, of 1811 to 1818, are in the public domain. Debian's package has the text that Project Gutenberg volunteers
typed, line by line, in R's file format, which is read here without R. Mansfield Park is left out to stay under 1 MB.

Each chapter is a document and each paragraph a line; title pages, headings and end marks are removed. Documents are
separated by form feeds. The script writes austen-train.txt.xz, austen-test.txt.xz and austen.sha256 to `--out`;
repeating it writes the same bytes.
"""

import argparse
import hashlib
import lzma
import pathlib
import re
import struct
import zlib


RDATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
LEFT_OUT = ("MANSFIELD PARK",)
HEADING = re.compile(r"(?m)^ *(?:CHAPTER|Chapter) +(?:[IVXLC]+|\d+)\.?\s*$")
NOTE = "A NOTE ON THE TEXT"  # by a later editor, after the last chapter of a novel
OTHER_LINES = re.compile(r"VOLUME [IVX]+|FINIS|Finis|THE END|\*[ *]*")
HELD_OUT = 10  # interval of held-out chapters
STRINGS, STRING = 16, 9  # types of R's serialisation
PRESET = {"format": lzma.FORMAT_XZ, "preset": 9 | lzma.PRESET_EXTREME}


def read_lines(path):
    """Yield the character vectors of an R lazy-load file: per object a length of four bytes, then zlib data."""
    raw, start = path.read_bytes(), 0
    while start < len(raw):
        inflater = zlib.decompressobj()
        content = inflater.decompress(raw[start + 4 :])
        start = len(raw) - len(inflater.unused_data)
        offset = content.index(struct.pack(">I", STRINGS)) + 4
        (count,) = struct.unpack_from(">I", content, offset)
        offset, lines = offset + 4, []
        for _ in range(count):
            flags, size = struct.unpack_from(">Ii", content, offset)
            if flags & 255 != STRING:
                raise ValueError(f"{path} contains data other than text at byte {offset} of an object.")
            offset += 8
            lines.append(content[offset : offset + size].decode())
            offset += size
        yield lines


def split_chapters(lines):
    """Yield the chapters of a novel, with one paragraph per line."""
    _, *parts = HEADING.split("\n".join(lines))
    for part in parts:
        part, *_ = part.partition(NOTE)
        part = re.sub(r"\[[^][]*\]|_", "", part)  # notes by the volunteers, and marks of italics
        paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", part))
        yield "\n".join(p for p in paragraphs if p and not OTHER_LINES.fullmatch(p))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=pathlib.Path, required=True, help="folder that the package was unpacked to")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write to")
    args = parser.parse_args()
    novels = [lines for lines in read_lines(args.source / RDATA) if lines[0].strip() not in LEFT_OUT]
    chapters = [chapter for lines in novels for chapter in split_chapters(lines)]
    splits = {
        "train": [chapter for i, chapter in enumerate(chapters, 1) if i % HELD_OUT],
        "test": chapters[HELD_OUT - 1 :: HELD_OUT],
    }
    sums = []
    for split, documents in splits.items():
        text = "\f".join(documents).encode()
        path = args.out / f"austen-{split}.txt.xz"
        path.write_bytes(lzma.compress(text, **PRESET))
        sums.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
        print(f"{split}: {len(documents)} chapters, {len(text):,} bytes, {path.stat().st_size:,} packed")
    (args.out / "austen.sha256").write_text("".join(sums))


if __name__ == "__main__":
    main()
