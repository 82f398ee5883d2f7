"""The table of what llama-server's tests assert and where it holds here."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_test_that_the_table_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "llama-server.md").read_text())
    assert len(named) > 80
    texts = {file: (ROOT / file).read_text() for file, _ in named}
    missing = [
        (file, name) for file, name in named if not re.search(rf"^(async )?def {name}\(", texts[file], re.MULTILINE)
    ]
    assert not missing
