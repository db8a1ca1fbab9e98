"""/v1/models: the served model."""

from aiohttp import web

from contract.errors import NotFoundError
from router.http.bodies.body import Json
from router.intake.model_source import ModelSource
from router.workers.registry import Registry


class ModelEndpoints:
    """Describes the model of ``models`` and the limits of the workers in ``registry``."""

    def __init__(self, models: ModelSource, registry: Registry) -> None:
        self._models = models
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        """Return both paths."""
        return [web.get("/v1/models", self.list_models), web.get("/v1/models/{model:.+}", self.show_model)]

    async def list_models(self, _: web.Request) -> web.Response:
        """GET /v1/models; empty while the model is not known yet."""
        return web.json_response({"object": "list", "data": self._all()})

    async def show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        if not self._models.is_known or name not in self._models.names:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist.", param="model", code="model_not_found"
            )
        return web.json_response(self._model(name))

    def _all(self) -> list[Json]:
        return [self._model(name) for name in self._models.names] if self._models.is_known else []

    def _model(self, name: str) -> Json:
        card = self._models.card()
        return {
            "id": name,
            "object": "model",
            "created": self._models.known_since,
            "owned_by": "kvbaton",
            "max_model_len": self._registry.max_model_len(card.max_model_len),
            "embeds_only": self._registry.embeds_only,
        }
