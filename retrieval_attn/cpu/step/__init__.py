"""One layer's search and attention as tasks for the pool of threads."""
