"""The folder in which ranks meet, on a full disk too."""

from rl_dist.launch.ranks import store_in_memory
from rl_dist.process_group.join import open_store


def test_ranks_meet_though_the_disk_of_their_folder_is_full(small_disk, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    folder = small_disk("4k")
    with store_in_memory(f"{folder}/store_0"):
        first, second = (open_store(rank, 2, str(folder), 20.0) for rank in range(2))
        first.set("key", "x" * 20_000)
        assert second.get("key") == b"x" * 20_000
