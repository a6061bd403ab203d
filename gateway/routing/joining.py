"""Workers that register themselves, on a token that they share with the gateways."""

from __future__ import annotations

import time

from pydantic import BaseModel, ConfigDict, ValidationError

from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.runtime import Runtime
from agentkv_serve.gateway.settings import WorkerSettings
from agentkv_serve.joining import CLOCK_SKEW, verify


class Announcement(BaseModel):
    """A worker's message. `time`: Unix seconds of the worker's clock."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    time: float
    leaving: bool = False


def read_announcement(token: str, body: bytes, signature: str, now: float | None = None) -> Announcement:
    """The announcement in `body`. Raises ApiError: 401 for a wrong signature or an old message, 400 for the rest."""
    if not verify(token, body, signature):
        raise ApiError(401, "invalid_signature", "The join token does not fit: give workers and gateways the same.")
    try:
        said = Announcement.model_validate_json(body)
        WorkerSettings(url=said.url)
    except ValidationError as error:
        raise bad_request(str(error.errors(include_url=False, include_input=False)[0]["msg"])) from None
    if abs((time.time() if now is None else now) - said.time) > CLOCK_SKEW:
        raise ApiError(401, "stale_announcement", "The message is too old or from the future: set the clocks right.")
    return said


async def join(runtime: Runtime, said: Announcement) -> Worker | None:
    """Take a worker in, note that it is still there, or let it go (None). A configured worker is left as it is."""
    settings = WorkerSettings(url=said.url)
    known = next((worker for worker in runtime.registry if worker.url == settings.url), None)
    if known is not None and not known.shared:
        return known
    if known is not None and said.time <= known.announced:
        raise ApiError(401, "stale_announcement", "A newer message of this worker was heard already.")
    if said.leaving:
        if known is not None:
            await runtime.remove_worker(known)
        return None
    worker = known or runtime.add_worker(settings)
    worker.announced = said.time
    await runtime.share_worker(worker, settings)
    if not worker.healthy:
        await runtime.registry.check_one(worker)
    return worker
