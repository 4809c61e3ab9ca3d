"""The garbage collector is paused while the compiler plans, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from flowrl.compiler.collector import collector_paused


def test_it_is_as_it_was_after_an_error_too() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), collector_paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
