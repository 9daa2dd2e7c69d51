"""The process group: ranks and their collectives, watched; how processes meet and end."""
