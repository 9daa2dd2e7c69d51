"""The process group: ranks and their collectives, watched."""
