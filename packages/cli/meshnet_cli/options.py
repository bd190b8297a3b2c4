"""Options that more than one subcommand has, so that they read the same everywhere."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshnet_cli import completion
from meshnet_core.wire_form import WireForm
from meshnet_gateway.recovery import Replay

DEFAULT_TRACKER_PORT = 7400
FIRST_NODE_PORT = 7410
DEFAULT_GATEWAY_PORT = 8000
DEFAULT_STEP_DEADLINE_S = 60.0
LOOPBACK = "127.0.0.1"
PIPED_WIDTH = 160  # columns of a table, where no terminal says how many
DEFAULT_API_URL = f"http://{LOOPBACK}:{DEFAULT_GATEWAY_PORT}/v1"


class DtypeChoice(enum.StrEnum):
    """What weights are held and multiplied in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class QuantizeChoice(enum.StrEnum):
    """How weights are held."""

    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class CompileChoice(enum.StrEnum):
    """What is compiled."""

    AUTO = "auto"
    OFF = "off"
    STEP = "step"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a GGUF file, a hub id, or smollm2 (the demo's).",
        autocompletion=completion.complete_model,
    ),
]
TrackerUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="URL",
        help="A tracker's address, such as https://10.0.0.5:7400. Of several (given again, or with commas between) "
        "the first that answers is used, and another one when it does not.",
        show_default="where this mesh's were last, else looked for on the local network",
    ),
]
Host = Annotated[
    str,
    typer.Option("--host", help="Address to listen on; 0.0.0.0 is all of this machine's, for other machines to dial."),
]
MeshPath = Annotated[
    Path | None,
    typer.Option(
        "--mesh",
        metavar="DIR",
        help="Folder with this machine's identity in a mesh.",
        show_default="$MESHNET_HOME/mesh, else ~/.config/meshnet/mesh",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="No certificates and no encryption, also for other machines: only on a network where you trust all.",
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="A key that the API takes; may be given several times. Others on this machine can see it; a file or "
        "MESHNET_API_KEY keeps it to yourself.",
    ),
]
ApiKeysFile = Annotated[
    Path | None, typer.Option("--api-keys-file", metavar="FILE", help="Keys that the API takes, one a line.")
]
NoApiKey = Annotated[
    bool, typer.Option("--no-api-key", help="Let everybody use the API who reaches it, also from other machines.")
]
GatewayUrl = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The gateway's API.", show_default=DEFAULT_API_URL),
]
ClientKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Key to bring, where the gateway asks for one.",
        show_default="the first in MESHNET_API_KEY",
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Which model.",
        show_default="the first served",
        autocompletion=completion.complete_served,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Announce = Annotated[
    bool, typer.Option("--mdns/--no-mdns", help="Whether it can be found on the local network by multicast DNS.")
]
Dtype = Annotated[
    DtypeChoice,
    typer.Option("--dtype", help="What weights are held and computed in; auto is what suits the device and the model."),
]
Quantize = Annotated[
    QuantizeChoice,
    typer.Option(
        "--quantize",
        help="How weights are held: auto leaves 4- and 8-bit GGUF blocks packed on a CPU in bfloat16, none does not; "
        "int8 and int4 round wider ones, which makes another model of it.",
    ),
]
Compile = Annotated[
    CompileChoice,
    typer.Option(
        "--compile",
        help="auto has small operations of decode steps built by this machine's C compiler, if it has one; step has "
        "torch compile whole steps in the background and uses them once they prove to be the same; off does neither.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="CPU threads of a node.", show_default="what torch chooses"),
]

CacheBytes = Annotated[
    str | None,
    typer.Option(
        "--cache-bytes",
        metavar="SIZE",
        help="Memory for the state of all sessions of a node, such as 512M or 2GiB; 0 keeps none, which is slow.",
        show_default="a quarter of what is free",
    ),
]
MaxSessions = Annotated[
    int, typer.Option("--max-sessions", min=1, metavar="N", help="Sessions that a node holds state of at once.")
]
SessionTtl = Annotated[
    float, typer.Option("--session-ttl", metavar="SECONDS", help="How long a session may be unused before it goes.")
]
PrefixReuse = Annotated[
    bool,
    typer.Option(
        "--prefix-reuse/--no-prefix-reuse",
        help="Whether a node holds on the state of finished turns, in the same memory, for turns that go on from them.",
    ),
]

Recovery = Annotated[
    Replay,
    typer.Option(
        "--recovery",
        help="How lost state is made again: fast, in chunks, or exact, step by step as at first, which gives the same "
        "answer in 16 bits too and takes longer.",
    ),
]
StepDeadline = Annotated[
    float,
    typer.Option(
        "--step-deadline",
        min=0.1,
        max=3600,
        metavar="SECONDS",
        help="Time for one step, all nodes together; a node that hangs for longer is routed around.",
    ),
]
Wire = Annotated[
    WireForm,
    typer.Option(
        "--wire",
        help="How frames go to nodes: stream, many on one connection, to those that can do it; http, a request for "
        "each.",
    ),
]

Speculate = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="auto|off|N",
        help="Whether tokens are drafted from what the text repeats, and several checked in one round trip: auto where "
        "it pays, off never, N so many wherever there is a draft.",
    ),
]

Traces = Annotated[
    str | None,
    typer.Option(
        "--traces",
        metavar="URL",
        help="Send OpenTelemetry traces of answers to this collector, such as otlp://127.0.0.1:4318.",
        show_default="what OTEL_EXPORTER_OTLP_ENDPOINT says, else none",
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard/--no-dashboard",
        help="Whether the gateway serves a dashboard at /dashboard, where it is installed.",
    ),
]


def tracker_urls(given: Sequence[str] | None) -> tuple[str, ...]:
    """The addresses that ``--tracker`` was given, in their order, each once."""
    urls = [url.strip().rstrip("/") for item in given or () for url in item.split(",")]
    return tuple(dict.fromkeys(url for url in urls if url))


def typed(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was given at the command line itself, not by a variable or the settings' file."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def port(what: str) -> Any:
    """A ``--port`` option for ``what``."""
    return typer.Option("--port", min=0, max=65535, help=f"Port of {what}; 0 takes any free one.")
