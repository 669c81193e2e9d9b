"""Forecasts of a training step from shapes and the config, without weights and without a process group."""
