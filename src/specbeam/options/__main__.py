"""``python -m specbeam.options`` writes the keywords for type checkers anew, after a change of the declaration."""

from pathlib import Path

from specbeam.options.surfaces import with_keywords

MODULE = Path(__file__).with_name("keywords.py")

if __name__ == "__main__":
    MODULE.write_text(with_keywords(MODULE.read_text(encoding="utf-8")), encoding="utf-8")
