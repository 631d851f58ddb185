"""An engine of vectors or scores in the process of the test: the real scheduler and model, behind
the real client, without sockets.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
from http_fixtures import client_of

from piecework.runtime.core.messages import AbortRequests
from piecework.runtime.core.pooling_messages import PoolingReady, PoolRequest
from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.folder import read_folder
from piecework.runtime.pooling.model import PoolingModel
from piecework.runtime.pooling.scheduler import PoolingScheduler
from piecework.runtime.process.ipc import decode, encode
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.config.pooling import PoolingServerConfig
from piecework.server.pooling.client import PoolingClient
from piecework.server.pooling_service import create_pooling_app


class PoolingHere(PoolingClient):
    """Each message goes over the wire's format; a step runs once the loop is free."""

    def __init__(self, model: PoolingModel, **settings: Any) -> None:
        path = str(model.folder.path)
        super().__init__(model.config, load_tokenizer(path), **settings)
        self.scheduler = PoolingScheduler(model)
        self.paused = False
        self._handle(PoolingReady(info=model.info()))

    def _send(self, message: Any) -> None:
        match decode(encode(message)):
            case PoolRequest() as request:
                self.scheduler.add(request)
                asyncio.get_running_loop().call_soon(self.step)
            case AbortRequests(rids=rids):
                self.scheduler.abort(rids)

    def step(self) -> None:
        if self.scheduler.has_work and not self.paused:
            self._handle(decode(encode(self.scheduler.step())))
            asyncio.get_running_loop().call_soon(self.step)


def load(folder: object, **settings: Any) -> PoolingModel:
    return PoolingModel(PoolingConfig(model_path=str(folder), num_threads=1, **settings))


def client_here(model: PoolingModel, **settings: Any) -> tuple[httpx.AsyncClient, PoolingHere]:
    """A client of an application over the model, which is called tiny; and its engine."""
    of_server = ("batch_dir", "api_keys", "log_requests")
    own = {name: settings.pop(name) for name in of_server if name in settings}
    engine = PoolingHere(model, **settings)
    config = PoolingServerConfig(
        served_model_name="tiny", engine=model.config, **{"batch_dir": "none", **own}
    )
    folder = read_folder(model.config.model_path)
    app = create_pooling_app(engine, config, folder)
    if app.state.accounts is not None:
        # What a key may use fills up again with time, of which a busy machine takes much.
        app.state.accounts.now = partial(float, app.state.accounts.now())
    return client_of(app), engine
