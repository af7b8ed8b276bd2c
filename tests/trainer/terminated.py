"""A run that SIGTERM ends at a moment of its work, and that is started again."""

import itertools
import os
import pkgutil
import signal


def terminated_at(patch, name, call):
    """Have this process get SIGTERM as `name` is called for the `call`-th time."""
    owner, _, attribute = name.rpartition(".")
    function, calls = getattr(pkgutil.resolve_name(owner), attribute), itertools.count(1)

    def terminated(*arguments, **named):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments, **named)

    patch.setattr(name, terminated)


def check_moments(moments, fit, monkeypatch, capsys):
    """At each of `moments`, {what is done: (the function, its call)}, the run can be resumed.

    `fit(name)` trains with checkpoints of that name, in this process: (exit code, the bytes of the
    file that it wrote, if any). The first moment comes before the first epoch's end.
    """
    whole = fit("whole")
    assert whole[0] == 0
    for number, (moment, (name, call)) in enumerate(moments.items()):
        with monkeypatch.context() as patch:
            terminated_at(patch, name, call)
            assert fit(str(number)) == (130, None), moment
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("interrupted")
        assert ("nothing was kept" in said) == (number == 0), moment
        assert fit(str(number)) == whole, moment
        assert ("resumed after epoch" in capsys.readouterr().out) == (number > 0), moment
