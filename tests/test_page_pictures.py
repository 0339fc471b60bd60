"""The pictures of pages in the documentation are made by a command."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_pages", ROOT / "scripts" / "draw_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_shows_every_picture_at_the_size_of_the_command(script):
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name in script.PAGES:
        with Image.open(script.FOLDER / name) as picture:
            assert picture.size == (script.WIDTH, script.HEIGHT)
        assert f"(drawings/{name})" in pages


def test_the_command_says_that_no_browser_is_there(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.main(["--out", str(tmp_path)]) == 2
    assert "no Chromium" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium on this machine")
def test_a_picture_shows_the_page(script, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<body style="background: #102030"></body>')
    script.photograph(page, tmp_path / "page.png", shutil.which("chromium"))
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (script.WIDTH, script.HEIGHT)
        assert picture.convert("RGB").getpixel((500, 450)) == (16, 32, 48)
