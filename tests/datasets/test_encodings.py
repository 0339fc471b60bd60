"""Text that is not UTF-8: Western European is read, other encodings are named and refused."""

# ruff: noqa: RUF001

from __future__ import annotations

import gzip

import pytest
from typer.testing import CliRunner

from vfl.cli import app
from vfl.config import read_party_file
from vfl.config.experiment import ENCODINGS, TableSettings
from vfl.core.errors import DataError
from vfl.datasets import OwnTable, TableFormat, read_table
from vfl.datasets.csv_file import sniff
from vfl.datasets.describe import describe

WESTERN = {
    "German": "Größe Müller Öztürk männlich Straße Ärzte weiß Fläche² ÖFFNUNG Ä",
    "French": "Été élève créée François œuvre hôpital naïve âgé l’été À où CAFÉ …",
    "Spanish": "¿Qué? Señor año Muñoz pingüino Mª nº 1º sí niño d´Or",
    "Portuguese": "São ações coração João avô põe não Conceição",
    "Italian": "città perché più Niccolò lunedì è",
    "Danish": "København Åse smørrebrød Ærø én blåbær »ja«",
    "Swedish": "Göteborg Åke sjöman idé Hälsö",
    "Finnish": "Jyväskylä työyhteisö pääsiäinen Šakki",
    "Icelandic": "Þórður þýðing Ísafjörður maður ræða",
    "Estonian": "Tõnu Pärnu õhtusöök Jõgeva öö",
    "Dutch": "ideeën coördinatie één reünie vóór",
    "Catalan": "paral·lel Núria àrea ciència",
    "units": "m² m³ °C µg € £5 ½ ±3 §5 kg/m³ n°",
}
CYRILLIC = "Москва Иванов мужской женский да нет"
CENTRAL = {
    "Polish": "Łódź Kraków Wałęsa mężczyzna księgowość Gdańsk",
    "Czech": "Dvořák Novák Šimůnek Plzeň muž žena Děčín",
    "Hungarian": "Győr Erdős nővér férfi működő költség",
    "Romanian": "Bucureşti bărbat femeie Iaşi Constanţa",
}
JAPANESE, CHINESE, KOREAN = (
    "東京 大阪 さくら カメラ 佐藤健一 住所",
    "北京 上海 王小明 地址 男 女",
    "서울 부산 김철수",
)
OTHERS = [
    *((CYRILLIC, name) for name in ("cp1251", "koi8-r", "cp866", "iso8859-5")),
    *((text, "cp1250") for text in CENTRAL.values()),
    (CENTRAL["Polish"], "iso8859-2"),
    ("Αθήνα Θεσσαλονίκη άνδρας γυναίκα ναι όχι", "cp1253"),
    ("İstanbul Yılmaz Gümüş kadın Çalışkan", "cp1254"),
    ("Šiauliai Žemaitė Klaipėda ąžuolas", "cp1257"),
    ("תלאביב ירושלים כן לא", "cp1255"),
    ("القاهرة نعم لا محمد", "cp1256"),
    ("กรุงเทพ เชียงใหม่ ชาย", "cp874"),
    (WESTERN["German"].replace("²", ""), "cp850"),
    (WESTERN["French"].replace("’", ""), "mac-roman"),
    (JAPANESE, "cp932"),
    (JAPANESE, "euc-jp"),
    (JAPANESE, "iso-2022-jp"),
    (CHINESE, "gb18030"),
    ("台北 高雄 王小明 地址 姓名", "big5"),
    (KOREAN, "cp949"),
]


def rows(text, repeats=1):
    """A table with one row a word, and a name of a column beyond ASCII."""
    words = text.split() * repeats
    lines = [f"id,{words[0]},x", *(f"{row},{word},{row}.5" for row, word in enumerate(words))]
    return words, "\n".join(lines) + "\n"


def written(folder, content, name="table.csv"):
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("language", WESTERN)
@pytest.mark.parametrize("repeats", [1, 300])
def test_western_text_keeps_its_letters(tmp_path, language, repeats):
    words, text = rows(WESTERN[language], repeats)
    path = written(tmp_path, text.encode("cp1252"))
    report = describe(path)
    assert report.form.encoding in ("cp1252", "latin-1")
    assert read_table(path, report.form, [words[0]])[words[0]].tolist() == words
    assert "is read as Western European" in report.notes[-1]


@pytest.mark.parametrize(("text", "encoding"), OTHERS)
def test_other_text_is_refused_with_its_encoding_and_read_when_it_is_set(tmp_path, text, encoding):
    words, content = rows(text)
    path = written(tmp_path, content.encode(encoding))
    for read in (describe, read_table)[: 1 if encoding == "iso-2022-jp" else 2]:  # ASCII
        with pytest.raises(DataError) as caught:
            read(path)
        assert encoding in str(caught.value.got)
        assert not any(word in str(caught.value) for word in words)
    report = describe(path, encoding=encoding)
    assert report.settings()["encoding"] == encoding
    assert report.columns[1].name == words[0]
    assert read_table(path, report.form)[words[0]].tolist() == words
    assert not report.notes


@pytest.mark.parametrize("text", [CYRILLIC, JAPANESE, CHINESE, KOREAN, *WESTERN.values()])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_unicode_is_found_without_a_mark(tmp_path, text, encoding):
    words, content = rows(text)
    path = written(tmp_path, gzip.compress(content.replace("id,", "").encode(encoding)))
    form = sniff(path)
    assert form.encoding == encoding
    path = written(tmp_path, content.replace("id,", "№,").encode(encoding))
    assert read_table(path, sniff(path))[words[0]].tolist() == words


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ("id,x\n1,a\n".encode("utf-32"), "UTF-32"),
        ("id,x\n1,男\n2,女\n3,男\n".encode("gbk"), "gb18030"),  # 女 is also a letter of UTF-8
        ("id,x\n1,М\n2,Ж\n".encode("cp1251"), "cp1251"),
        (bytes(range(128, 256)) + b",\n", "bytes that fit no other known encoding either"),
        ("id,x\n1,é\n".encode() + "2,é\n".encode("cp1252"), "line 2 is UTF-8"),
        ("id,x\n1,Müller\n2,é".encode()[:-1], "line 2 is UTF-8"),  # the last letter was cut
    ],
)
def test_what_no_rule_fits_is_refused(tmp_path, content, want):
    with pytest.raises(DataError) as caught:
        describe(written(tmp_path, content))
    assert want in str(caught.value.got)


def test_the_encodings_are_text_codecs_of_python_in_any_usual_spelling():
    for name in ENCODINGS:
        assert "id,x\n".encode(name).decode(name).lstrip("\ufeff") == "id,x\n"
    for name, want in {
        "Windows-1251": "cp1251",
        "ISO-8859-2": "iso8859-2",
        "UTF_8": "utf-8",
    }.items():
        assert TableSettings(encoding=name).encoding == want
    for name in ("rot13", "idna", "zlib", "utf-7", "", "../cp1251"):
        with pytest.raises(ValueError, match="encodings of tables are utf-8"):
            TableSettings(encoding=name)


def test_the_commands_take_the_encoding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, content = rows(CYRILLIC, 5)
    written(tmp_path, content.encode("koi8-r"), "bank.csv")
    run = CliRunner().invoke
    refused = run(app, ["init", "--from", "bank.csv"])
    assert refused.exit_code
    assert "--encoding koi8-r" in str(refused.exception)
    assert "--encoding" in str(
        run(app, ["init", "--from", "bank.csv", "--encoding", "x"]).exception
    )
    assert not run(app, ["init", "--from", "bank.csv", "--encoding", "KOI8-R"]).exit_code
    own = read_party_file(tmp_path / "party.toml").table
    assert (own.encoding, own.columns) == ("koi8-r", (words[0], "x"))
    checked = run(app, ["check", "party.toml"])
    assert words[0] in checked.output
    table = OwnTable(tmp_path / "bank.csv", "id", form=TableFormat(encoding=own.encoding))
    assert read_table(table.source, table.form)[words[0]].tolist() == words
