"""Names of models: what the hub is asked, and what is said of a model that is nowhere."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from counterpoise.models import find_model


def answer(monkeypatch, error):
    """The hub answers so."""

    def model_info(self, name, timeout):
        if error is not None:
            raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)


def http(kind):
    """An error of the hub's, without the response that its own constructor asks for."""
    return kind.__new__(kind)


def test_a_model_that_the_hub_does_not_have(monkeypatch):
    answer(monkeypatch, http(RepositoryNotFoundError))
    with pytest.raises(ValueError, match="'org/nothing': no such folder, and the hub has no such"):
        find_model("org/nothing")


@pytest.mark.parametrize("error", [None, http(GatedRepoError), http(HfHubHTTPError)])
def test_what_the_hub_may_have_is_left_to_the_load(monkeypatch, error):
    answer(monkeypatch, error)
    assert find_model("org/name").place == "org/name"


def test_a_model_of_the_cache_needs_no_hub(monkeypatch):
    answer(monkeypatch, OSError("no network"))
    with pytest.raises(ValueError, match=r"cannot be asked \(no network\)"):
        find_model("org/name")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert find_model("org/name").place == "org/name"


def test_the_nearest_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer(monkeypatch, OSError("no network"))
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    for spec in ("models/mien", "./models/mine2"):
        with pytest.raises(ValueError, match="Did you mean 'models/mine'"):
            find_model(spec)
