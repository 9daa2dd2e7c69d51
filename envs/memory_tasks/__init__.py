"""Tasks that need memory."""
