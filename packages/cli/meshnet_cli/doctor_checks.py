"""All that `meshnet doctor` looks at, in the order in which it tells it. Pure; asks nobody and reads no file."""

from __future__ import annotations

from meshnet_cli import doctor_machine, doctor_mesh
from meshnet_cli.doctor_facts import Facts
from meshnet_cli.doctor_findings import Finding

CHECKS = (*doctor_machine.CHECKS, *doctor_mesh.CHECKS)


def findings(facts: Facts) -> list[Finding]:
    """Everything that the facts tell, in the order of `CHECKS`; a check without an objection says so once."""
    return [finding for check in CHECKS for finding in check.findings(facts)]
