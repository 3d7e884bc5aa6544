"""Validate options and run the stages that ``export`` and ``optimize`` share."""
