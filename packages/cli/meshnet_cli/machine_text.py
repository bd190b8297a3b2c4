"""A machine as people write it for `meshnet plan`: ``[NAME=]DEVICE:MEMORY[/DTYPE][@LAYERms][+HOPms]``. Pure.

gpu:24GiB                    a CUDA card with 24 GiB for weights and sessions
desk=cpu:16GiB@1.5ms         a CPU called desk, measured at 1.5 ms for one layer and one token
attic=cpu:8GiB/bfloat16+12ms one that is 12 ms away
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshnet_cli.session_limits import parse_bytes
from meshnet_core.dtypes import DTYPE_BYTES, PACKED_WEIGHT_BYTES
from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id

DEVICES = {"gpu": "cuda", "cuda": "cuda", "mps": "mps", "mac": "mps", "cpu": "cpu"}
# What `--dtype auto` picks on most machines of the kind; see docs/device-and-dtype.md.
DTYPES = {"cuda": "bfloat16", "mps": "float16", "cpu": "float32"}
_FORM = re.compile(
    r"(?:(?P<name>[^=:]+)=)?(?P<device>[a-z]+):(?P<memory>[\d.]+\s*[KMGTkmgt]?i?[Bb]?)(?:/(?P<dtype>\w+))?"
    r"(?:@(?P<layer>\d+(?:\.\d+)?)ms)?(?:\+(?P<hop>\d+(?:\.\d+)?)ms)?"
)


@dataclass(frozen=True, slots=True)
class MachineText:
    """One machine, as it was written.

    Attributes:
        name: None where none was given.
        kind, device: the device as written, and as torch calls it: ``cuda``, ``mps`` or ``cpu``.
        memory: bytes.
        dtype: None for what such a device usually holds weights in.
        layer_ms, hop_ms: None where they are to be estimated.
    """

    name: str | None
    kind: str
    device: str
    memory: int
    dtype: str | None = None
    layer_ms: float | None = None
    hop_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> MachineText:
        """Read one.

        Raises:
            InvalidInputError: it is something else; shows the form.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise InvalidInputError(
                f"--on {text!r} is no machine; write [NAME=]DEVICE:MEMORY[/DTYPE][@LAYERms][+HOPms], such as gpu:24GiB "
                "or desk=cpu:16GiB@1.5ms"
            )
        device = DEVICES.get(match["device"])
        if device is None:
            raise InvalidInputError(f"--on {text!r}: device {match['device']} is unknown; write {', '.join(DEVICES)}")
        dtype = match["dtype"]
        if dtype is not None and dtype not in DTYPE_BYTES and dtype not in PACKED_WEIGHT_BYTES:
            known = ", ".join((*DTYPE_BYTES, *PACKED_WEIGHT_BYTES))
            raise InvalidInputError(f"--on {text!r}: dtype {dtype} is unknown; write {known}")
        if dtype in PACKED_WEIGHT_BYTES:
            dtype = f"bfloat16+{dtype}"  # what packed weights are computed in
        layer_ms, hop_ms = (None if match[key] is None else float(match[key]) for key in ("layer", "hop"))
        if layer_ms == 0:
            raise InvalidInputError(f"--on {text!r}: a layer takes more than 0 ms")
        name = None if match["name"] is None else check_id(match["name"], "a machine's name")
        return cls(name, match["device"], device, parse_bytes(match["memory"], option="--on"), dtype, layer_ms, hop_ms)
