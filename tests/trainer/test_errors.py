import inspect

from trainer import errors


def test_the_tree_in_the_docstring_names_every_error():
    found = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    drawn = {word for word in errors.__doc__.split() if word in found}
    assert drawn == found
    assert all(issubclass(getattr(errors, name), errors.TrainerError) for name in found)
