"""Tiny random models of every type that mlx-lm has, and what a cluster makes of them: docs/models.md."""
