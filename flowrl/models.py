"""Models: parameters with an identity. With State, the only mutable thing in a flow.

A Model here is a light, frozen handle: a unique name, where the parameters come from, and how to hold them. Nothing is
loaded until an engine is bound to it. Two nodes given one Model share its weights; two distinct Models with one name
are an error that the check of a flow reports.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flowrl.adapters import LoRA, Quantization, quantization_problems
from flowrl.errors import ModelError

if TYPE_CHECKING:
    from flowrl.runtime.engines.base import Engine


@dataclass(frozen=True, eq=False, kw_only=True)
class BaseModel:
    """What every Model has. ``name`` is filled in when it is not given."""

    name: str = ""

    kind: ClassVar[str] = "policy"

    @property
    def parameter_set(self) -> BaseModel:
        """The Model that owns the parameters which a writer of this one would change."""
        return self

    @property
    def writable(self) -> bool:
        """Whether an updater may write it."""
        return False

    def bound_engine(self) -> Engine:
        """The engine that holds this Model here: in a run the run's, else the process's own."""
        from flowrl.context import current_bindings

        return current_bindings().engine(self)  # type: ignore[arg-type]

    def problems(self) -> list[str]:
        """Settings that cannot work, a sentence each."""
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # A Model is compared by identity, and identity must survive the copies that dataclasses and networkx make.
    def __copy__(self) -> BaseModel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseModel:
        return self


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, eq=False, repr=False)
class Model(BaseModel):
    """A policy: a causal language model.

    Args:
        source: a name, a folder, or a live ``PreTrainedModel``, which is trained in place.
        name: unique in a run; by default the last part of the source.
        tokenizer: a name, a folder or a live tokenizer; by default the source's own.
        trainable: whether an updater may write it.
        dtype: of the parameters as they are kept (and of the optimiser's masters).
        autocast: of matrix products in training and scoring: "bfloat16" or None for ``dtype`` itself.
        load_options: passed on to ``from_pretrained`` of model and tokenizer (``gguf_file``, ``revision``, …).
        engine: which engine holds it: "transformers".
        device: "cpu", "cuda", "cuda:1", …; None takes the machine's best.
        lora: train low-rank adapters alone; the weights of the source are the base, which never changes.
        quantization: hold the linear layers of the trunk in fewer bits: "nf4" or "int8" quantise the source as it is
            loaded; "gptq" says that the source holds GPTQ weights. What is quantised is not trained itself: give ``lora``.

    Example::

        actor = Model("Qwen/Qwen3-1.7B", autocast="bfloat16")
        actor = Model("Qwen/Qwen3-8B", dtype="bfloat16", quantization="nf4", lora=LoRA(rank=16))
    """

    source: Any
    tokenizer: Any = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)
    dtype: Dtype = field(default="float32", kw_only=True)
    autocast: Dtype | None = field(default=None, kw_only=True)
    load_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    engine: str = field(default="transformers", kw_only=True)
    device: str | None = field(default=None, kw_only=True)
    lora: LoRA | None = field(default=None, kw_only=True)
    quantization: Quantization | None = field(default=None, kw_only=True)

    name_suffix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", default_name(self.source) + self.name_suffix)
        check_name(self.name)

    @property
    def writable(self) -> bool:
        return self.trainable

    def frozen(self) -> Frozen:
        """This Model as it was at step 0, after a resume too; one and the same however often it is asked for. Of a Model
        with ``lora`` it is the base with the adapter off, and takes no memory for weights."""
        existing = getattr(self, "_frozen", None)
        if existing is None:
            existing = Frozen(self)
            object.__setattr__(self, "_frozen", existing)
        return existing

    def problems(self) -> list[str]:
        found = []
        if self.source is None or (isinstance(self.source, str) and not self.source):
            found.append("source is empty; expected a name, a folder or a live model")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            found.append(f"dtype is {self.dtype!r}; expected float32, bfloat16 or float16")
        if self.autocast not in (None, "bfloat16", "float16"):
            found.append(f"autocast is {self.autocast!r}; expected None, bfloat16 or float16")
        return [*found, *self._adapter_problems()]

    def _adapter_problems(self) -> list[str]:
        found = list(quantization_problems(self.quantization))
        if self.lora is not None and not isinstance(self.lora, LoRA):
            return [*found, f"lora is {self.lora!r}; expected None or LoRA(rank=…, alpha=…)"]
        if self.lora is not None:
            found += self.lora.problems()
            if not self.trainable and self.lora.adapter_source is None:
                found.append(
                    "trainable is False with a new adapter in lora; expected trainable=True, or lora=LoRA(adapter_source=…) "
                    "with an adapter that somebody has trained"
                )
        if self.quantization is not None and self.trainable and self.lora is None:
            found.append(
                f"quantization is {self.quantization!r} of a trainable Model without an adapter; expected lora=LoRA(…) "
                "(add lora=: a quantised base is not trained itself), or trainable=False"
            )
        if self.quantization is not None and not isinstance(self.source, str | os.PathLike):
            found.append(
                f"quantization is {self.quantization!r} of a live {type(self.source).__name__}; expected a name or a folder "
                "as source: weights are quantised as they are loaded"
            )
        return found


@dataclass(frozen=True, eq=False, repr=False)
class ValueModel(Model):
    """A critic with a trunk of its own: a causal language model's body and a head that gives one value a token."""

    kind: ClassVar[str] = "value"
    name_suffix: ClassVar[str] = "-value"

    @classmethod
    def from_policy(cls, policy: Model, name: str = "") -> ValueModel:
        """A critic that starts from the policy's weights, with a new head of zeros."""
        return cls(policy.source, name=name or f"{policy.name}-value", **like(policy))


@dataclass(frozen=True, eq=False, repr=False)
class RewardModel(Model):
    """A model that scores sequences: a sequence classifier with one label.

    Args:
        trainable: whether an updater may write it; it may not unless it is said.
        new_head: the source is a language model; its body gets a new head of zeros, to be trained.
    """

    trainable: bool = field(default=False, kw_only=True)
    new_head: bool = field(default=False, kw_only=True)

    kind: ClassVar[str] = "reward"
    name_suffix: ClassVar[str] = "-reward"

    @classmethod
    def from_policy(cls, policy: Model, name: str = "") -> RewardModel:
        """A reward model to be trained: it starts from the policy's weights, with a new head of zeros."""
        return cls(policy.source, name=name or f"{policy.name}-reward", new_head=True, trainable=True, **like(policy))


@dataclass(frozen=True, eq=False, repr=False)
class DerivedModel(BaseModel):
    """A Model made from another. ``base`` is the one it follows."""

    base: Model

    def problems(self) -> list[str]:
        if isinstance(self.base, Model):
            copies = self.parameter_set is self  # of a head that is trained whole: it is no adapter
            if copies and self.base.lora is not None and getattr(self.base, "new_head", False):
                return [f"base is {self.base!r}, with lora and a new head; expected a Model whose head is not trained"]
            return []
        return [f"base is {self.base!r}; expected a Model that is not derived itself"]

    def frozen(self) -> DerivedModel:
        """Itself: no updater writes a derived Model."""
        return self


@dataclass(frozen=True, eq=False, repr=False)
class Frozen(DerivedModel):
    """The base's weights at step 0. Made by :meth:`Model.frozen`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"{self.base.name}.frozen")
        check_name(self.name)


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot(DerivedModel):
    """A copy of the base, taken anew after every ``every``-th version. Its writer is derived: it runs after the
    base's."""

    every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"{self.base.name}.snapshot")
        check_name(self.name)

    def problems(self) -> list[str]:
        return super().problems() + ([] if self.every >= 1 else [f"every is {self.every}; expected at least 1"])


@dataclass(frozen=True, eq=False, repr=False)
class Ema(DerivedModel):
    """The exponential moving average of the base: after each version, ``ema = decay * ema + (1 - decay) * base``."""

    decay: float = 0.99

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"{self.base.name}.ema")
        check_name(self.name)

    def problems(self) -> list[str]:
        found = super().problems()
        return found if 0.0 <= self.decay < 1.0 else [*found, f"decay is {self.decay}; expected 0 <= decay < 1"]


@dataclass(frozen=True, eq=False, repr=False)
class ValueHead(DerivedModel):
    """A value head on the base's trunk. It shares the base's parameters: its loss belongs in the base's updater."""

    kind: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"{self.base.name}.value_head")
        check_name(self.name)

    @property
    def parameter_set(self) -> BaseModel:
        return self.base

    @property
    def writable(self) -> bool:
        return self.base.writable


@dataclass(frozen=True, eq=False)
class State:
    """A mutable value without a network: an adaptive KL coefficient, running reward statistics, a curriculum.

    Args:
        name: unique in a run.
        init: the value at step 0, made of numbers, strings, lists, dicts and tensors.

    It has versions, one writer, and is checkpointed. Inside a node: ``state.value`` reads, ``state.set(value)`` writes.
    A node that writes says so: ``def writes(self): return (self.state,)``.
    """

    name: str
    init: Any

    @property
    def value(self) -> Any:
        """The value here and now; ``init`` where nobody has set one."""
        from flowrl.context import current_bindings

        states = current_bindings().states
        if self not in states:
            states[self] = copy.deepcopy(self.init)  # what a node does to it must not reach another run
        return states[self]

    def set(self, value: Any) -> None:
        """Write a new value.

        Raises:
            ModelError: the running node does not say that it writes this State.
        """
        from flowrl.context import current_bindings, current_step

        allowed = current_step().writes
        if allowed is not None and self not in allowed:
            raise ModelError(
                f"State {self.name!r} is written by {current_step().label}, which does not say so",
                expected="a node that declares what it writes, so that the flow knows its one writer",
                received=f"writes() = {tuple(getattr(w, 'name', w) for w in allowed)}",
                do="add to the node: def writes(self): return (self.<the state>,)",
            )
        current_bindings().states[self] = value

    def problems(self) -> list[str]:
        """Settings that cannot work, a sentence each."""
        return [] if self.name else ["name is empty; expected one that is unique in the run"]

    def __copy__(self) -> State:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return self


def like(model: Model) -> dict[str, Any]:
    """The settings of a Model that another one on the same source shares."""
    names = ("tokenizer", "dtype", "autocast", "load_options", "engine", "device", "lora", "quantization")
    return {name: getattr(model, name) for name in names}


def check_name(name: Any) -> None:
    """Refuse a name that no folder can have: checkpoints and exports are kept under it.

    Raises:
        ModelError: it is not a text, too long, or holds what file systems do not take.
    """
    fine = isinstance(name, str) and len(name.encode("utf-8", "replace")) <= 150 and name.isprintable()
    if not fine or name.strip(". ") == "" or "/" in name or "\\" in name:
        raise ModelError(
            f"{str(name)[:80]!r} cannot be the name of a Model",
            expected="at most 150 bytes of printable text without slashes: checkpoints are kept in a folder of this name",
            received=f"{type(name).__name__} {str(name)[:80]!r}",
            do="give name=",
        )


def default_name(source: Any) -> str:
    """The last part of a path or hub name; of a live model its class."""
    if isinstance(source, str | os.PathLike):
        path = os.path.normpath(os.fspath(source))
        if path.split(os.sep)[-1] in (os.curdir, os.pardir):  # "." and ".." are names of nothing
            path = os.path.abspath(path)
        return os.path.basename(path) or "model"
    return type(source).__name__


#: What a node may hold as "a Model".
AnyModel = Model | DerivedModel
