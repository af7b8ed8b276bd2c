"""How commands are read from a document."""

from __future__ import annotations

import pytest

from tests.docs_check import commands, difference

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
{"not": "an answer"}
```

```sh
make
curl -s http://127.0.0.1:8000/info
```

```json
{"models": ...}
```

```sh gpu long
make gpu-check
```
"""


def test_a_command_may_span_lines():
    assert [
        (command.line, command.text, command.skip, command.answer) for command in commands(DOCUMENT)
    ] == [
        (4, "make serve", "", ""),
        (6, "curl -s \\\n  http://127.0.0.1:8000/info |\n  head", "", ""),
        (10, "python - <<'END'\nprint()\n\nEND", "", ""),
        (21, "make", "", ""),
        (22, "curl -s http://127.0.0.1:8000/info", "", '{"models": ...}\n'),
        (30, "make gpu-check", "needs a GPU, takes too long", ""),
    ]


ANSWER = '{"model": "lenet", "predictions": [{"label": 7, "confidence": 0.9993364, "all": [1, 2]}]}'


@pytest.mark.parametrize(
    ("documented", "where"),
    [
        (ANSWER, ""),
        ('{"model":"lenet","predictions":[{"label":7,"confidence":0.99934,"all":[...]}]}', ""),
        ('{"predictions":[{"label":7, "all":[1,...], ...}], ...}', ""),
        ('{"model": ..., "predictions": ...}', ""),
        (
            '{"predictions":[{"label":7,"confidence":0.9999995,...}],...}',
            "[0].confidence: got 0.99",
        ),
        ('{"predictions":[{"label":8,...}],...}', "[0].label: got 7, documented is 8"),
        (
            '{"predictions":[{"label":7,"confidence":0.9993364}],...}',
            'predictions[0]: got {"label"',
        ),
        ('{"predictions":[...],"version":"2",...}', "answer: got "),
        ('{"predictions":[{"all":[1],...}],...}', "all: got [1, 2]"),
        ('{"predictions":', "not JSON"),
    ],
)
def test_an_answer_is_compared_but_for_what_the_document_elides(documented, where):
    found = difference(ANSWER, documented)
    assert where in found
    assert bool(found) == bool(where)


def test_a_fence_with_an_unknown_word_is_an_error():
    with pytest.raises(KeyError, match="gup"):
        next(commands("```sh gup\nmake\n```\n"))
