"""Probes: attach to a live model, keep running statistics, answer with results. `measure` is the loop."""
