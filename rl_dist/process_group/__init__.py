"""The process group of all ranks: joining, collective calls, timing and watchdog."""
