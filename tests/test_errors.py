"""The error tree: what a message says, and that errors travel between processes."""

from __future__ import annotations

import pickle

import pytest

from flowrl import errors
from flowrl.checks import Violation
from flowrl.errors import BatchError, CheckError, EdgeTypeError, FlowError, UnknownFieldError, nearest

ALL = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, FlowError)]


def test_message_has_an_address() -> None:
    error = FlowError(
        "GAE: argument 'values' is wrong", expected="Values", received=3, do="pass values", where="a.py:7"
    )
    assert str(error) == ("GAE: argument 'values' is wrong. Expected Values. Received 3. Do: pass values. (at a.py:7)")


def test_message_alone_is_one_sentence() -> None:
    assert str(FlowError("It is so")) == "It is so."
    assert str(FlowError("Is it so?")) == "Is it so?"


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_error_is_picklable_with_all_it_says(cls: type[FlowError]) -> None:
    if cls is CheckError:
        error: FlowError = CheckError("two rules", (Violation("rule", "node", "a", "b"),))
    else:
        error = cls("what", expected=1, received=None, do="that", where="f.py:1")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls and str(back) == str(error) and back.__dict__ == error.__dict__


def test_user_errors_are_also_the_python_errors_that_one_expects() -> None:
    assert issubclass(EdgeTypeError, TypeError)
    assert issubclass(UnknownFieldError, AttributeError)
    assert issubclass(BatchError, ValueError)


def test_nearest_offers_one_or_lists_all() -> None:
    assert nearest("tokns", ["tokens", "spans"]) == "did you mean 'tokens'?"
    assert nearest("xyz", ["tokens", "spans"]) == "there is 'tokens', 'spans'"
    assert nearest("xyz", []) == "there is none"
