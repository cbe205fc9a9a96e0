"""Many requests at once: their order, their memory, and one forward for all of them."""
