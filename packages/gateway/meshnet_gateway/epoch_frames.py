"""The frames of one epoch, as pure functions of the token ids: how a prefill is cut, what a decode step carries.

Knows the session's terms and no hop's state; `generation` sends what is made here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshnet_core.frames import PROTOCOL_MAX, Frame, Phase
from meshnet_gateway.prefill_cut import PrefillCut
from meshnet_gateway.recovery import Replay


@dataclass(frozen=True, slots=True)
class EpochFrames:
    """Makes frames for the first hop of a route.

    Attributes:
        session, epoch: of every frame.
        start_layer: the first hop's effective start.
        deadline_ms: for each step.
        cache: False on the stateless path.
        protocol: the route's.
    """

    session: str
    epoch: int
    start_layer: int
    deadline_ms: int
    cache: bool
    protocol: int = PROTOCOL_MAX

    def prefill(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        cut: PrefillCut,
        replay: Replay,
        *,
        begin: int = 0,
        cuts: Sequence[int] = (),
    ) -> Iterator[Frame]:
        """The frames that make the state of prompt and answer so far; only the last one samples.

        prompt 0..599, answer 600..602       0-255    256-511    512-599    600   601   602
        fast                                 prefill  prefill    prefill to 602 ......*
        exact, as they first went            prefill  prefill    prefill    dec.  dec.  decode*
        fast, on a held prefix of 500                 resume at 500 to 602 ...........*

        Args:
            prompt, answer: token ids.
            cut: into prefill frames.
            replay: how the answer goes.
            begin: positions that every hop has from a held prefix, within the prompt if the replay is exact.
            cuts: positions at which a frame must end.
        """
        tokens = (*prompt, *answer)
        in_chunks = len(prompt) if replay is Replay.EXACT else len(tokens)
        for start, end in cut.chunks(begin, in_chunks, cuts):
            phase = Phase.RESUME if start == begin > 0 else Phase.PREFILL
            yield self._frame(phase, start, tokens[start:end], sample=end == len(tokens))
        for at in range(in_chunks, len(tokens)):
            yield self._frame(Phase.DECODE, at, tokens[at : at + 1], sample=at + 1 == len(tokens))

    def decode(self, position: int, token: int) -> Frame:
        """The newest position, and nothing else."""
        return self._frame(Phase.DECODE, position, (token,), sample=True)

    def verify(self, position: int, tokens: Sequence[int], draft: Sequence[int]) -> Frame:
        """Tokens of the answer up to the newest one, and drafted ones behind it, sampled after the newest and each."""
        frame = self._frame(Phase.VERIFY, position, (*tokens, *draft), sample=True)
        return replace(frame, sample=len(draft) + 1, draft=tuple(draft))

    def whole(self, tokens: Sequence[int]) -> Frame:
        """A step of the stateless path."""
        return self._frame(Phase.PREFILL, 0, tokens, sample=True)

    def _frame(self, phase: Phase, position: int, tokens: Sequence[int], *, sample: bool) -> Frame:
        return Frame(
            session=self.session,
            epoch=self.epoch,
            hop_index=0,
            start_layer=self.start_layer,
            phase=phase,
            position=position,
            seq_len=len(tokens),
            sample=int(sample),
            deadline_ms=self.deadline_ms,
            cache=self.cache,
            body=struct.pack(f"<{len(tokens)}i", *tokens),
            protocol=self.protocol,
        )
