"""Recording: a Ref stands in for data, is checked at the line, and refuses to be used as data."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from flowrl import (
    GAE,
    Critic,
    FunctionReward,
    Model,
    Node,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    Ragged,
    Ref,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    ValueModel,
    WeightedSum,
    source,
)
from flowrl.annotations import edge_types, field_type, resolve_hints, type_name
from flowrl.errors import EdgeTypeError, FlowError, GraphError, RefUseError, UnknownFieldError
from flowrl.graph import recorded_from, user_location, walk

if TYPE_CHECKING:
    from torch import Tensor

HERE = re.escape(__file__)


@pytest.fixture
def actor() -> Model:
    return Model("some/policy")


@pytest.fixture
def rollouts(actor: Model) -> Rollouts:
    return Rollout(actor, group_size=4)(source(Prompts, name="prompts", batch_size=8))


def line_of(error: BaseException) -> int:
    """The line in this file where an error was raised, or passed through."""
    traceback, line = error.__traceback__, 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == __file__:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def raised(thing: Callable[[], Any], kind: type[FlowError]) -> FlowError:
    with pytest.raises(kind) as info:
        thing()
    return info.value


class TestRecording:
    def test_a_call_with_a_ref_is_recorded(self, rollouts: Any) -> None:
        rewards: Any = FunctionReward(len)(rollouts)
        assert isinstance(rewards, Ref)
        call = rewards._call
        assert call.node.name == "FunctionReward"
        assert dict(call.arguments) == {"rollouts": rollouts}
        assert call.output_type is Rewards
        assert [name for name, _ in call.inputs()] == ["rollouts"]
        assert repr(rewards) == "Ref[Rewards](FunctionReward)"

    def test_where_is_the_users_line(self, rollouts: Any) -> None:
        rewards: Any = FunctionReward(len)(rollouts); here = user_location()  # noqa: E702 # fmt: skip
        assert rewards._call.where == here
        assert here.startswith(__file__)

    def test_variadic_arguments(self, rollouts: Any) -> None:
        rewards = FunctionReward(len)(rollouts)
        total: Any = WeightedSum()(rewards, rewards)
        assert [name for name, _ in total._call.inputs()] == ["rewards[0]", "rewards[1]"]

    def test_optional_ports_may_stay_open_or_be_none(self, rollouts: Any, actor: Model) -> None:
        rewards, values = FunctionReward(len)(rollouts), Critic(ValueModel("v"))(rollouts)
        with_none: Any = GAE()(rollouts, rewards, values, None)
        assert set(with_none._call.arguments) == {"rollouts", "rewards", "values"}

    def test_composites_record_what_they_are_short_for(self, rollouts: Any, actor: Model) -> None:
        rewards, values = FunctionReward(len)(rollouts), Critic(ValueModel("v"))(rollouts)
        stats: Any = PPOUpdater(actor)(rollouts, GAE()(rollouts, rewards, values), PolicyLogprobs(actor)(rollouts))
        assert stats._call.node.name == "Updater"
        assert stats._call.where.startswith(__file__)

    def test_walk_orders_inputs_before_users_and_ties_by_recording(self, rollouts: Any) -> None:
        one, two = FunctionReward(len, label="one")(rollouts), FunctionReward(len, label="two")(rollouts)
        total: Any = WeightedSum()(two, one)
        calls = walk([total])
        assert [c.node.label or c.node.name for c in calls] == ["prompts", "Rollout", "one", "two", "WeightedSum"]

    def test_recorded_from_lists_everything_downstream(self, rollouts: Any) -> None:
        prompts = next(iter(walk([rollouts])))
        FunctionReward(len)(rollouts)
        assert [c.node.name for c in recorded_from(prompts)] == ["Source", "Rollout", "FunctionReward"]

    def test_a_notebook_cell_that_is_run_again_replaces_what_it_recorded(self) -> None:
        names: dict[str, Any] = {}
        exec("from flowrl import *\nrollouts = Rollout(Model('m'))(source(Prompts, name='p'))", names)
        cell = compile("rewards = FunctionReward(len)(rollouts)", "/tmp/ipykernel_7/12345.py", "exec")
        exec(cell, names)
        exec(cell, names)
        prompts = walk([names["rollouts"]])[0]
        assert [c.node.name for c in recorded_from(prompts)] == ["Source", "Rollout", "FunctionReward"]

    def test_locations_inside_of_exec_are_found(self) -> None:
        names: dict[str, Any] = {"user_location": user_location}
        exec("\nhere = user_location()", names)
        assert names["here"] == "<string>:2"


class TestAtTheLine:
    def test_wrong_edge_type(self, rollouts: Any) -> None:
        made = user_location().rpartition(":")[2]
        values: Any = Critic(ValueModel("v"))(rollouts)
        error = raised(lambda: GAE()(rollouts, values, values), EdgeTypeError)
        assert str(error) == (
            "GAE: argument 'rewards' has the wrong type. Expected Rewards. Received Values, the output of Critic at "
            f"{__file__}:{int(made) + 1}. Do: pass a call that returns Rewards. (at {__file__}:{int(made) + 2})"
        )

    def test_wrong_arguments(self, rollouts: Any) -> None:
        error = raised(lambda: GAE()(rollouts, reward=3), EdgeTypeError)  # type: ignore[call-arg]
        assert "missing a required argument: 'rewards'" in str(error)
        assert "Do: it has no 'reward'; did you mean 'rewards'?" in str(error)
        assert "Expected GAE(rollouts: Rollouts, rewards: Rewards, values: Values" in str(error)
        assert "Received (Rollouts, reward: int)" in str(error)
        assert error.where == f"{__file__}:{line_of(error)}"

    def test_missing_argument(self, rollouts: Any) -> None:
        assert "missing a required argument: 'rewards'" in str(raised(lambda: GAE()(rollouts), EdgeTypeError))  # type: ignore[call-arg]

    def test_no_input_at_all(self) -> None:
        assert "WeightedSum is called without inputs" in str(raised(lambda: WeightedSum()(), EdgeTypeError))

    def test_data_mixed_with_refs(self, rollouts: Any) -> None:
        error = raised(lambda: GAE()(rollouts, 3.0, None), EdgeTypeError)  # type: ignore[arg-type]
        assert "GAE: argument 'rewards' is data while another argument is a Ref" in str(error)
        assert "Received float" in str(error) and error.where == f"{__file__}:{line_of(error)}"

    def test_a_ref_in_a_setting(self, rollouts: Any) -> None:
        error = raised(lambda: Rollout(rollouts)(source(Prompts, name="p")), EdgeTypeError)
        assert "Rollout: setting 'model' is given a Ref" in str(error)

    def test_unknown_field_offers_the_nearest(self, rollouts: Any) -> None:
        error = raised(lambda: rollouts.tokns, UnknownFieldError)
        assert str(error).startswith("Rollouts has no field 'tokns'. Do: did you mean 'tokens'? (at ")
        assert error.where == f"{__file__}:{line_of(error)}"

    def test_unknown_field_knows_inherited_properties(self, rollouts: Any) -> None:
        assert "'loss_mask'" in str(raised(lambda: rollouts.lossmask, UnknownFieldError))

    def test_methods_are_no_fields(self, rollouts: Any) -> None:
        error = raised(lambda: rollouts.select([0]), UnknownFieldError)
        assert "`ref.select(…)` is a method of Rollouts" in str(error)

    def test_fields_of_what_is_no_batch(self, rollouts: Any) -> None:
        error = raised(lambda: rollouts.messages.first, EdgeTypeError)
        assert "has no fields to read" in str(error)


class TestRefUse:
    @pytest.mark.parametrize(
        ("use", "what"),
        [
            (bool, "if ref:"),
            (lambda ref: [x for x in ref], "for x in ref:"),
            (len, "len(ref)"),
            (lambda ref: ref[0], "ref[…]"),
            (lambda ref: ref(1), "ref(…)"),
            (lambda ref: setattr(ref, "tokens", 1), "ref.tokens = …"),
            (lambda ref: delattr(ref, "tokens"), "del ref.tokens"),
            (lambda ref: operator.setitem(ref, 0, 1), "ref[…] = …"),
            (lambda ref: ref + 1, "ref + …"),
            (lambda ref: 2 * ref, "… * ref"),
            (lambda ref: ref - ref, "ref - …"),
            (lambda ref: ref / 2, "ref / …"),
            (lambda ref: ref**2, "ref ** …"),
            (lambda ref: ref @ ref, "ref @ …"),
            (lambda ref: ref > 0, "ref > …"),
            (lambda ref: ref == 1, "ref == …"),
            (lambda ref: ref != 1, "ref == …"),
            (lambda ref: 1 in ref, "… in ref"),
            (lambda ref: -ref, "-ref"),
            (float, "float(ref)"),
            (abs, "abs(ref)"),
            (lambda ref: ref & ref, "ref & …"),
        ],
    )
    def test_a_ref_is_no_data(self, rollouts: Any, use: Callable[[Any], Any], what: str) -> None:
        error = raised(lambda: use(rollouts), RefUseError)
        assert f"A Ref of Rollouts was used in `{what}`" in str(error)
        assert "no data yet" in str(error) and error.where is not None and error.where.startswith(__file__)

    def test_fields_that_are_no_batches_refuse_too(self, rollouts: Any) -> None:
        assert "A Ref of int64" not in str(raised(lambda: bool(rollouts.finish_reason), RefUseError))
        assert "A Ref of Tensor" in str(raised(lambda: rollouts.finish_reason + 1, RefUseError))
        assert "LogprobOrigin | None" in str(raised(lambda: bool(rollouts.origin), RefUseError))

    def test_refs_are_keys_and_are_compared_by_identity(self, rollouts: Any) -> None:
        other = rollouts.tokens
        assert rollouts == rollouts and rollouts != other
        assert {rollouts: 1, other: 2}[rollouts] == 1
        assert copy.copy(rollouts) is rollouts and copy.deepcopy([rollouts])[0] is rollouts

    def test_protocol_lookups_make_no_edges(self, rollouts: Any) -> None:
        assert not hasattr(rollouts, "__array__") and not hasattr(rollouts, "_repr_html_")


class Mean(Node):
    """Takes a field."""

    def __call__(self, column: Ragged, *, lengths: Tensor) -> Rewards: ...  # type: ignore[empty-body]


class TestFieldEdges:
    def test_a_field_and_a_property_are_edges(self, rollouts: Any) -> None:
        rewards: Any = Mean()(rollouts.loss_mask, lengths=rollouts.response_lengths)
        edges = dict(rewards._call.inputs())
        assert edges["column"]._path == ("loss_mask",) and edges["column"]._type is Ragged
        assert edges["lengths"]._path == ("response_lengths",)
        assert repr(edges["column"]) == "Ref[Ragged](Rollout.loss_mask)"
        flow = RLFlow.from_outputs(rewards)
        paths = {d["argument"]: (d["path"], d["type"]) for _, _, d in flow.graph.edges(data=True)}
        assert paths == {
            "prompts": ("", "Prompts"),
            "column": ("loss_mask", "Ragged"),
            "lengths": ("response_lengths", "Tensor"),
        }

    def test_nested_fields(self, rollouts: Any) -> None:
        assert rollouts.spans.kinds._path == ("spans", "kinds") and rollouts.spans.kinds._type is Ragged
        assert rollouts.tokens.lengths._path == ("tokens", "lengths")

    def test_a_field_of_the_wrong_type(self, rollouts: Any) -> None:
        error = raised(lambda: Mean()(rollouts.prompt_id, lengths=rollouts.response_lengths), EdgeTypeError)
        assert (
            "argument 'column' has the wrong type. Expected Ragged. Received Tensor, field 'prompt_id' of Rollout"
            in (str(error))
        )

    def test_tensors_fit_where_torch_is_imported_for_real(self, rollouts: Any) -> None:
        import torch

        class Real(Node):
            def __call__(self, lengths: torch.Tensor) -> Rewards: ...  # type: ignore[empty-body]

        assert isinstance(Real()(rollouts.response_lengths), Ref)
        assert "Expected Tensor" in str(raised(lambda: Real()(rollouts.tokens), EdgeTypeError))


class TestAnnotations:
    def test_names_that_only_type_checkers_import(self) -> None:
        def function(a: Tensor, b: Tensor | None, c: Unknown.Part, d: Rollouts) -> None: ...  # type: ignore[name-defined] # noqa: F821

        hints = resolve_hints(function)
        assert type_name(hints["a"]) == "Tensor" and hints["d"] is Rollouts
        assert edge_types(hints["b"]) == ((hints["a"],), True)
        assert hints["c"].__name__ == "Part"

    def test_batches_that_only_type_checkers_import(self) -> None:
        names: dict[str, Any] = {"__name__": "elsewhere"}
        exec("from __future__ import annotations\ndef f(rollouts: Rollouts) -> Rewards: ...", names)
        assert resolve_hints(names["f"]) == {"rollouts": Rollouts, "return": Rewards}

    def test_types_in_words(self) -> None:
        assert type_name(Rewards) == "Rewards"
        assert type_name(Rewards | None) == "Rewards | None"

    def test_field_type_of_an_optional(self) -> None:
        assert edge_types(field_type(Rollouts, "origin"))[1]

    def test_graph_errors_are_flow_errors(self) -> None:
        assert issubclass(GraphError, FlowError)
