"""Test which paths of a run may be written, and how much of a file is read."""

import pytest
from hostile import ODD_FILES

from rl_dist.files import path_to_write, read_plain


@pytest.mark.parametrize("odd", ["pipe", "socket", "device", "link to nowhere", "link to itself"])
def test_no_path_to_write_leads_through_special_files_or_broken_links(tmp_path, odd):
    (tmp_path / "run").symlink_to(tmp_path)  # the run directory may be a symbolic link
    assert path_to_write(tmp_path / "run", "new/file") == tmp_path / "run/new/file"
    ODD_FILES[odd](tmp_path / "odd")
    for name in ("odd", "odd/file"):
        with pytest.raises(OSError, match="run/odd'"):
            path_to_write(tmp_path / "run", name)


def test_a_file_is_read_whole_or_refused_if_too_large(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_plain(path) == read_plain(path, None) == read_plain(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="100 bytes.* 99 bytes"):
        read_plain(path, 99)
