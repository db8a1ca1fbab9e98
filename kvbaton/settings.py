"""The settings of an ``LLM``."""

from launch.settings import LocalSettings, LogLevel


class LLMSettings(LocalSettings):
    """The settings of ``kvbaton up``, with one aggregated worker as the default."""

    log_level: LogLevel = "error"
    """Lowest level of the workers' log records that are written."""

    @property
    def pools(self) -> tuple[int, int, int]:
        """The numbers of prefill, decode and aggregated workers."""
        if self.prefill is None and self.decode is None and self.both is None:
            return 0, 0, 1
        return super().pools
