"""The settings of an ``LLM``."""

from launch.settings import LocalSettings, LogLevel


class LLMSettings(LocalSettings):
    """The settings of ``kvbaton up``, but with one aggregated worker where no pool is given."""

    log_level: LogLevel = "error"
    """The least important log records of the workers that are written."""

    @property
    def pools(self) -> tuple[int, int, int]:
        """Return the numbers of prefill, decode and aggregated workers."""
        if self.prefill is None and self.decode is None and self.both is None:
            return 0, 0, 1
        return super().pools
