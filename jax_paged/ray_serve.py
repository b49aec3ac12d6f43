"""Entry point for Ray Serve: a Serve config sets `jax_paged.ray_serve:build` as its import path."""

from jax_paged.server.ray_serve.app import build

__all__ = ["build"]
