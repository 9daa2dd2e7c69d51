"""Plain files of a sane size in a run directory are read, all else is refused at once."""

import pytest
from odd_files import ODD_FILES

from rl_dist.hardware.plain_files import leads_to, plain_file, read_plain


@pytest.mark.parametrize("odd", ODD_FILES)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, odd):
    ODD_FILES[odd](tmp_path / "config.json")
    with pytest.raises(OSError):
        read_plain(tmp_path / "config.json")


@pytest.mark.parametrize("odd", ["pipe", "directory", "socket", "device"])
@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_nor_is_it_written_to(tmp_path, odd, mode):
    ODD_FILES[odd](tmp_path / "metrics.jsonl")
    with pytest.raises(OSError):
        open(tmp_path / "metrics.jsonl", mode, opener=plain_file)  # noqa: SIM115


def test_a_file_is_read_whole_up_to_what_may_be_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_plain(path) == read_plain(path, None) == read_plain(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="100 bytes, and at most 99"):
        read_plain(path, 99)


def test_a_file_that_was_deleted_or_replaced_is_no_longer_there(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "run" / "file"
    folder.mkdir()
    with path.open("w") as file:
        assert leads_to(path, file)
        folder.rename(tmp_path / "moved")
        assert not leads_to(path, file)
        folder.mkdir()
        path.write_text("of another run")
        assert not leads_to(path, file)
