"""Published ListOps files: expressions with brackets, read or refused with file and line."""

import pickle

import pytest
from messages import refuses

from leanformer.data.sequences.listops import Published
from leanformer.data.source import Source
from leanformer.errors import DataError
from tests.data.test_listops import WORDS


HEADER = b"Source\tTarget\r\n"
GOOD = b"( ( ( ( [MAX 4 ) 3 ) ( ( ( [SM 7 ) 5 ) ] ) ) ] )\t4\r\n"


def test_published_files_are_read(tmp_path):
    (tmp_path / "basic_val.tsv").write_bytes(HEADER + GOOD + b"7\t7\n" + b"( ( ( [MED 9 ) 8 ) ] )\t8")
    source = Published(tmp_path, "val")
    assert isinstance(source, Source) and len(source) == 3 and source.num_classes == 10 and source.vocabulary == 16
    assert " ".join(WORDS[t] for t in source[0]["tokens"]) == "[MAX 4 3 [SM 7 5 ] ]"
    assert [example["label"] for example in source] == [4, 7, 8] and source[1]["tokens"].tolist() == [8]
    assert source.name(1) == f"{tmp_path}/basic_val.tsv, line 3"
    assert pickle.loads(pickle.dumps(source))[2]["tokens"].tolist() == [13, 10, 9, 15]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"( ( [MAX 4 ) 3 ) ]\r\n", ("1 columns", 2)),
        (b"7\t7\t7\r\n", ("3 columns", 2)),
        (b"\r\n", ("1 columns", 2)),
        (b"[MAX 4 12 ]\t4\r\n", ("'12'",)),
        (b"[FIRST 4 2 ]\t4\r\n", ("'[FIRST'",)),
        (b"[MAX 4 \xff ]\t4\r\n", ("'ÿ'",)),
        (b"( ( [MAX 4 ) 3 )\t4\r\n", ("'( ( [MAX 4 ) 3 )'",)),
        (b"[MAX 4 3 ] 2\t4\r\n", ("'[MAX 4 3 ] 2'",)),
        (b"] [MAX\t4\r\n", ("'] [MAX'",)),
        (b"[MAX 2 [MIN ] ]\t4\r\n", ("'[MAX 2 [MIN ] ]'",)),
        (b"\t4\r\n", ("''",)),
        (b"7\t10\r\n", ("'10'",)),
        (b"7\t-1\r\n", ("'-1'",)),
        (b"7\t\r\n", ("''",)),
        (b"7\tx\r\n", ("'x'",)),
    ],
)
def test_malformed_line_is_refused(tmp_path, line, parts):
    (tmp_path / "basic_train.tsv").write_bytes(HEADER + GOOD + line + GOOD)
    with refuses("basic_train.tsv, line 3", *parts, error=DataError):
        Published(tmp_path, "train")


def test_missing_or_incomplete_files_are_refused(tmp_path):
    with refuses(tmp_path, "basic_train.tsv", error=DataError):
        Published(tmp_path, "train")
    (tmp_path / "basic_train.tsv").write_bytes(GOOD)
    with refuses("basic_train.tsv, line 1", error=DataError):
        Published(tmp_path, "train")
    (tmp_path / "basic_train.tsv").write_bytes(HEADER)
    with refuses(tmp_path / "basic_train.tsv", error=DataError):
        Published(tmp_path, "train")
    with refuses("basic_val.tsv", "basic_train.tsv", error=DataError):
        Published(tmp_path, "val")
