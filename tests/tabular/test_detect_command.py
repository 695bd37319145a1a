"""``moesaic detect``: files in, scores and a report out, one-line errors."""

import json

import numpy as np
import pandas as pd
import pytest

from moesaic.cli.main import main


@pytest.fixture
def tables(tmp_path, rng):
    normal = pd.DataFrame({"amount": rng.normal(50, 5, 90), "kind": rng.choice(["card", "cash"], 90)})
    new = normal.head(12).copy()
    new.loc[4, "amount"] = 900.0
    normal.iloc[12:].to_csv(tmp_path / "normal.csv", index=False)
    new.to_csv(tmp_path / "new.csv", index=False)
    return tmp_path


def run(*arguments, code=0):
    stopped = 0
    try:
        main([str(argument) for argument in ("detect", *arguments)])
    except SystemExit as stop:
        stopped = stop.code or 0
    assert stopped == code


def test_scores_and_report(tables, capsys):
    out = tables / "scores.csv"
    run(tables / "new.csv", "--context", tables / "normal.csv", "-o", out, "--json")
    result = json.loads(capsys.readouterr().out)
    scores = pd.read_csv(out)
    assert list(scores.columns) == ["row", "score", "anomaly", "columns"]
    assert len(scores) == 12
    assert scores.score.idxmax() == 4
    assert scores.anomaly[4] == 1
    assert scores["columns"][4].startswith("amount")
    assert result["rows"]["rows"][0]["row"] == 5
    assert result["scores"]["flagged"] == scores.anomaly.sum()
    page = (tables / "scores.html").read_text()
    assert "<b>amount</b> = 900, usually" in page
    assert "http" not in page.replace("http-equiv", "")
    assert {str(path) for path in tables.glob("scores*.png")} <= set(result["files"])


def test_without_context_rows_are_judged_against_each_other(tables, capsys):
    frame = pd.read_csv(tables / "normal.csv")
    frame.loc[7, "amount"] = -400.0
    frame.to_csv(tables / "mixed.csv.gz", index=False)
    out = tables / "s.csv"
    run(tables / "mixed.csv.gz", "-o", out, "--contamination", "0.05", "--html", tables / "page.html")
    scores = pd.read_csv(out)
    assert scores.score.idxmax() == 7
    assert scores.anomaly.mean() == pytest.approx(0.05, abs=0.015)
    assert (tables / "page.html").is_file()
    assert "row      8" in capsys.readouterr().out


def test_cells_are_escaped_in_the_page(tables, rng):
    frame = pd.DataFrame({"<i>x</i>": rng.normal(size=30), "kind": ["<script>alert(1)</script>", *["a"] * 29]})
    frame.to_csv(tables / "odd.csv", index=False)
    run(tables / "odd.csv", "-o", tables / "o.csv")
    page = (tables / "o.html").read_text()
    assert "<script>alert" not in page
    assert "<i>x" not in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.csv", "-o", "s.csv"], "absent.csv does not exist"),
        (["new.txt", "-o", "s.csv"], "must end in one of"),
        (["new.csv", "-o", "s.txt"], "--output must be a .csv"),
        (["new.csv", "-o", "none/s.csv"], "folder that exists"),
        (["new.csv", "-o", "s.csv", "--top", "0"], "--top"),
        (["new.csv", "-o", "s.csv", "--drop", "sum"], "--drop 'sum'"),
        (["new.csv", "-o", "s.csv", "--context", "other.csv"], "lacks"),
        (["ids.csv", "-o", "s.csv"], "column 'id' holds text"),
        (["empty.csv", "-o", "s.csv"], "is not a table"),
        (["new.csv", "-o", "s.csv", "--contamination", "2"], "contamination"),
        (["new.csv", "-o", "s.csv", "--model", "net.safetensors"], "net.safetensors"),
    ],
)
def test_bad_input_ends_with_2_and_one_line(tables, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tables)
    pd.DataFrame({"other": np.arange(9)}).to_csv("other.csv", index=False)
    pd.DataFrame({"id": [f"n{i}" for i in range(40)], "a": np.arange(40)}).to_csv("ids.csv", index=False)
    (tables / "empty.csv").write_text("")
    run(*arguments, code=2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert not (tables / "s.csv").exists()


@pytest.mark.parametrize("name", ["new.csv", "normal.csv"])
def test_what_is_read_is_not_overwritten(tables, capsys, name):
    before = (tables / name).read_bytes()
    run(tables / "new.csv", "--context", tables / "normal.csv", "-o", tables / name, code=2)
    assert "would be overwritten" in capsys.readouterr().err
    assert (tables / name).read_bytes() == before


def test_fields_without_a_name_are_refused_and_shift_nothing(tables, capsys):
    path = tables / "long.csv"
    path.write_text("a,b,c\n" + "1,2,3,4\n" * 8)
    run(path, "-o", tables / "s.csv", code=2)
    assert "more fields" in capsys.readouterr().err
    path.write_text(
        "a,b,c\n" + "".join(f"{i % 3},{i % 2},{90 if i == 4 else 1},\n" for i in range(12))
    )  # comma at the end
    run(path, "-o", tables / "s.csv", "--json")
    first = json.loads(capsys.readouterr().out)["rows"]["rows"][0]
    assert first["row"] == 5
    assert next(iter(first["columns"])) == "c"


@pytest.mark.parametrize("decimal", [".", ","])
def test_semicolons_and_decimal_commas(tables, capsys, rng, decimal):
    frame = pd.DataFrame({"a": rng.normal(size=30), "b": rng.normal(size=30), "kind": ["x, y", "z"] * 15})
    frame.loc[9, "b"] = 50.5
    frame.to_csv(tables / "european.csv", sep=";", decimal=decimal, index=False)
    run(tables / "european.csv", "-o", tables / "s.csv", "--json")
    first = json.loads(capsys.readouterr().out)["rows"]["rows"][0]
    assert first["row"] == 10
    assert next(iter(first["columns"])) == "b"


def test_iso_dates_are_dates(tables, capsys, rng):
    days = pd.date_range("2024-01-01", periods=30, freq="D")
    frame = pd.DataFrame({"day": days, "b": rng.normal(size=30)})
    frame.loc[3, "day"] = pd.Timestamp("1950-01-01")
    frame.to_csv(tables / "dates.csv", index=False)
    run(tables / "dates.csv", "-o", tables / "s.csv", "--json")
    first = json.loads(capsys.readouterr().out)["rows"]["rows"][0]
    assert first["row"] == 4
    assert next(iter(first["columns"])) == "day"


def test_refusals_name_the_file(tables, capsys):
    (tables / "one.csv").write_text("amount,kind\n5,card\n")
    run(tables / "new.csv", "--context", tables / "one.csv", "-o", tables / "s.csv", code=2)
    assert "one.csv" in capsys.readouterr().err


def test_drop_leaves_columns_out(tables):
    frame = pd.read_csv(tables / "normal.csv")
    frame.insert(0, "id", [f"n{i}" for i in range(len(frame))])
    frame.to_csv(tables / "ids.csv", index=False)
    run(tables / "ids.csv", "-o", tables / "s.csv", "--drop", "id")
    assert len(pd.read_csv(tables / "s.csv")) == len(frame)
