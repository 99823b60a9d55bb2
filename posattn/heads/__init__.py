"""Heads: positional or symbolic, by which frequencies, and does it matter."""

from posattn.heads.scores import HeadScores, score_heads

__all__ = ["HeadScores", "score_heads"]
