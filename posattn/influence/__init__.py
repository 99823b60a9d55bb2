"""Influence: how much each input position moves the prediction, and how two such curves compare."""
