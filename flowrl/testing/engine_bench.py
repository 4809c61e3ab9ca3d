"""What the checks of engines work with: tiny models in folders, engines that are closed in the end, and comparisons that say
what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.errors import FlowError
from flowrl.models import Model, RewardModel, ValueModel
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.runtime.engines.base import Engine
    from flowrl.runtime.ranks import Ranks

#: What an engine may be able to do; a check says which of it it needs.
ABILITIES = ("text", "generate", "logprobs", "values", "score", "train", "weights", "save", "export")
#: A token budget that all rows of a check fit in.
PLENTY = 4096


class MakeEngine(Protocol):
    """How the suite opens an engine of yours: on a Model whose source is a HuggingFace folder."""

    def __call__(self, model: Model, *, micro_batch_tokens: int) -> Engine: ...


class EngineError(FlowError, AssertionError):
    """An engine does not do what the protocol says."""


@dataclass
class Bench:
    """What a check is given.

    Args:
        make_engine: opens the engine under test.
        folder: scratch space that all ranks see.
        tolerance: largest difference from the plain model, relative to the largest number where that is above 1.
        tiny: settings of :func:`flowrl.tiny.tiny_model`.
        ranks: of the run; checks run on all of them at the same time, with equal inputs.
    """

    make_engine: MakeEngine
    folder: Path
    tolerance: float
    tiny: dict[str, Any]
    ranks: Ranks
    _shared: dict[Any, Any] = field(default_factory=dict)
    _open: list[Any] = field(default_factory=list)
    _trace: Any = field(default_factory=hashlib.sha256)
    _made: set[Path] = field(default_factory=set)
    _folders: int = 0

    # -- engines and the models that they hold ------------------------------------------------------------------------------

    def open(self, kind: str, source: Path | None = None, *, micro_batch_tokens: int = PLENTY, **settings: Any) -> Any:
        """A new engine on a Model of this kind (policy, value, reward), closed when the check ends."""
        engine = self.make_engine(self.model(kind, source, **settings), micro_batch_tokens=micro_batch_tokens)
        self._open.append(engine)
        return engine

    def shared(self, kind: str, *, micro_batch_tokens: int = PLENTY) -> Any:
        """An engine that all checks share which change nothing in it."""
        key = (kind, micro_batch_tokens)
        if key not in self._shared:
            model = self.model(kind)
            self._shared[key] = self.make_engine(model, micro_batch_tokens=micro_batch_tokens)
        return self._shared[key]

    def model(self, kind: str, source: Path | None = None, **settings: Any) -> Model:
        """A Model of this kind on its tiny folder."""
        source = source or self.source(kind)
        if kind == "reward":
            return RewardModel(source, name="reward", **{"trainable": True, **settings})
        return (ValueModel if kind == "value" else Model)(source, name=kind, **settings)

    def source(self, kind: str, seed: int = 0) -> Path:
        """The HuggingFace folder of a tiny model of this kind. A critic starts from the policy's."""
        kind = "policy" if kind == "value" else kind
        folder = self.folder / f"{kind}-{seed}"
        if folder not in self._made:  # every rank asks its own memory: what a disk says depends on when it is asked
            self._made.add(folder)
            self.ranks.once(lambda: (folder / "done").is_file() or _make_source(folder, kind, seed, self.tiny))
        return folder

    def plain(self, kind: str, source: Path | None = None) -> Any:
        """The model in that folder as anybody would load it: float32, on the CPU, attention written out."""
        import transformers

        from flowrl.runtime.engines.transformers_loading import quiet

        name = {"policy": "AutoModelForCausalLM", "value": "AutoModel", "reward": "AutoModelForSequenceClassification"}
        auto = getattr(transformers, name[kind])
        with quiet():
            return auto.from_pretrained(source or self.source(kind), attn_implementation="eager").eval()

    def new_folder(self) -> Path:
        """An empty folder, the same one on every rank."""
        self._folders += 1
        folder = self.folder / f"scratch-{self._folders}"
        self.ranks.once(lambda: folder.mkdir(exist_ok=True))
        return folder

    def sync(self) -> None:
        """Wait for all ranks: what one of them has written is there now."""
        self.ranks.everyone(None)

    # -- comparisons --------------------------------------------------------------------------------------------------------

    def close(self, what: str, found: Tensor, expected: Tensor, *, tolerance: float | None = None) -> None:
        """Refuse what differs by more than the tolerance.

        Raises:
            EngineError: it does, or is not finite, or has another shape.
        """
        import torch

        tolerance = self.tolerance if tolerance is None else tolerance
        self.note(found)
        if found.shape != expected.shape:
            raise EngineError(f"{what} have another shape", expected=list(expected.shape), received=list(found.shape))
        if not found.numel():
            return
        found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
        if not bool(torch.isfinite(found).all()):
            raise EngineError(f"{what} are not all finite", received=found.flatten()[:8].tolist())
        gap = (found - expected).abs()
        allowed = tolerance * max(1.0, float(expected.abs().max()))
        if float(gap.max()) > allowed:
            place = int(gap.argmax())
            raise EngineError(
                f"{what} are wrong",
                expected=f"{float(expected.flatten()[place]):.8g} at place {place}, within {allowed:.1e}",
                received=f"{float(found.flatten()[place]):.8g}",
            )

    def near(self, what: str, found: Tensor, expected: Tensor, *, tolerance: float) -> None:
        """Refuse what differs by more than the tolerance as a whole: relative L2."""
        self.note(found)
        distance = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
        if not distance <= tolerance:
            raise EngineError(f"{what} are wrong", expected=f"within {tolerance:.1e} (relative L2)", received=distance)

    def same(self, what: str, found: Any, expected: Any) -> None:
        """Refuse what is not equal; tensors and ragged columns bit for bit.

        Raises:
            EngineError: it is not.
        """
        import torch

        self.note(found)
        if isinstance(found, torch.Tensor):
            equal = found.shape == expected.shape and torch.equal(found, expected)
        else:
            equal = found == expected
        if not equal:
            raise EngineError(f"{what} differ", expected=_short(expected), received=_short(found))

    def true(self, what: str, holds: Any, received: Any = None) -> None:
        """Refuse what does not hold."""
        self.note(bool(holds))
        if not bool(holds):
            raise EngineError(f"Not so: {what}", received=None if received is None else _short(received))

    @contextmanager
    def refused(self, what: str, kind: type[FlowError] = FlowError, *, naming: Sequence[str] = ()) -> Iterator[None]:
        """The body must raise this error, and its message must name these."""
        try:
            yield
        except kind as error:
            text = str(error)
            missing = [n for n in naming if n not in text]
            if missing:
                raise EngineError(
                    f"{what} is refused in other words", expected=f"a message with {missing}", received=text
                ) from error
        except Exception as error:
            raise EngineError(
                f"{what} is refused in another way", expected=kind.__name__, received=f"{type(error).__name__}: {error}"
            ) from error
        else:
            raise EngineError(f"{what} is not refused", expected=kind.__name__, received="a result")

    def unchanged(self, engine: Any, before: dict[str, Tensor]) -> None:
        """Refuse weights other than these."""
        after = dict(engine.weights())
        self.same("the names of the weights", sorted(after), sorted(before))
        for name, tensor in before.items():
            self.same(f"the weights {name}, which nothing should have changed,", after[name], tensor)

    # -- for the runner -----------------------------------------------------------------------------------------------------

    def note(self, value: Any) -> None:
        """Remember a result: all ranks must have the same ones."""
        import torch

        if isinstance(value, Ragged):
            self.note(value.offsets)
            value = value.values
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            self._trace.update(f"{value.dtype}{tuple(value.shape)}".encode())
            value = value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        self._trace.update(value if isinstance(value, bytes) else repr(value).encode())

    def run(self, work: Callable[[Bench], None]) -> Exception | None:
        """Run one check on all ranks; what it raised, on the first rank that did."""
        self._trace = hashlib.sha256()
        error: Exception | None = None
        try:
            work(self)
        except Exception as raised:  # an engine may fail in any way
            error = raised
        for engine in self._open:
            engine.close()
        self._open.clear()
        outcomes = self.ranks.everyone(
            (None if error is None else f"{type(error).__name__}: {error}", self._trace.digest())
        )
        if error is not None:
            return error
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                return EngineError(f"Rank {rank} fails, and others do not", received=text)
        if len({digest for _, digest in outcomes}) > 1:
            return EngineError("Ranks have different results", expected="whole results, the same on every rank")
        return None

    def done(self) -> None:
        """Close what the checks shared."""
        for engine in self._shared.values():
            engine.close()
        self._shared.clear()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + "…"


def _make_source(folder: Path, kind: str, seed: int, settings: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    from flowrl.runtime.engines.transformers_loading import quiet
    from flowrl.tiny import tiny_model, tiny_tokenizer

    module: Any = tiny_model(seed, **settings)
    if kind == "reward":
        config = module.config
        config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            module = AutoModelForSequenceClassification.from_config(config)
    with quiet():
        module.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    (folder / "done").touch()


# -- checks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineCheck:
    """One promise of the protocol.

    Args:
        name: what is promised, in a few words.
        needs: what the engine must be able to do for it.
        work: tries it, and raises where it is not kept.
    """

    name: str
    needs: frozenset[str]
    work: Callable[[Bench], None]


#: In the order in which they are tried.
CHECKS: list[EngineCheck] = []


def check(name: str, *needs: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Make a check of a function."""
    assert set(needs) <= set(ABILITIES) and name not in {c.name for c in CHECKS}

    def made(work: Callable[[Bench], None]) -> Callable[[Bench], None]:
        CHECKS.append(EngineCheck(name, frozenset(needs), work))
        return work

    return made
