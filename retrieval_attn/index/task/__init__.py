"""What a search needs to be a task of a step: the step's descriptor, atomics, stored rows, candidate lists."""
