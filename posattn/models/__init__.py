"""Models: a loaded model seen one way. `as_model` accepts whatever the user holds, `load_model` a name or path."""
