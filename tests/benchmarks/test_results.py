from __future__ import annotations

from pathlib import Path

from benchmarks.results import table, write_section


def test_a_section_replaces_itself_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    write_section("first", "python a.py", table(["x"], [["1"]]), path)
    write_section("second", "python b.py", "### of b\n\ntwo", path)
    before = path.read_text()
    write_section("first", "python a.py --more", table(["x"], [["3"]]), path)
    after = path.read_text()
    assert after.index("## first") < after.index("## second")
    assert "| 3 |" in after
    assert "| 1 |" not in after
    assert "`python a.py --more`" in after
    assert after[after.index("## second") :] == before[before.index("## second") :]


def test_writing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for title in ("a", "b", "a"):
        write_section(title, "python x.py", "text\n\n| t |", path)
    text = path.read_text()
    write_section("b", "python x.py", "text\n\n| t |", path)
    assert path.read_text() == text
