"""How fast an engine is. `python -m engine.bench --help`."""
