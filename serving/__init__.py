"""What every process needs to be a service: settings, errors and statuses, health, metrics, logs."""
