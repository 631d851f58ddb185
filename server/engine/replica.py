"""One engine of a group of replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...runtime.config.engine import EngineConfig
from ...runtime.core.messages import LoadAdapter, UnloadAdapter
from ...runtime.tokenizer.output_processor import RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from .client import EngineClient
from .prefix_index import BLOCK, PrefixIndex
from .state import EngineState

logger = logging.getLogger(__name__)

_INDEX_TOKENS = 2**22  # Maximum tokens of the prefix index of a replica.


class Replica(EngineClient):
    """One engine of a group.

    `ended` is called when the process has ended, before the requests of this replica are ended.
    """

    ended: Callable[[Replica], None]

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, **settings: Any) -> None:
        super().__init__(config, tokenizer, **settings)
        self.number = config.replica
        self.prefixes = PrefixIndex(_INDEX_TOKENS // BLOCK)

    def take(self, request: RequestState) -> None:
        """Add a request. The caller has already checked that there is room."""
        self._send(request.to_message())
        self._requests[request.rid] = request
        self._idle.clear()

    def resume(self, request: RequestState) -> None:
        """Resume a request of another replica. If it cannot be sent, it ends with an error.

        If its adapter was unloaded meanwhile, this replica loads it for the request.
        """
        self._requests[request.rid] = request
        self._idle.clear()
        known = self._adapters.get(request.adapter)
        # A replica that is not ready gets adapters and requests when it is.
        if (
            known is None
            or known.identity not in self._unloaded
            or self.state is not EngineState.READY
        ):
            self._send_again(request.rid, request)
            return
        name, path, identity = known.name, known.path, known.identity
        self._send_unasked(LoadAdapter(name=name, path=path, identity=identity))
        self._send_again(request.rid, request)
        self._send_unasked(UnloadAdapter(identity=identity))

    def _send_unasked(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Send a message and ignore its answer."""
        answer = asyncio.get_running_loop().create_future()
        answer.cancel()
        self._adapter_answers.append(answer)
        self._send(message)

    def hand_over(self, *, suspects: bool) -> list[RequestState]:
        """Remove and return the unfinished requests, which another replica resumes.

        Without `suspects`, requests that may have crashed the process stay. The next process of
        this replica gets them one at a time.
        """
        leaving = [request for request in self._requests.values() if suspects or request.delivered]
        for request in leaving:
            del self._requests[request.rid]
            request.delivered = False
        if not self._requests:
            self._idle.set()
        return leaving

    def _became_ready(self, info: Any) -> None:
        super()._became_ready(info)
        self.prefixes.bound(max(1, min(info.kv_tokens, _INDEX_TOKENS) // BLOCK))

    def _survive_crash(self, code: int) -> None:
        logger.error("replica %d:", self.number)
        super()._survive_crash(code)
        self._reset_stats()
        self.ended(self)

    def _give_up(self, reason: str) -> None:
        self.state = EngineState.FAILED
        self.failure = reason
        try:
            self.ended(self)
        except Exception:
            logger.exception(
                "requests of replica %d could not be resumed on other replicas", self.number
            )
        super()._give_up(reason)
        self._reset_stats()

    def _reset_stats(self) -> None:
        self.stats = replace(
            self.stats,
            running_requests=0,
            queued_requests=0,
            kv_tokens_used=0,
            kv_tokens_cached=0,
            kv_tokens_touched=0,
            kv_tokens_total=0 if self.state is EngineState.FAILED else self.stats.kv_tokens_total,
            states_used=0,
            states_total=0 if self.state is EngineState.FAILED else self.stats.states_total,
        )
