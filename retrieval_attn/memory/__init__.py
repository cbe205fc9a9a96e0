"""How much memory is needed and free. Arithmetic; nothing is loaded."""
