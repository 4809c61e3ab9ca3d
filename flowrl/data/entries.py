"""Entries of tasks as JSON, losslessly.

A row travels between processes as JSON. What JSON lacks (a tuple, a set, a key that is not a text) becomes an
object with a single marked key, ``{"__tuple__": [1, 2]}``, and comes back as it was.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from flowrl.errors import DataError

_MARK = "__{}__".format


def encode_entry(value: Any, name: str = "entry") -> Any:
    """A value of an entry in JSON, losslessly: tuples, sets, fractions, decimals and keys that are not text
    are marked.

    Raises:
        DataError: a value of another type.
    """
    if isinstance(value, np.generic):  # before str and float, which some of them are
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [encode_entry(v, name) for v in value]
    if isinstance(value, tuple):
        return {_MARK("tuple"): [encode_entry(v, name) for v in value]}
    if isinstance(value, set | frozenset):
        members = [encode_entry(v, name) for v in sorted(value, key=repr)]
        return {_MARK(type(value).__name__): members}
    if isinstance(value, Fraction | Decimal):
        return {_MARK(type(value).__name__): str(value)}
    if isinstance(value, np.ndarray):
        return {_MARK("ndarray"): [value.dtype.str, value.tolist()]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not (k.startswith("__") and len(value) == 1) for k in value):
            return {k: encode_entry(v, name) for k, v in value.items()}
        return {_MARK("dict"): [[encode_entry(k, name), encode_entry(v, name)] for k, v in value.items()]}
    raise DataError(
        f"An entry of {name!r} cannot travel as JSON",
        expected="text, numbers, lists, tuples, sets, dicts, fractions, decimals, numpy values",
        received=f"a {type(value).__name__}",
        do="this data set, with these settings, cannot be served",
    )


def decode_entry(value: Any) -> Any:
    """The inverse of :func:`encode_entry`."""
    if isinstance(value, list):
        return [decode_entry(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        decoder = _DECODERS.get(key)
        if decoder is not None:
            return decoder(inner)
    return {k: decode_entry(v) for k, v in value.items()}


_DECODERS = {
    _MARK("tuple"): lambda v: tuple(decode_entry(x) for x in v),
    _MARK("set"): lambda v: {decode_entry(x) for x in v},
    _MARK("frozenset"): lambda v: frozenset(decode_entry(x) for x in v),
    _MARK("Fraction"): Fraction,
    _MARK("Decimal"): Decimal,
    _MARK("ndarray"): lambda v: np.array(v[1], dtype=v[0]),
    _MARK("dict"): lambda v: {decode_entry(k): decode_entry(x) for k, x in v},
}
