"""`meshnet node --layers auto`: asks the tracker what to hold, loads it, and follows when the tracker thinks otherwise.

The composition alone: what goes where is the tracker's decision, how a node moves is `meshnet_node.shard_mover`'s.
Importing it imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from meshnet_cli import trust
from meshnet_cli.node import Place
from meshnet_cli.node_shards import WeightsWanted, offered
from meshnet_cli.progress import ProgressReporter
from meshnet_core import __version__
from meshnet_core.errors import InvalidInputError, MeshnetError, TrackerUnreachableError, UnknownNodeError
from meshnet_core.ids import mint_boot_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo
from meshnet_core.placeable import Placeable
from meshnet_core.trackers import Trackers
from meshnet_node.compile_choice import compiles_steps, takes_kernels
from meshnet_node.cpu_threads import take_cpu_threads
from meshnet_node.device_memory import free_bytes
from meshnet_node.model_files import open_model
from meshnet_node.placeable_model import PlaceableModel
from meshnet_node.shard_mover import ShardMover
from meshnet_node.shard_pool import ShardPool
from meshnet_node.step_kernels import step_kernels

if TYPE_CHECKING:
    from meshnet_node.hop_service import HopService
    from meshnet_node.offered_shard import OfferedShard
    from meshnet_node.registration import Registration

MEMORY_SHARE = 0.8  # of what is free at the start: the rest is for frames, the interpreter and whatever else runs
ASK_S = 0.5  # between two questions while there is nothing to hold yet
FOLLOW_S, MOVING_S = 3.0, 0.5  # between two later ones, and while a move is under way

logger = logging.getLogger(__name__)


class AutoLayers:
    """One node's layers of one model, as the tracker wants them.

    Args:
        model: MODEL as typed.
        memory: bytes that weights and room for sessions may take; a share of what is free if None.
        weights, device: as typed.
        report: told how far long work is, until the node serves.

    Attributes:
        boot, started: the node's boot id, and when that was, in milliseconds since 1970: the same while it waits and
            when it serves.

    Raises:
        MeshnetError: the model cannot be opened or served in pieces; or more memory than there is.
    """

    def __init__(
        self, model: str, memory: int | None, weights: WeightsWanted, device: str, report: ProgressReporter
    ) -> None:
        self.boot, self.started = mint_boot_id(), time.time_ns() // 1_000_000
        self._given, self._weights = model, weights
        self._report: ProgressReporter | None = report
        self._model = PlaceableModel(
            open_model(model).rounded(weights.quantize),
            dtype=weights.dtype,
            device=device,
            quantize=weights.quantize,
        )
        compiles_steps(weights.compile, self._model.device)  # refused now where it cannot be had
        free = free_bytes(self._model.device)
        if memory is not None and memory > free:
            raise InvalidInputError(
                f"--memory {memory} is more than the {free} bytes that are free on {self._model.device.type}"
            )
        self._memory = int(MEMORY_SHARE * free) if memory is None else memory
        self._facts = self._model.facts()
        self._first: LayerRange | None = None
        self._mover: ShardMover | None = None

    def placeable(self) -> Placeable:
        """As it is announced."""
        target = self._first if self._mover is None else self._mover.target
        return Placeable(self._memory, self._model.dtype, self._facts, target)

    def status(self) -> dict[str, Any]:
        """JSON-ready, for ``/healthz``."""
        place, mover = self.placeable(), self._mover
        return {
            "memory": place.memory,
            "target": None if place.target is None else str(place.target),
            "moving": mover is not None and mover.is_moving,
            "moves": 0 if mover is None else mover.moves,
            "failed_moves": 0 if mover is None else mover.failures,
        }

    async def load(self, place: Place) -> ShardPool:
        """Wait for layers from the tracker, and load them; the node is announced, without shards, meanwhile.

        Raises:
            MeshnetError: no tracker answers at first, it refuses this node, or the shard cannot be loaded.
        """
        tls = trust.client_tls(place.identity)
        client = Trackers(place.trackers, tls=tls)
        # Built, if need be, and checked while the tracker thinks: they are the same whatever the layers are.
        getting = asyncio.create_task(asyncio.to_thread(self._get_kernels), name="get kernels")
        try:
            try:
                self._first = layers = await self._asked(client, place)
                async with self._announcing(client, place):
                    await getting
                    return await asyncio.to_thread(self._load, layers)
            except BaseException:
                with suppress(MeshnetError):
                    await client.leave(place.node_id, boot=self.boot)
                raise
        finally:
            getting.cancel()
            await client.close()

    @asynccontextmanager
    async def following(
        self, shards: ShardPool, service: HopService, registration: Registration, client: Trackers, node_id: str
    ) -> AsyncIterator[None]:
        """While the block runs, do what the tracker wants."""
        self._report = None
        self._mover = mover = ShardMover(
            shards,
            self._first or next(iter(shards)).layers,
            make_offer=self._offer,
            fits_beside=lambda offer: self._fits(offer, shards),
            announce=registration.beat,
            make_idle=lambda shard: service.store.evict_idle(lambda held: held.shard is shard),
        )
        following = asyncio.create_task(self._follow(mover, service, client, node_id), name="follow the tracker")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await mover.close()

    # -- before it serves ---------------------------------------------------------------------------------------------

    def _info(self, place: Place) -> NodeInfo:
        return NodeInfo(
            node_id=place.node_id,
            url=place.url,
            boot=self.boot,
            version=__version__,
            device=self._model.device.type,
            shards=(),
            started=self.started,
            placement=self.placeable(),
        )

    async def _asked(self, client: Trackers, place: Place) -> LayerRange:
        if self._report is not None:
            self._report("", "asking the tracker for layers", 0, 1)
        heard = False  # by any tracker: from then on one that restarts, or is away for a while, is waited for
        while True:
            try:
                await client.heartbeat(self._info(place))
                heard = True
                if (layers := (await client.wish(place.node_id, boot=self.boot)).layers) is not None:
                    logger.info("to hold layers %s of %s", layers, self._facts.model)
                    return layers
            except UnknownNodeError:
                logger.debug("the tracker restarted just now")
            except TrackerUnreachableError as error:
                if not heard:
                    raise
                logger.debug("not told what to hold: %s", error.message)
            await asyncio.sleep(ASK_S)

    @asynccontextmanager
    async def _announcing(self, client: Trackers, place: Place) -> AsyncIterator[None]:
        async def beat() -> None:
            while True:
                with suppress(MeshnetError):
                    await client.heartbeat(self._info(place))
                await asyncio.sleep(FOLLOW_S)

        beating = asyncio.create_task(beat(), name="announce while loading")
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    def _load(self, layers: LayerRange) -> ShardPool:
        pool = ShardPool([self._offer(layers)], free_bytes=partial(free_bytes, self._model.device))
        pool.load_first(lambda offer, done, total: self._show(f"loading {offer}", done, total))
        return pool

    def _get_kernels(self) -> None:
        take_cpu_threads(1)
        if takes_kernels(self._weights.compile) and self._model.may_run_native:
            step_kernels()

    def _offer(self, layers: LayerRange) -> OfferedShard:
        files = self._model.files
        folder = self._model.prepare(layers, self._show)
        return offered(self._model.plan(folder, layers), self._given, files, self._weights)

    def _show(self, what: str, done: int, total: int) -> None:
        if self._report is not None:
            self._report("", what, done, total)

    # -- while it serves ----------------------------------------------------------------------------------------------

    def _fits(self, offer: OfferedShard, shards: ShardPool) -> bool:
        beside = shards.loaded_bytes + offer.weight_bytes <= self._memory
        return beside and offer.weight_bytes <= free_bytes(self._model.device)

    async def _follow(self, mover: ShardMover, service: HopService, client: Trackers, node_id: str) -> None:
        said = ""
        while True:
            await asyncio.sleep(MOVING_S if mover.is_moving else FOLLOW_S)
            try:
                wish = await client.wish(node_id, boot=self.boot)
            except MeshnetError as error:  # the heartbeats tell of a tracker that is away
                if error.message != said:
                    logger.info("not told what to hold: %s", error.message)
                said = error.message
                continue
            said = ""
            if not service.draining:
                mover.told(wish)
