"""What `meshnet verify` found, as a table for people and as a JSON document. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshnet_node.verification import CheckResult, Verification


def show(model: str, found: Verification) -> None:
    """Print the table, what differs by name, and last the verdict alone on its line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{model}, {found.dtype} on {found.device}, {found.steps} steps",
        caption=_tolerance(found),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("layers")
    table.add_column("check")
    table.add_column("largest logit difference", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("")
    before: object = ""
    for result in found.results:
        layers = "whole" if result.split is None else str(result.split)
        if layers != before:
            table.add_section()
        verdict = Text("same", "green") if result.objection is None else Text("DIFFERS", "bold red")
        table.add_row(Text("" if layers == before else layers), result.check, *_figures(result), verdict)
        before = layers
    Console().print(table)
    for split, reason in found.refused:
        print(f"refused: {split}: {reason}")
    for result in found.differing:
        print(f"differs: {result.name}: {result.objection}")
    print(found.verdict, flush=True)


def document(model: str, fingerprint: str, found: Verification) -> dict[str, Any]:
    """All of it, JSON-ready; figures that are not finite are null."""
    return {
        "model": model,
        "fingerprint": fingerprint,
        "dtype": found.dtype,
        "device": found.device,
        "steps": found.steps,
        "tolerance": {
            "largest": found.tolerance.largest,
            "typical": found.tolerance.typical,
            "gap": found.tolerance.gap,
        },
        "verified": len(found.results) - len(found.differing),
        "total": len(found.results),
        "differs": [result.name for result in found.differing],
        "refused": [{"split": str(split), "reason": reason} for split, reason in found.refused],
        "checks": [_row(result) for result in found.results],
    }


def _figures(result: CheckResult) -> tuple[str, str]:
    if result.found is None:
        return "-", "-"
    return f"{result.found.largest:.2g}", f"{result.found.agreeing}/{result.found.positions}"


def _tolerance(found: Verification) -> str:
    tolerance = found.tolerance
    if tolerance.largest is not None:
        return f"same: no logit differs by more than {tolerance.largest:.2g}; replay: the same bits"
    return (
        f"same: no token differs unless the best two are within {tolerance.gap:.2g}, and logits typically by no more "
        f"than {tolerance.typical:.2g}; replay: the same bits"
    )


def _row(result: CheckResult) -> dict[str, Any]:
    found = result.found
    return {
        "check": result.check.value,
        "split": None if result.split is None else str(result.split),
        "same": result.objection is None,
        "objection": result.objection,
        "largest_logit_difference": None if found is None else _finite(found.largest),
        "typical_logit_difference": None if found is None else _finite(found.typical),
        "tokens_agreeing": None if found is None else found.agreeing,
        "tokens_compared": None if found is None else found.positions,
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
