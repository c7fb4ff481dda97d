"""Registers with verl when it imports this, by VERL_USE_EXTERNAL_MODULES=workbench.engines.verl_plugin."""

from .verl import register_losses, register_trainer

register_losses()
register_trainer()
