"""How commands are read from a document."""

from __future__ import annotations

import pytest

from tests.docs_check import commands

DOCUMENT = """# A heading

```sh
make serve
# a comment
curl -s \\
  http://127.0.0.1:8000/info |
  head

python - <<'END'
print()

END
```

```json
{}
```

```sh gpu long
make gpu-check
```
"""


def test_a_command_may_span_lines():
    assert [(command.line, command.text, command.skip) for command in commands(DOCUMENT)] == [
        (4, "make serve", ""),
        (6, "curl -s \\\n  http://127.0.0.1:8000/info |\n  head", ""),
        (10, "python - <<'END'\nprint()\n\nEND", ""),
        (21, "make gpu-check", "needs a GPU, takes too long"),
    ]


def test_a_fence_with_an_unknown_word_is_an_error():
    with pytest.raises(KeyError, match="gup"):
        next(commands("```sh gup\nmake\n```\n"))
