"""The routes of the FastAPI application, each for whoever has the key of its category."""

from collections.abc import Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from headrace.transports.http.categories import category_of, key_error
from headrace.transports.http.head import opens
from headrace.wire.header_rules import Category, Key


def restricted_routes(keys: Mapping[Category, Key]) -> type[APIRoute]:
    """The class of an application's routes; one without a category raises `LookupError`."""

    class RestrictedRoute(APIRoute):
        """Answers whoever has the key of its category."""

        def __init__(self, path: str, *args: Any, **options: Any) -> None:
            super().__init__(path, *args, **options)
            category = category_of(path)
            self._key = None if category is None else keys.get(category)

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            """Starlette's routing interface; raises `Restricted`."""
            if self._key is not None and not opens(self._key, scope["headers"]):
                raise key_error(self._key)
            await super().handle(scope, receive, send)

    return RestrictedRoute
