"""From a Model to the engine that holds it. The one place that knows engines by name; a heavy library is imported only
when its engine is opened.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, cast

from flowrl.compiler.strategy import Strategy
from flowrl.errors import ModelError, nearest
from flowrl.models import AnyModel, DerivedModel, Ema, Frozen, Model, Snapshot, ValueHead
from flowrl.ragged import Ragged
from flowrl.runtime.engines.base import Engine, EngineOptions
from flowrl.runtime.ranks import ONE_RANK

if TYPE_CHECKING:
    from flowrl.batches import Sequences
    from flowrl.context import Bindings

#: By the name in ``Model.engine``: the class that holds it.
ENGINES = {"transformers": "flowrl.runtime.engines.transformers:TransformersEngine"}


def open_engine(model: AnyModel, bindings: Bindings) -> Engine:
    """Open the engine of a Model; of a derived Model, from the engine of its base.

    A :class:`Frozen` copies the weights of its base while these are still those of step 0, so open it before training
    starts; later they are loaded again from the source. Of a Model with ``lora`` it is the base, which never changes.

    Raises:
        ModelError: an unknown engine, a source that cannot be loaded, two Models on one live module, or a Frozen of a
            live module that has been trained already.
    """
    named = bindings.strategies.get(model.name) or bindings.strategies.get(getattr(model, "base", model).name)
    options = EngineOptions(bindings.micro_batch_tokens, strategy=named or Strategy(), ranks=bindings.ranks or ONE_RANK)
    if isinstance(model, Model):
        _refuse_shared_module(model, bindings)
        return _engine_class(model).open(model, options)
    base: Any = bindings.engine(model.base)
    if isinstance(model, ValueHead):
        base.add_value_head(model.name)
        return cast(Engine, ValueHeadView(base, model.name))
    if isinstance(model, Frozen) and not base.is_untrained and getattr(base, "adapter", None) is None:
        if _is_live(model.base):
            raise ModelError(
                f"{model!r}: the weights of step 0 are gone: {model.base!r} is a live model and has been trained",
                expected="the frozen copy to be opened before the first update",
                received=f"version {base.policy_version}",
                do="use frozen() in the flow from the start, or give the Model a name or a folder as its source",
            )
        fresh = _engine_class(model.base).open(model.base, options)
        frozen = fresh.copy(model, options)
        fresh.close()
        return frozen
    return base.copy(model, options)


def follow(model: DerivedModel, bindings: Bindings) -> None:
    """Let a Snapshot or an Ema follow its base, after the base's writer has completed a version."""
    base: Any = bindings.engine(model.base)
    if isinstance(model, Snapshot):
        update_snapshot(bindings.engine(cast(Any, model)), base, model.every)
    elif isinstance(model, Ema):
        update_ema(bindings.engine(cast(Any, model)), base, model.decay)


def update_snapshot(engine: Any, base: Any, every: int) -> None:
    """Copy the base's weights after every ``every``-th version."""
    if base.policy_version % every == 0:
        engine.average(base, 0.0)


def update_ema(engine: Any, base: Any, decay: float) -> None:
    """``engine = decay * engine + (1 - decay) * base``, weight by weight."""
    engine.average(base, decay)


class ValueHeadView:
    """The engine of a ValueHead: its base's, whose ``values`` are this head's."""

    def __init__(self, base: Any, head: str) -> None:
        self.base, self.head = base, head

    def values(self, sequences: Sequences, head: str | None = None) -> Ragged:
        """float32 ragged, response layout: the value before each token."""
        return self.base.values(sequences, head or self.head)

    def close(self) -> None:
        """Nothing: the weights are the base's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


def _engine_class(model: Model) -> Any:
    if model.engine not in ENGINES:
        raise ModelError(
            f"{model!r}: there is no engine {model.engine!r}",
            expected="one of " + ", ".join(repr(name) for name in ENGINES),
            received=repr(model.engine),
            do=nearest(model.engine, ENGINES),
        )
    module, name = ENGINES[model.engine].split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ModelError(
            f"{model!r}: engine {model.engine!r} cannot be imported",
            expected=f"the packages of pip install 'flowrl-dataflow[{model.engine}]'",
            received=str(error),
            do=f"pip install 'flowrl-dataflow[{model.engine}]'",
        ) from error


def _is_live(model: Model) -> bool:
    return not isinstance(model.source, str | os.PathLike)


def _refuse_shared_module(model: Model, bindings: Bindings) -> None:
    """Two Models on one live module would be one set of weights with two identities: a reference would drift unseen."""
    # A critic copies the body that it starts from, and so does a reward model with a new head.
    if not _is_live(model) or model.kind == "value" or getattr(model, "new_head", False):
        return
    for other in bindings.engines:
        if getattr(other, "lora", None) is not None and model.lora is not None:
            continue  # neither changes it
        if isinstance(other, Model) and other.source is model.source and other.kind == model.kind:
            raise ModelError(
                f"{model!r} and {other!r} share one live model",
                expected="one Model for one set of weights",
                received=f"the same {type(model.source).__name__} twice",
                do=f"use {other.name}.frozen() for a reference, or copy.deepcopy the module",
            )
