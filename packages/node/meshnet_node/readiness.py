"""Whether a node takes new sessions: what its ``/readyz`` says. Pure; knows no HTTP."""

from __future__ import annotations

from meshnet_node.registration import RegistrationState


def why_not_ready(state: RegistrationState, *, loaded_shards: int, draining: bool) -> str | None:
    """Why new sessions are not welcome yet, or no more; None where they are.

    Args:
        state: how the last heartbeat went.
        loaded_shards: in memory; more may be loaded when they are asked for.
        draining: the node is about to leave.
    """
    if draining:
        return "this node is draining and takes no new sessions"
    if loaded_shards < 1:
        return "no layers are loaded"
    if state is not RegistrationState.REGISTERED:
        return f"this node is not registered with a tracker (last heartbeat: {state.value}); its log says why"
    return None
