"""`vfl horizontal`: options that a project's training does not have."""

import pytest

TABLE = '[horizontal]\nname = "small"\nclients = 2\nsampled = 2\nepsilon = 2.0\n'


@pytest.mark.parametrize("given", [("--engine", "ray"), ("--out", "runs/x")])
def test_options_without_effect_in_a_project_are_refused(refused, tmp_path, given):
    (tmp_path / "small.toml").write_text(TABLE)
    done = refused("horizontal", tmp_path / "small.toml", "--project", tmp_path, *given)
    assert given[0] in done.err
    assert "a project trains at its parties" in done.err
