"""The routes of the FastAPI application, each for whoever may ask for it.

Before anything of a request is read but its head: who has the key of the route's category, and, for
a route that changes models or settings, whether a web page had a browser send the request that is
not allowed to. A client that goes before its request is there as a whole is no error.
"""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from headrace.observability.statistics import OTHER
from headrace.transports.http.access import OPERATION
from headrace.transports.http.categories import category_of, changes, key_error
from headrace.transports.http.head import opens
from headrace.wire.header_rules import AllowedOrigins, Category, Key

log = logging.getLogger(__name__)


def restricted_routes(keys: Mapping[Category, Key], origins: AllowedOrigins) -> type[APIRoute]:
    """The class of an application's routes; one without a category raises `LookupError`."""

    class RestrictedRoute(APIRoute):
        """Answers whoever has the key of its category, for pages of `origins` alone."""

        def __init__(self, path: str, *args: Any, **options: Any) -> None:
            super().__init__(path, *args, **options)
            category = category_of(path)
            self._key = None if category is None else keys.get(category)
            self._operation = category or OTHER
            self._changes = changes(path, self.methods or ())

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            """Starlette's routing interface; raises `Restricted`."""
            scope[OPERATION] = self._operation
            if self._key is not None and not opens(self._key, scope["headers"]):
                raise key_error(self._key)
            if self._changes:
                origins.check(scope["headers"], scope["server"])
            try:
                await super().handle(scope, receive, send)
            except ClientDisconnect:
                log.debug("the client of %s went before its request was there", scope["path"])

    return RestrictedRoute
