"""What a check of a flow found: violations, and the report that collects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowrl.errors import CheckError


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Args:
        rule: its name.
        node: the label of the call at fault, or the name of the Model.
        expected: what the rule asks for.
        received: what the flow has.
        do: what to change.
        where: the user's ``file:line``.
        argument: the argument at fault, where there is one.
        severity: an "error" refuses the flow, a "warning" is shown.
    """

    rule: str
    node: str
    expected: str
    received: str
    do: str = ""
    where: str = ""
    argument: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        thing = f"{self.node}, argument {self.argument!r}" if self.argument else self.node
        text = f"[{self.rule}] {thing}: expected {self.expected}; received {self.received}."
        if self.do:
            text += f" Do: {self.do}."
        return text + (f" (at {self.where})" if self.where else "")


@dataclass(frozen=True)
class Report:
    """What a check found.

    Args:
        violations: errors first, then warnings.
        num_calls: how many calls were looked at.
        num_rules: how many rules they were held against.
    """

    violations: tuple[Violation, ...]
    num_calls: int
    num_rules: int

    @property
    def errors(self) -> tuple[Violation, ...]:
        """What refuses the flow."""
        return tuple(v for v in self.violations if v.severity == "error")

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """What is worth a look."""
        return tuple(v for v in self.violations if v.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether nothing refuses the flow; warnings do not."""
        return not self.errors

    def __str__(self) -> str:
        head = f"The flow keeps all {self.num_rules} rules ({_count(self.num_calls, 'call')})"
        if self.errors:
            head = f"The flow is refused: {_count(len(self.errors), 'violation')}"
        if self.warnings:
            head += f", with {_count(len(self.warnings), 'warning')}"
        marks = {"error": "✗", "warning": "!"}
        lines = [f"  {marks[v.severity]} {v}" for v in self.violations]
        return "\n".join([head + (":" if lines else "."), *lines])

    def raise_if_broken(self) -> None:
        """Refuse a flow with errors.

        Raises:
            CheckError: with the whole report.
        """
        if not self.ok:
            raise CheckError(str(self), self.violations)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
