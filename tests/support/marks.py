"""Which tests `make test` leaves out, because another one shows the same behaviour."""

import pytest


def first_of(values, ids=str, rest="full"):
    """Parameters of which `make test` takes the first. `rest`: the mark of the others; `make
    test-all` takes what is `full`, `make test-nightly` what is `nightly`.
    """
    return [
        pytest.param(value, id=ids(value), marks=[getattr(pytest.mark, rest)] * (number > 0))
        for number, value in enumerate(values)
    ]
