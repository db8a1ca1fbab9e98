"""The parts that every service process needs: settings, error statuses, health, metrics, logs."""
