"""ListOps as published: files of expressions with brackets, read or refused with file and line."""

import pickle

import pytest

from leanformer.data.sequences.listops_tsv import Published
from leanformer.data.source import Source
from leanformer.errors import DataError
from tests.data.test_listops import WORDS


HEADER = b"Source\tTarget\r\n"
GOOD = b"( ( ( ( [MAX 4 ) 3 ) ( ( ( [SM 7 ) 5 ) ] ) ) ] )\t4\r\n"


def test_published_files(tmp_path):
    (tmp_path / "basic_val.tsv").write_bytes(HEADER + GOOD + b"7\t7\n" + b"( ( ( [MED 9 ) 8 ) ] )\t8")
    source = Published(tmp_path, "val")
    assert isinstance(source, Source) and len(source) == 3 and source.num_classes == 10 and source.vocabulary == 16
    assert " ".join(WORDS[t] for t in source[0]["tokens"]) == "[MAX 4 3 [SM 7 5 ] ]"
    assert [example["label"] for example in source] == [4, 7, 8] and source[1]["tokens"].tolist() == [8]
    assert source.name(1) == f"{tmp_path}/basic_val.tsv, line 3"
    assert pickle.loads(pickle.dumps(source))[2]["tokens"].tolist() == [13, 10, 9, 15]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"( ( [MAX 4 ) 3 ) ]\r\n", "has 1 columns instead of 2"),
        (b"7\t7\t7\r\n", "has 3 columns"),
        (b"\r\n", "has 1 columns"),
        (b"[MAX 4 12 ]\t4\r\n", "holds '12', which is no symbol"),
        (b"[FIRST 4 2 ]\t4\r\n", "holds '\\[FIRST', which"),
        (b"[MAX 4 \xff ]\t4\r\n", "holds 'ÿ', which"),
        (b"( ( [MAX 4 ) 3 )\t4\r\n", "is no whole expression: '\\( \\( \\[MAX 4 \\) 3 \\)'"),
        (b"[MAX 4 3 ] 2\t4\r\n", "is no whole expression"),
        (b"] [MAX\t4\r\n", "is no whole expression"),
        (b"[MAX 2 [MIN ] ]\t4\r\n", "is no whole expression"),
        (b"\t4\r\n", "is no whole expression"),
        (b"7\t10\r\n", "has the label '10' instead"),
        (b"7\t-1\r\n", "has the label '-1' instead"),
        (b"7\t\r\n", "has the label '' instead"),
        (b"7\tx\r\n", "has the label 'x' instead"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, found):
    (tmp_path / "basic_train.tsv").write_bytes(HEADER + GOOD + line + GOOD)
    with pytest.raises(DataError, match=f"basic_train.tsv, line 3 {found}"):
        Published(tmp_path, "train")


def test_published_files_that_are_not(tmp_path):
    with pytest.raises(DataError, match="has no basic_train.tsv; found no such file"):
        Published(tmp_path, "train")
    (tmp_path / "basic_train.tsv").write_bytes(GOOD)
    with pytest.raises(DataError, match="line 1 is .* instead of the header"):
        Published(tmp_path, "train")
    (tmp_path / "basic_train.tsv").write_bytes(HEADER)
    with pytest.raises(DataError, match="holds no expression at all"):
        Published(tmp_path, "train")
    with pytest.raises(DataError, match="has no basic_val.tsv; found basic_train.tsv"):
        Published(tmp_path, "val")
