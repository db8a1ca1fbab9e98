"""The launchers of ``kvbaton autoscaler``, by their names.

To add a launcher, as for Kubernetes or Ray: write a module beside ``local.py``, or a folder if it needs several, with a
class that has the methods of ``Launcher``. Write a function here that opens it, and enter that into ``_LAUNCHERS``; the
setting ``launcher`` then accepts its name. Add its settings, and its name in the help of ``launcher``, to
``launch/service_settings.py``, and its name to the import contract of the launchers in ``pyproject.toml``.

``local.py`` is not opened here: its workers are processes of the supervisor that ``kvbaton up --autoscale`` runs itself
(``scaled_cluster.py``), so ``up`` has no choice and no such setting.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from autoscaler.launchers.launcher import Launcher
from contract.errors import SettingError
from launch.service_settings import AutoscalerCommand

# Each function imports its launcher itself: the libraries of the others may be missing.


@asynccontextmanager
async def _open_docker(settings: AutoscalerCommand) -> AsyncIterator[Launcher]:
    from autoscaler.launchers.docker.engine import open_engine
    from autoscaler.launchers.docker.launcher import DockerLauncher

    async with open_engine(settings.docker_socket) as engine:
        yield DockerLauncher(engine, settings.project)


_LAUNCHERS: dict[str, Callable[[AutoscalerCommand], AbstractAsyncContextManager[Launcher]]] = {
    "docker": _open_docker,
}


def open_launcher(name: str, settings: AutoscalerCommand) -> AbstractAsyncContextManager[Launcher]:
    """Open a launcher by name. Raises SettingError for an unknown one; entering raises KvbatonError if it cannot start."""
    if name not in _LAUNCHERS:
        raise SettingError(f"launcher is {name!r}; choose one of {', '.join(_LAUNCHERS)}", param="launcher")
    return _LAUNCHERS[name](settings)
