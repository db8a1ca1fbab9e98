"""The Python face of kvbaton: ``from kvbaton import LLM``. Importing it loads neither torch nor a model."""

from importlib.metadata import version

__version__ = version("kvbaton")
