"""One test a supported TRL minor: the one that is installed runs, the others are skipped.

``trl_minors.py`` runs them all in turn.
"""

from __future__ import annotations

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.hosts.check import check_trl
from helpers import trl_tiny
from helpers.trl_minors import MINORS

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize("minor", MINORS)
def test_minor(minor, tmp_path):
    if trl.__version__.rsplit(".", 1)[0] != minor:
        pytest.skip(
            f"trl {trl.__version__} is installed; tests/helpers/trl_minors.py runs the others"
        )
    assert [one for one in check_trl() if not one.is_ok] == []
    plain = trl_tiny.plain(tmp_path / "plain")
    plain.train()
    off = trl_tiny.ours(tmp_path / "off", args={"method": "uniform"})
    off.train()
    trl_tiny.assert_identical(trl_tiny.weights(off), trl_tiny.weights(plain))
    for method in ("delta", "fade", "dfpo_min", "crf_ntf"):
        trainer = trl_tiny.ours(
            tmp_path / method, args={"method": method, "plan": "query_preserved", "ledger_every": 2}
        )
        trainer.train()
        assert trl_tiny.largest_gap(trl_tiny.weights(trainer), trl_tiny.weights(plain)) > 1e-4
        assert (tmp_path / method / "counterpoise" / "tokens" / "batch_000000.parquet").is_file()


def test_the_installed_minor_is_one_of_them():
    assert trl.__version__.rsplit(".", 1)[0] in MINORS
