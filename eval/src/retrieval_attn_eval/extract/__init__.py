"""Dense extraction: many facts of a long text are asked for at once, as JSON."""
