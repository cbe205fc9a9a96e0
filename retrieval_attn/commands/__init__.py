"""Commands for one model and one text: ask, plan, verify. Each module has `add_arguments` and `run`."""
