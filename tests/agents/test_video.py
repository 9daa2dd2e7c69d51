"""Videos of evaluation episodes: each picture once, of the episodes that the evaluation counts."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image
from train_runs import SIZES, evaluate_here, only_error, train_here


class DrawnEnv(gymnasium.Env):
    """Episodes of random lengths, whose pictures are as bright as the episode is old."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.length = 0, int(self.np_random.integers(2, 9))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age += 1
        return np.zeros(2, np.float32), 1.0, self.age == self.length, False, {}

    def render(self):
        return np.full((30, 900, 3), 10 * self.age, np.uint8)


gymnasium.register("Drawn-v0", DrawnEnv)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    flags = [*SIZES, "--env", "Drawn-v0", "--validate_every", "0", "--eval_episodes", "5"]
    assert train_here(monkeypatch, *flags, "--run_dir", tmp_path / "run") == 0
    return tmp_path / "run"


def test_a_video_shows_every_step_of_the_first_episodes(drawn, tmp_path, monkeypatch):
    flags = ["--json", tmp_path / "figures.json", "--video", tmp_path / "new" / "films"]
    assert evaluate_here(monkeypatch, drawn, "--episodes", "3", *flags) == 0
    films = sorted((tmp_path / "new" / "films").glob("*"))
    assert [path.name for path in films] == [f"episode_{number}.gif" for number in range(3)]
    lengths = []
    for path in films:
        with Image.open(path) as film:
            assert film.size == (400, 13) and film.info["duration"] == 50
            lengths.append(film.n_frames)
            for age in range(film.n_frames):
                film.seek(age)
                assert (np.asarray(film.convert("RGB")) == 10 * age).all()
    figures = json.loads((tmp_path / "figures.json").read_text())["policy"]
    assert np.mean(lengths) == figures["length"] and len(set(lengths)) > 1


def test_what_cannot_be_drawn_is_one_line(drawn, tmp_path, monkeypatch, capsys):
    for method, words in [("render", "Drawn-v0 cannot be drawn"), ("__init__", "render_mode")]:
        with monkeypatch.context() as patched:
            patched.setattr(DrawnEnv, method, lambda self: None)
            assert evaluate_here(monkeypatch, drawn, "--video", tmp_path / "films") == 2
        assert words in only_error(capsys.readouterr().err)
    assert not (tmp_path / "films").exists()
